"""A stage is rehearsed without the others: nothing that it would receive has values that anybody may read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.job import Job
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import Log
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.pipeline.pipeline import Pipeline
from tests.awkward import WIDTH, Work
from tests.models import seeded
from tests.training.pipeline.partition.test_chain import Body, a_job

TWO = {"data": 1, "stage": 2, "tensor": 1}


class Indexes(Body):
    """Whole numbers that follow from weights cross the cut, and say where to look and what is hot."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        x = self.body[0](x)
        places = x.argmax(1)
        x = self.body[2](self.body[1](x)) + self.table(places) + functional.one_hot(places, WIDTH)
        return self.body[3](x).gather(1, x.argsort(1))  # type: ignore[no-any-return]


class Drawn(Body):
    """What no weight is in and all workers draw is known in all of them."""

    def between(self, x: Tensor) -> Tensor:
        count = torch.randint(1, 5, (1,))
        for part in self.body:
            x = part(x, count)
        return x

    class Repeated(Work):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * len(range(int(count)))

    def __init__(self) -> None:
        super().__init__(Drawn.Repeated)


def dirty(job: Job, rank: int, real: bool) -> Log:
    """The rehearsal of a stage in a process whose freed memory is full of huge numbers."""
    for size in (1, 3, 6, 12, 6 * WIDTH):
        for _ in range(20):
            torch.full((size,), 1 << 40)
    placed = replace(job, mesh=imagined_mesh(TWO, rank))
    return track(placed, (Pipeline(2, 2),), seeded(job)) if real else rehearse(placed, (Pipeline(2, 2),))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", [Indexes, Drawn], ids=lambda model: model.__name__)
def test_no_garbage_is_read_where_nobody_sends(model: type[Body], rank: int) -> None:
    """On fake tensors, and on real ones, which are zeros where they would be received."""
    made = a_job(model)
    assert peak(dirty(made, rank, real=False)).bytes == peak(dirty(made, rank, real=True)).bytes
