"""A penalty that is as strong as it must be for a share of zeros.

The methods with gates that are trained take a weight of their penalty and give whatever share comes of it. Here the
share is given. Let m be how far the weight is from being closed that the schedule's share of weights lies below; each
time the schedule is looked at,

    log lambda  <-  log lambda + gain / n min(1, max(-1, m))        n looks in all, gain 15

so that lambda grows while too few are closed, before even the first one is, and shrinks while too many are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.core.masks import zeros_of

GAIN = 15.0


def margin(scores: Sequence[Tensor], share: float) -> Tensor:
    """The score that this share of all scores is not above; gates with scores of 0 and less are closed.

    >>> margin([torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 3.0])], share=0.5)
    tensor(0.5000)
    """
    whole = torch.cat([one.flatten() for one in scores])
    return whole.kthvalue(max(zeros_of(len(whole), share), 1)).values


def steered(pressure: Tensor, margin: Tensor, looks: int) -> Tensor:
    """The penalty's weight after a look at the margin, one of so many.

    >>> [round(float(steered(torch.tensor(1.0), torch.tensor(m), looks=100)), 3) for m in (4.0, -0.5)]
    [1.162, 0.928]
    """
    return pressure * torch.exp(GAIN / looks * margin.to(pressure.dtype).clamp(-1.0, 1.0))
