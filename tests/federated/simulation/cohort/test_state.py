"""Models that keep something from one call to the next: a device always begins with the model as it was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.exactness import Exactness
from shoestring.core.local import Local
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.how import how_to_work
from shoestring.federated.verify import verified
from tests.federated.simulation.cohort.cases import COUNTS, devices_of, engine, job_of, started
from tests.federated.toys import CLASSES, WIDTH, toy, toy_job


class Counting(nn.Module):
    """Another function in every call."""

    def __init__(self, inputs: int = 144, classes: int = 5) -> None:
        super().__init__()
        self.inside, self.calls = nn.Linear(inputs, classes), 0

    def scale(self) -> float:
        self.calls += 1
        return 1 + 1 / self.calls

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x.flatten(1)) * self.scale()
        return out


class Listing(Counting):
    """What it keeps is in a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[int] = []

    def scale(self) -> float:
        self.seen.append(len(self.seen))
        return 1 + 1 / len(self.seen)


class Drawing(Counting):
    """It has a generator of its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.drawn = torch.Generator().manual_seed(4)

    def scale(self) -> float:
        return 1 + float(torch.rand((), generator=self.drawn))


@pytest.mark.parametrize("model", [Counting, Listing, Drawing])
def test_a_device_finds_the_same_whoever_worked_before_it(model: type[Counting]) -> None:
    job = job_of(model, Local(batch=6, held_out=0.3))
    row, records, found = started(job)[1], devices_of(job), engine(job, "sequential")
    together = found.moved(row.expand(len(COUNTS), -1), records, Objective(job.local), list(range(len(COUNTS))))
    judged = found.judged(row, records)
    for place, one in enumerate(records):
        alone = found.moved(row.unsqueeze(0), [one], Objective(job.local), [place])
        assert torch.equal(alone.rows[0], together.rows[place])
        assert found.judged(row, [one])[0] == judged[place]


@pytest.mark.parametrize("model", [Counting, Listing, Drawing])
def test_any_number_of_processes_gives_the_same_bits(model: type[Counting]) -> None:
    given = toy(toy_job(model=lambda: model(WIDTH, CLASSES)), how=None, processes=2)
    found = verified(given, _plain())
    assert found.kept, found.verdicts
    assert given.how.kind == "sequential"


def _plain() -> Any:
    from shoestring.federated.room import FederatedPlan

    return FederatedPlan((), Exactness.BITS, {})


def test_dropout_of_many_devices_at_once_is_said_to_draw_other_numbers() -> None:
    model = lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))  # noqa: E731
    given = toy(toy_job(model=model), how=None)
    assert (
        given.how.kind == "stacked"
        and given.how.draws
        and given.how.exactness is Exactness.DISTRIBUTION
        and "dropout" in given.how.why
    )
    first = verified(given, _plain()).verdicts[0]
    assert first.stated is Exactness.DISTRIBUTION and first.kept is None and first.difference > 0.01


def test_how_says_how_exact_it_is() -> None:
    job = job_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5)), Local(batch=6))
    assert how_to_work(job, started(job)[0], devices_of(job)).exactness is Exactness.ROUNDING
