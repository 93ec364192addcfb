"""Hard concrete gates: exactly zero or one with a trainable probability, for L0 regularization.

    u ~ U(0, 1)    s = sigmoid((log u - log(1 - u) + log alpha) / beta)    z = min(1, max(0, s (zeta - gamma) + gamma))
    P(z != 0) = sigmoid(log alpha - beta log(-gamma / zeta))               the penalty is lambda times the sum of it
    after training:  z = min(1, max(0, sigmoid(log alpha) (zeta - gamma) + gamma))

with beta = 2/3, gamma = -0.1, zeta = 1.1; a layer computes with w z. Louizos, Welling, Kingma 2018, Learning Sparse
Neural Networks through L0 Regularization, arXiv 1712.01312.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoestring.training.sparse.gated_weights import GateRule

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
OPEN = math.log(0.9 / 0.1)  # initial log alpha of every gate: a dropout rate of 0.1
CLOSED = math.log(-GAMMA / ZETA)  # gates with log alpha up to this, about -2.4, are closed after training
SURE = 1e-6  # draws stay this far from 0 and 1


def sampled_gate(log_alpha: Tensor, u: Tensor) -> Tensor:
    """z for u uniform in (0, 1).

    >>> sampled_gate(torch.zeros(3), torch.tensor([0.1, 0.5, 0.9]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    s = torch.sigmoid((torch.logit(u) + log_alpha) / BETA)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z != 0)."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def settled_gate(log_alpha: Tensor) -> Tensor:
    """z after training."""
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


HARD_CONCRETE = GateRule(
    first=OPEN,
    draw=lambda like, generator: torch.empty_like(like).uniform_(SURE, 1 - SURE, generator=generator),
    used=lambda weight, gate, noise: weight * sampled_gate(gate, noise),
    penalty=lambda weight, gate: open_probability(gate).sum(),
    factor=lambda weight, gate: settled_gate(gate),
    scores=lambda weight, gate: gate - CLOSED,
)
