"""Sparse variational dropout: every weight has its own noise, and weights that are mostly noise become zero.

    w ~ N(theta, sigma^2)    log alpha = log sigma^2 - log theta^2    after training: theta where log alpha < 3, else 0
    KL = k1 - k1 sigmoid(k2 + k3 log alpha) + log(1 + 1 / alpha) / 2        k1, k2, k3 = 0.63576, 1.87320, 1.48695

The KL divergence of posterior and prior is approximated, with the constant that makes it 0 at infinite alpha. A step's
noise is drawn once for all samples of the batch; the paper draws it per sample for the outputs of a layer, which gives
gradients with less variance. The penalty only changes sigma: its gradient with respect to theta is unbounded near zero,
and a steered penalty made weights infinite. Molchanov, Ashukha, Vetrov 2017, Variational Dropout Sparsifies Deep Neural
Networks, arXiv 1701.05369.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.training.sparse.gated_weights import GateRule

K1, K2, K3 = 0.63576, 1.87320, 1.48695
THRESHOLD = 3.0  # weights with log alpha from here on are zero
QUIET = -10.0  # initial log sigma^2
MOST = 10.0  # log alpha is clamped to this range around 0
TINY = 1e-8  # added to squares before a logarithm or root


def kl(log_alpha: Tensor) -> Tensor:
    """The approximate KL of each weight.

    >>> kl(torch.tensor([-4.0, 0.0, 3.0]))
    tensor([2.6342, 0.4312, 0.0254])
    """
    return K1 - K1 * torch.sigmoid(K2 + K3 * log_alpha) + 0.5 * nn.functional.softplus(-log_alpha)


def log_alpha(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    return (log_sigma2 - torch.log(weight.square() + TINY)).clamp(-MOST, MOST)


VARIATIONAL = GateRule(
    first=QUIET,
    draw=lambda like, generator: torch.empty_like(like).normal_(generator=generator),
    used=lambda weight, gate, noise: weight + torch.exp(0.5 * gate) * noise,
    penalty=lambda weight, gate: kl(log_alpha(weight.detach(), gate)).sum(),
    factor=lambda weight, gate: (log_alpha(weight, gate) < THRESHOLD).to(weight.dtype),
    scores=lambda weight, gate: THRESHOLD - log_alpha(weight, gate),
)
