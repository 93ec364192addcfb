"""Models and losses with hidden state: every device begins with their initial state."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoestring.core.budget import Budget
from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.planning.prepare import Prepared
from shoestring.federated.planning.verify import verify_plan
from shoestring.federated.room import plan_federation
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.method_choice import choose_method
from shoestring.federated.simulation.simulation import Simulation
from tests.federated.simulation.cohort.cases import COUNTS, devices_of, engine, job_of, started
from tests.federated.toys import CLASSES, WIDTH, toy, toy_job

Loss = Callable[[Tensor, Any], Tensor]


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
    together = found.train_updates(row.expand(len(COUNTS), -1), records, Objective(job.local), list(range(len(COUNTS))))
    judged = found.evaluate(row, records)
    for place, one in enumerate(records):
        alone = found.train_updates(row.unsqueeze(0), [one], Objective(job.local), [place])
        assert torch.equal(alone.rows[0], together.rows[place])
        assert found.evaluate(row, [one])[0] == judged[place]


@pytest.mark.parametrize("model", [Counting, Listing, Drawing])
def test_any_number_of_processes_gives_the_same_bits(model: type[Counting]) -> None:
    given = toy(toy_job(model=lambda: model(WIDTH, CLASSES)), how=None, processes=2)
    found = verify_plan(given, _plain())
    assert found.holds, found.verdicts
    assert given.how.kind == "sequential"


def _plain() -> Any:
    from shoestring.federated.planning.verify import SEQUENTIAL
    from shoestring.federated.room import FederatedPlan, FederationDetails

    return FederatedPlan((), Exactness.BITS, {}, FederationDetails(SEQUENTIAL))


def test_dropout_of_many_devices_at_once_is_said_to_draw_other_numbers() -> None:
    model = lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))  # noqa: E731
    given = toy(toy_job(model=model), how=None)
    assert (
        given.how.kind == "stacked"
        and given.how.draws
        and given.how.exactness is Exactness.DISTRIBUTION
        and "dropout" in given.how.why
    )
    first = verify_plan(given, _plain()).verdicts[0]
    assert first.stated is Exactness.DISTRIBUTION and first.kept is None and first.difference > 0.01


def test_how_says_how_exact_it_is() -> None:
    job = job_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5)), Local(batch=6))
    assert choose_method(job, started(job)[0], devices_of(job)).exactness is Exactness.ROUNDING


class RunningScale(nn.Module):
    """A loss that divides by the mean of the losses that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(output, batch[1])
        with torch.no_grad():
            self.mean.mul_(0.7).add_(0.3 * loss)
        return loss / self.mean


def counting_in_its_closure() -> Loss:
    calls = 0

    def loss(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / calls)

    return loss


def with_a_bank_of_outputs() -> Loss:
    held = SimpleNamespace(bank=[torch.zeros(3, CLASSES)])

    def loss(output: Tensor, batch: Any) -> Tensor:
        held.bank.append(output.detach()[:3])
        return nn.functional.cross_entropy(output, batch[1]) + (output.mean(0) - held.bank[-2].mean(0)).square().sum()

    return loss


def counting_in_an_array() -> Loss:
    calls = np.zeros(1)

    def loss(output: Tensor, batch: Any) -> Tensor:
        calls[0] += 1
        return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / calls[0])

    return loss


CALLS = 0


def counting_in_a_global(output: Tensor, batch: Any) -> Tensor:
    global CALLS
    CALLS += 1
    return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / CALLS)


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / self.calls)


class Slotted:
    __slots__ = ("calls", "seen")

    def __init__(self) -> None:
        self.calls = array("l", [0])

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls[0] += 1
        self.seen = bytearray(self.seen + b"." if hasattr(self, "seen") else b".")
        return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / self.calls[0] + 1 / len(self.seen))


class OfItsClass:
    """What it keeps is its class's, and that of a class that it inherits from."""

    class Base:
        losses: ClassVar[list[float]] = []

    class Inside(Base):
        calls = 0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        OfItsClass.Inside.calls += 1
        self.Base.losses.append(1.0)
        return nn.functional.cross_entropy(output, batch[1]) * (1 + 1 / self.Inside.calls + 1 / len(self.Base.losses))


LOSSES: list[Callable[[], Loss]] = [
    Slotted,
    lambda: OfItsClass().loss,
    RunningScale,
    counting_in_its_closure,
    with_a_bank_of_outputs,
    counting_in_an_array,
    lambda: counting_in_a_global,
    lambda: Counter().loss,
    lambda: partial(Counter().loss),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_keeps_something_begins_anew_with_every_device(loss: Callable[[], Loss]) -> None:
    given = toy(toy_job(loss=loss()), how=None, processes=2)
    assert given.how.kind == "sequential" and "keeps state" in given.how.why
    two = weights_after(given)
    assert torch.equal(two, weights_after(given)), "what an earlier federation left behind is seen by the next"
    assert torch.equal(two, weights_after(toy(toy_job(loss=loss()), processes=1)))
    assert verify_plan(given, _plain()).holds


def weights_after(given: Prepared, rounds: int = 3) -> Tensor:
    simulation = Simulation(given, ())
    server = given.server(simulation.parts)
    try:
        for _ in range(rounds):
            server = simulation.play(server).server
    finally:
        simulation.close()
    return server.row


def counting_in_a_generator() -> Loss:
    calls = (1 + 1 / number for number in range(1, 1000))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1]) * next(calls)

    return loss


class Cycling(nn.Module):
    """An iterator that can't be put back, and that is where it was after as many calls as a trial has steps."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.inside, self.scales = nn.Linear(WIDTH, CLASSES), cycle([1 / (1 + place) for place in range(period)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x) * next(self.scales)
        return out


@pytest.mark.parametrize(
    "changes",
    [{"loss": counting_in_a_generator()}, *({"model": partial(Cycling, period)} for period in (2, 3, 4, 6))],
    ids=["generator", "2", "3", "4", "6"],
)
def test_what_can_not_be_put_back_is_told_and_devices_work_in_one_process(changes: dict[str, Any]) -> None:
    given = toy(toy_job(local=Local(epochs=3, batch=4), **changes), how=None, processes=2)
    assert given.how.kind == "sequential" and given.processes == 1 and "other numbers the second time" in given.how.why
    assert given.how.exactness is Exactness.DISTRIBUTION
    assert any(
        "depends on the devices before it" in one
        for one in plan_federation(given, Budget(), ()).outcome.chosen.warnings
    )


def test_a_large_bank_that_is_no_buffer_is_refused_with_the_way_out() -> None:
    bank = torch.zeros(1 << 17, CLASSES)

    def loss(output: Tensor, batch: Any) -> Tensor:
        bank[: len(output)] = output.detach()
        return nn.functional.cross_entropy(output, batch[1]) + (output.mean(0) - bank.mean(0)).square().sum()

    with pytest.raises(Mistake, match="keep it as a buffer of a module"):
        toy(toy_job(loss=loss), how=None)
