"""Confidence of a classifier for a row: three measures of its logits, from 0 to 1.

    probability   max_c p_c                            p = softmax(logits)
    entropy       1 + sum_c p_c log p_c / log C         1 minus the entropy / its maximum
    margin        p_first - p_second

Teerapittayanon, McDanel, Kung: BranchyNet, 2016, arXiv 1709.01686 (entropy); Schuster et al.: Confident Adaptive Language Modeling, 2022,
arXiv 2207.07061 (margin, which they call softmax response).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shoestring.core.errors import Mistake


def probability(logits: Tensor) -> Tensor:
    """
    >>> probability(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.5, 1.0]
    """
    return torch.softmax(logits, 1).amax(1)


def entropy(logits: Tensor) -> Tensor:
    """
    >>> entropy(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.0, 1.0]
    """
    logarithms = torch.log_softmax(logits, 1)
    return 1 + (logarithms.exp() * logarithms).sum(1) / math.log(logits.shape[1])


def margin(logits: Tensor) -> Tensor:
    """
    >>> margin(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.0, 1.0]
    """
    first, second = torch.softmax(logits, 1).topk(2, 1).values.unbind(1)
    return first - second


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {"probability": probability, "entropy": entropy, "margin": margin}


def measure_named(name: str) -> Callable[[Tensor], Tensor]:
    if name not in MEASURES:
        raise Mistake(f"measure={name!r}: there are {', '.join(MEASURES)}")
    return MEASURES[name]


def check_logits(logits: Tensor, whose: str) -> Tensor:
    """Check that logits have the shape (rows, classes)."""
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise Mistake(
            f"{whose} gives a tensor of shape {tuple(logits.shape)}, and rows leave by how sure their class is: it must be "
            f"(rows, classes) with two classes or more; an output for every token or a number can't leave early"
        )
    return logits
