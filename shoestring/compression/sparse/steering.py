"""A penalty that is as strong as it must be for a share of zeros.

The methods with gates that are trained take a weight of their penalty and give whatever share comes of it. Here the share is given. Let m
be how far the weight is from being closed that the schedule's share of weights lies below; each time the schedule is looked at,

    log lambda  <-  log lambda + gain / n min(1, max(-1, m))        n looks in all, gain 15

so that lambda grows while too few are closed, before even the first one is, and shrinks while too many are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.compression.sparse.masks import zeros_of

GAIN = 15.0


def margin(scores: Sequence[Tensor], share: float) -> float:
    """The score that this share of all scores is not above; gates with scores of 0 and less are closed.

    >>> margin([torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 3.0])], share=0.5)
    0.5
    """
    whole = torch.cat([one.flatten() for one in scores])
    return float(whole.kthvalue(max(zeros_of(len(whole), share), 1)).values)


def steered(pressure: float, margin: float, looks: int) -> float:
    """The penalty's weight after a look at the margin, one of so many.

    >>> round(steered(1.0, margin=4.0, looks=100), 3), round(steered(1.0, margin=-0.5, looks=100), 3)
    (1.162, 0.928)
    """
    return pressure * math.exp(GAIN / looks * min(max(margin, -1.0), 1.0))
