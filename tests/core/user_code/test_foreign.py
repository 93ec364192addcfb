"""No method of an object that the user keeps in a model or gives in a batch is called: torch would not call it either."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.core.batch import leaves, map_leaves
from shoestring.core.user_code.foreign import attributes_of, container_kind, copy_module, items_of
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.block_state import BlockState, put_back
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique

ASKED = (
    "__len__",
    "__iter__",
    "__getitem__",
    "__contains__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__bool__",
    "__hash__",
    "__repr__",
    "__str__",
    "__call__",
    "__copy__",
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__sizeof__",
    "__dir__",
    "__getattr__",
    "__int__",
    "__float__",
    "__index__",
    "__format__",
    "__enter__",
    "__exit__",
    "items",
    "keys",
    "values",
    "clear",
    "extend",
    "append",
)


def refuses(name: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} was called")

    return method


METHODS = {name: refuses(name) for name in ASKED}
Thing = type("Thing", (), dict(METHODS))
Slotted = type("Slotted", (), METHODS | {"__slots__": ("a",)})
Tuple = type("Tuple", (tuple,), dict(METHODS))
List = type("List", (list,), dict(METHODS))
Dict = type("Dict", (dict,), dict(METHODS))
Ordered = type("Ordered", (OrderedDict,), {name: one for name, one in METHODS.items() if name != "__getattr__"})
Set = type("Set", (set,), dict(METHODS))
Queue = type("Queue", (deque,), dict(METHODS))
Text = type("Text", (str,), dict(METHODS))
Number = type("Number", (int,), dict(METHODS))

HOSTILE: list[Callable[[], Any]] = [
    Thing,
    Slotted,
    Tuple,
    List,
    Dict,
    Ordered,
    Set,
    Queue,
    Text,
    Number,
    lambda: (1, Tuple((2,))),
    lambda: [Thing()],
    lambda: {"a": Thing(), "b": List([Tuple()])},
    lambda: Tuple((torch.ones(2), Thing())),
]


class Block(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.kept = make()
        self.inside, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inside(x)))


def hostile_job(make: Callable[[], Any]) -> Job:
    data = [(torch.ones(4, 4) * number, torch.zeros(4, 4)) for number in range(1, 4)]
    return Job(
        model=lambda: nn.Sequential(*(Block(make) for _ in range(3))),
        data=lambda: data,
        steps=2,
        held_out=lambda: data[:1],
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )


@pytest.mark.parametrize("make", HOSTILE, ids=lambda one: one.__name__)
def test_a_model_with_any_object_is_planned_trained_and_validated(make: Callable[[], Any]) -> None:
    job = hostile_job(make)
    outcome = shoestring.plan(job)
    assert outcome.chosen.predicted["peak_bytes"] and "real tensors" not in outcome.chosen.basis
    assert len(list(shoestring.train(job, outcome))) == 2
    model = job.model()
    assert shoestring.plan(job, model=model).chosen.predicted["peak_bytes"], "a copy of this very model"
    techniques: list[TrainingTechnique] = [Checkpoint(every=1), OffloadActivations(), StepInBackward()]
    for technique in techniques:
        assert shoestring.verify(job, (technique,), 2).same_bits, technique


@pytest.mark.parametrize("make", HOSTILE, ids=lambda one: one.__name__)
def test_stream_computes_blocks_again_that_keep_any_object(make: Callable[[], Any]) -> None:
    job = hostile_job(make)
    run = build_run(job, (OffloadModel(),), job.model())
    run.gradients(run, job.data()[0])


def test_what_containers_hold_is_put_back_though_their_methods_are_their_own() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {
                "list": List([1, 2]),
                "dict": Dict(a=1),
                "ordered": OrderedDict(a=1, b=2),
                "set": Set((3,)),
                "queue": Queue((4, 5)),
            }

    block = Kept()
    before = BlockState(block).picture()
    held = block.parts
    list.append(held["list"], 3)
    dict.__setitem__(held["dict"], "b", 2)
    held["ordered"].move_to_end("a")
    set.add(held["set"], 4)
    deque.clear(held["queue"])
    assert not all(one.same() for one in before)
    put_back(before)
    assert [list(items_of(held[name])) for name in held] == [[1, 2], [1], [1, 2], [3], [4, 5]] and list(
        held["ordered"]
    ) == ["a", "b"]


def test_objects_in_a_batch_are_left_alone() -> None:
    thing, numbers = Thing(), Tuple((torch.ones(2), 3))
    batch = (torch.ones(2), thing, numbers)
    assert [type(one) for one in leaves(batch)] == [Tensor, Thing, Tensor, int]
    same = map_leaves(lambda leaf: leaf, batch)
    assert same is batch and same[2] is numbers


def test_attributes_are_read_where_python_keeps_them() -> None:
    class Computed:
        __slots__ = ("hidden",)

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise RuntimeError("computed")

    thing = Thing()
    thing.a = 1
    assert attributes_of(thing) == {"a": 1} and attributes_of(Slotted()) is None and attributes_of(Computed()) is None
    assert container_kind(Tuple()) is tuple and container_kind(thing) is None


def test_a_copy_of_a_model_shares_what_refuses_to_be_copied_and_nothing_else() -> None:
    model = Block(Thing)
    other = copy_module(model, {})
    assert (
        isinstance(other, Block)
        and other.kept is model.kept
        and other.inside is not model.inside
        and other.count is not model.count
    )
