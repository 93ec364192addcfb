"""Tensors that stand beside the model are counted wherever they hide, in prediction and measurement, and the allocator agrees."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.running import random_state
from shoestring.jobfile import load_job
from shoestring.measure.holdings import tensors_in
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.execution import training
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from tests.allocator import account
from tests.models import seeded

WIDTH = 16
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]


def teacher() -> nn.Module:
    """Its operations give no views of its weights, so none of them is seen by its results."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(8, 4, 5, padding=2),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, WIDTH),
    )


HELD = sum(one.nbytes for one in teacher().parameters())


def taught(output: Tensor, batch: Batch, knows: Any) -> Tensor:
    with torch.no_grad():
        wanted = knows(batch[0].unsqueeze(1))
    return (output - wanted).square().mean()


GLOBAL: dict[str, list[Any]] = {"teachers": []}


def by_global(output: Tensor, batch: Batch) -> Tensor:
    return taught(output, batch, first_teacher())


def first_teacher() -> Any:
    return GLOBAL["teachers"][0]


def named_global() -> Loss:
    GLOBAL["teachers"] = [teacher()]
    return by_global


def in_closure() -> Loss:
    knows = teacher()
    return lambda output, batch: taught(output, batch, knows)


def in_nested_containers() -> Loss:
    knows = {"all": [(deque([OrderedDict(one=teacher())]),)]}
    return lambda output, batch: taught(output, batch, knows["all"][0][0][0]["one"])


def in_default() -> Loss:
    def loss(output: Tensor, batch: Batch, knows: Any = teacher()) -> Tensor:
        return taught(output, batch, knows)

    return loss


def in_keyword_default() -> Loss:
    def loss(output: Tensor, batch: Batch, *, knows: Any = teacher()) -> Tensor:
        return taught(output, batch, knows)

    return loss


def in_partial() -> Loss:
    return partial(taught, knows=teacher())


class Secretive:
    """Refuses to be asked anything but to be called."""

    def __init__(self, knows: Any) -> None:
        object.__setattr__(self, "knows", knows)

    def __getattribute__(self, name: str) -> Any:
        if name in ("call", "knows"):
            return object.__getattribute__(self, name)
        raise AssertionError(f"{name} was asked for")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated over")

    __eq__ = __hash__ = __bool__ = __len__  # type: ignore[assignment]

    def call(self, output: Tensor, batch: Batch) -> Tensor:
        return taught(output, batch, self.knows)


def in_bound_method() -> Loss:
    return Secretive(teacher()).call


class Slotted:
    __slots__ = ("knows",)

    def __init__(self) -> None:
        self.knows = teacher()

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        return taught(output, batch, self.knows)


class OfClass:
    knows: Any = None

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        return taught(output, batch, type(self).knows)


def in_class() -> Loss:
    OfClass.knows = teacher()
    return OfClass()


def in_function_attribute() -> Loss:
    def loss(output: Tensor, batch: Batch) -> Tensor:
        return taught(output, batch, loss.knows)  # type: ignore[attr-defined]

    loss.knows = teacher()  # type: ignore[attr-defined]
    return loss


def in_cache() -> Loss:
    @cache
    def knows() -> nn.Module:
        return teacher()

    knows()
    return lambda output, batch: taught(output, batch, knows())


def in_array_of_objects() -> Loss:
    held = np.array([teacher(), None], dtype=object)
    return lambda output, batch: taught(output, batch, held[0])


def decorated() -> Loss:
    return torch.no_grad()(lambda value: value) and torch.enable_grad()(
        in_closure()
    )  # torch's wrapper holds the function


def in_context_variable() -> Loss:
    held: ContextVar[Any] = ContextVar("held")
    held.set(teacher())
    return lambda output, batch: taught(output, batch, held.get())


class Meta(type):
    knows: Any = None


class OfMeta(metaclass=Meta):
    @staticmethod
    def loss(output: Tensor, batch: Batch) -> Tensor:
        return taught(output, batch, OfMeta.knows)


def in_metaclass() -> Loss:
    Meta.knows = teacher()
    return OfMeta.loss


