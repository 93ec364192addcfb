"""Steering: adjust the penalty's weight so that a given share of gates closes.

Published methods fix the penalty's weight and accept the resulting share of zeros. Here the share is fixed. Let m be
the score below which the schedule's share of gates lies (0 or less: that many are closed). At each of n looks at the
schedule,

    log lambda  <-  log lambda + gain / n min(1, max(-1, m))        gain 15

so lambda grows while too few gates are closed, even before the first one closes, and shrinks while too many are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.core.model.masks import zeros_of

GAIN = 15.0


def margin(scores: Sequence[Tensor], share: float) -> Tensor:
    """The score below or at which this share of all scores lies; gates with scores of 0 or less are closed.

    >>> margin([torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 3.0])], share=0.5)
    tensor(0.5000)
    """
    whole = torch.cat([one.flatten() for one in scores])
    return whole.kthvalue(max(zeros_of(len(whole), share), 1)).values


def steer(pressure: Tensor, margin: Tensor, looks: int) -> Tensor:
    """The penalty's new weight after one of `looks` looks at the margin.

    >>> [round(float(steer(torch.tensor(1.0), torch.tensor(m), looks=100)), 3) for m in (4.0, -0.5)]
    [1.162, 0.928]
    """
    return pressure * torch.exp(GAIN / looks * margin.to(pressure.dtype).clamp(-1.0, 1.0))
