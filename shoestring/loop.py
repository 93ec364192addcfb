"""The loop. It never learns about a technique: techniques replace the parts that it calls."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.run import Run


def steps(run: Run, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Train, yielding the loss of every step."""
    for batch in batches:
        run.optimizer.zero_grad(set_to_none=True)
        loss = run.gradients(run, batch)
        run.update(run)
        yield loss