def in_module_imported_late() -> Loss:
    sys.modules["late_helper"] = module = ModuleType("late_helper")
    vars(module)["of"] = SimpleNamespace(knows=teacher())

    def loss(output: Tensor, batch: Batch) -> Tensor:
        import late_helper  # type: ignore[import-not-found]

        return taught(output, batch, late_helper.of.knows)

    return loss


def as_script() -> Loss:
    knows = torch.jit.trace(teacher(), torch.zeros(2, 1, WIDTH))  # type: ignore[no-untyped-call]
    return lambda output, batch: taught(output, batch, knows)


PLACES = (
    named_global,
    in_closure,
    in_nested_containers,
    in_default,
    in_keyword_default,
    in_partial,
    in_bound_method,
    Slotted,
    in_class,
    in_function_attribute,
    in_cache,
    in_array_of_objects,
    decorated,
    in_context_variable,
    in_metaclass,
    in_module_imported_late,
    as_script,
)


def small() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batches() -> list[Batch]:
    chance = torch.Generator().manual_seed(0)
    return [(torch.randn(6, WIDTH, generator=chance), torch.randn(6, WIDTH, generator=chance)) for _ in range(3)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_teacher_is_counted_wherever_the_loss_keeps_it(place: Callable[[], Loss]) -> None:
    def work() -> Any:
        made = Job(model=small, data=batches, loss=place())
        return track(made, (), seeded(made))

    found = account(work)
    assert not found.unseen
    made = Job(model=small, data=batches, loss=place())
    for plan in ((), (Checkpoint(every=1),), (Accumulate(2),)):
        predicted, measured = peak(rehearse(made, plan)), peak(track(made, plan, seeded(made)))
        assert predicted.bytes == measured.bytes and dict(predicted.parts) == dict(measured.parts), plan
    if place is not as_script:  # what C++ holds counts from its first use on, and has no role
        assert dict(measured.parts)["constants"] == HELD


def test_gradients_that_a_teacher_has_are_counted() -> None:
    """Nobody froze it, and it was trained."""

    def made() -> Job:
        knows = teacher()
        knows(torch.ones(2, 1, WIDTH)).sum().backward()
        return Job(model=small, data=batches, loss=lambda output, batch: taught(output, batch, knows))

    def work() -> Any:
        job = made()
        return track(job, (), seeded(job))

    assert not account(work).unseen
    predicted, measured = peak(rehearse(made(), ())), peak(work())
    assert predicted == measured and dict(measured.parts)["constants"] == 2 * HELD


class InMemory(torch.utils.data.Dataset[Batch]):
    """Samples that lie in one tensor of the data set's own."""

    def __init__(self) -> None:
        self.numbers = torch.randn(50, 2, WIDTH)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Batch:
        return self.numbers[number, 0], self.numbers[number, 1]


def from_a_generator() -> Iterator[Batch]:
    numbers = torch.randn(50, 2, WIDTH)
    while True:
        yield numbers[:6, 0].clone(), numbers[:6, 1].clone()


def from_a_loader() -> Any:
    return torch.utils.data.DataLoader(InMemory(), 6)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("data", [InMemory, from_a_generator, from_a_loader])
def test_data_that_are_kept_in_memory_are_counted(data: Callable[[], Any], largest: bool) -> None:
    def made() -> Job:
        return Job(
            model=small,
            data=data,
            batch=6,
            loss=lambda output, batch: (output - batch[1]).square().mean(),
            largest=(lambda: batches()[0]) if largest else None,
        )

    assert not account(lambda: track(made(), (), seeded(made()))).unseen
    for plan in ((), (Checkpoint(every=1),)):
        predicted, measured = peak(rehearse(made(), plan)), peak(track(made(), plan, seeded(made())))
        assert predicted == measured and dict(measured.parts)["data"] == InMemory().numbers.nbytes, plan


def test_a_batch_that_is_fetched_ahead_is_counted() -> None:
    def endless() -> Iterator[Batch]:
        while True:
            yield torch.randn(6, WIDTH), torch.randn(6, WIDTH)

    def made() -> (
        Job
    ):  # an epoch is counted and the data do not say how long it is, so the next batch is fetched to know
        return Job(
            model=small, data=endless, epochs=1, steps=3, loss=lambda output, batch: (output - batch[1]).square().mean()
        )

    assert not account(lambda: track(made(), (), seeded(made()))).unseen
    assert dict(peak(rehearse(made(), ())).parts)["data"] == 2 * 6 * WIDTH * 4


class Hiding(nn.Module):
    """Has a teacher that is not among its parts, and a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.hidden, self.table = small(), [teacher()], torch.ones(WIDTH)
        self.function = lambda value, knows=teacher(): value

    def forward(self, batch: Batch) -> Tensor:
        return self.body(batch[0]) * self.table


class Remembering(torch.optim.SGD):
    """Keeps a table that no operation made."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.table = torch.from_numpy(np.ones(999, dtype=np.float32))


def test_what_a_model_and_an_optimizer_keep_beside_weights_and_state_is_counted() -> None:
    made = Job(
        model=Hiding,
        data=batches,
        optimizer=Remembering,
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )
    predicted, measured = peak(rehearse(made, ())), peak(track(made, (), seeded(made)))
    assert predicted == measured
    assert dict(measured.parts)["buffers"] == 2 * HELD + WIDTH * 4 and dict(measured.parts)["optimizer"] == 999 * 4


def test_a_model_that_a_script_gives_is_counted_once() -> None:
    model = Hiding()
    made = Job(
        model=lambda: model,
        data=batches,
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )
    measured = peak(track(made, (), model))
    model.zero_grad()
    assert peak(rehearse(made, (), model=model)) == measured


JOB = """
import torch
from torch import nn
from shoestring import Job

TABLE = torch.zeros(5000)   # which nobody names

def job() -> Job:
    teacher = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(64, 8))
    return Job(model=lambda: nn.Linear(8, 8), data=lambda: [torch.randn(4, 8) for _ in range(5)], steps=3,
               forward=lambda model, batch: model(batch),
               loss=lambda output, batch: (output - teacher(batch.unsqueeze(1)).detach()).square().mean())
"""


def test_a_run_of_a_job_file_measures_what_was_predicted_with_all_that_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "taught.py"
    file.write_text(JOB)
    predicted = peak(rehearse(load_job(file, {}), ()))
    with random_state.fork_rng():
        found = training.train(TrainTask(file=str(file)), lambda event: None)
    assert found.measured["peak_bytes"] == predicted.bytes
    assert dict(predicted.parts)["constants"] == 5000 * 4 + (8 * 3 + 8 + 64 * 8 + 8) * 4


def test_a_mapped_file_and_a_tensor_without_memory_take_none(tmp_path: Path) -> None:
    np.zeros(100_000, dtype=np.float32).tofile(tmp_path / "numbers")
    held = SimpleNamespace(
        mapped=torch.from_numpy(np.memmap(tmp_path / "numbers", dtype=np.float32, mode="r+")),
        torchs=torch.from_file(str(tmp_path / "numbers"), shared=True, size=100_000),
        meta=torch.empty(100_000, device="meta"),
        shared=torch.zeros(1000).share_memory_(),
    )
    made = Job(
        model=small, data=batches, loss=lambda output, batch: (output - batch[1]).square().mean() + 0 * len(vars(held))
    )
    assert len(list(tensors_in([made.loss]))) == 4
    predicted, measured = peak(rehearse(made, ())), peak(track(made, (), seeded(made)))
    assert predicted == measured and dict(measured.parts)["constants"] == 4000


def test_on_a_gpu_the_data_stay_where_they_are() -> None:
    knows = teacher()
    made = Job(model=small, data=InMemory, batch=6, loss=lambda output, batch: taught(output, batch, knows))
    here, there = dict(peak(rehearse(made, ())).parts), dict(peak(rehearse(made, (), on_device=True)).parts)
    assert (
        here["constants"] == there["constants"] == HELD
        and here["data"] == InMemory().numbers.nbytes
        and "data" not in there
    )
