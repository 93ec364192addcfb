"""The loop. It never learns about a technique: techniques replace the parts that it calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.user_code.seams import calls_user


@calls_user("optimizer")
def steps(run: Run, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Train, yielding the loss of every step."""
    for batch in batches:
        run.optimizer.zero_grad(set_to_none=True)
        loss = run.gradients(run, batch)
        run.update(run)
        yield loss


def finite(loss: float, number: int) -> float:
    """The loss of a step as a number; refused if it is not finite."""
    if not math.isfinite(loss):
        raise Mistake(
            f"the loss became {loss} in step {number}: lower the learning rate, clip the gradients "
            f"(Job(clip=1.0)), or look for a division by zero or a wrong label in the data"
        )
    return loss
