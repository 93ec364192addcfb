"""What a block keeps from one call to the next is put back before it is computed again; what can't be is told, never different."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.library import verify
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from tests.models import seeded

WIDTH = 8
PLANS = [
    (Checkpoint(every=1),),
    (Checkpoint(every=3),),
    (Checkpoint(schedule="((0,(1,),2),)"),),
    (OffloadActivations(), Checkpoint(every=2)),
]


class Block(nn.Module):
    """A block that scales what it computes by something that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(WIDTH, WIDTH)

    def factor(self, x: Tensor) -> Tensor | float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor(x)
        return torch.tanh(self.work(x) * factor) * factor


class Codebook(Block):
    """A moving average written through .data: the buffer's version does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def factor(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.7).add_(0.3 * x.detach().mean(0))
        return self.mean.clone()


class Replaced(Codebook):
    """A buffer that is a new tensor every time."""

    def factor(self, x: Tensor) -> Tensor:
        self.mean = 0.7 * self.mean + 0.3 * x.detach().mean(0)
        return self.mean


class Late(Codebook):
    """A buffer that first changes in the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def factor(self, x: Tensor) -> Tensor:
        if self.calls > 0:
            self.mean.mul_(0.5)
        self.calls += 1
        return self.mean.clone()


class Draws(Block):
    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(3)

    def factor(self, x: Tensor) -> Tensor:
        return torch.rand(WIDTH, generator=self.chance) + 0.5


class DrawsNumPy(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.chance = np.random.default_rng(3)  # type: ignore[assignment]

    def factor(self, x: Tensor) -> float:  # type: ignore[override]
        return float(self.chance.random()) + 0.5  # type: ignore[attr-defined]


class DrawsPython(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)  # type: ignore[assignment]

    def factor(self, x: Tensor) -> float:  # type: ignore[override]
        return self.chance.random() + 0.5  # type: ignore[attr-defined]


class GlobalPython(Block):
    def factor(self, x: Tensor) -> float:
        return random.random() + 0.5


class GlobalNumPy(Block):
    def factor(self, x: Tensor) -> float:
        return float(np.random.rand()) + 0.5


class Growing(Block):
    """Keeps all that it saw in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def factor(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().mean(0))
        return torch.stack(self.seen[-3:]).sum(0) + len(self.seen)


class Sliding(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[float] = deque(maxlen=3)
        self.counts = {"calls": 0, "nested": [0.0]}

    def factor(self, x: Tensor) -> float:
        self.counts["calls"] += 1  # type: ignore[operator]
        self.counts["nested"][0] += 0.25  # type: ignore[index]
        self.seen.append(1.0 / self.counts["calls"])  # type: ignore[operator]
        return sum(self.seen) + self.counts["nested"][0]  # type: ignore[index]


class InAnObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(calls=0, last=torch.ones(WIDTH))

    def factor(self, x: Tensor) -> Tensor:
        self.kept.calls += 1
        self.kept.last = 0.5 * self.kept.last + x.detach().mean(0)
        return self.kept.last / self.kept.calls + 1.0


class TwoNames(Codebook):
    """One buffer under two names, written by one and read by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.also = self.mean

    def factor(self, x: Tensor) -> Tensor:
        self.also.mul_(0.8)
        return self.mean.clone()


class InPlaceAttribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones(WIDTH)

    def factor(self, x: Tensor) -> Tensor:
        self.last.mul_(0.5).add_(x.detach().mean(0))
        return self.last.clone()


class Spectral(nn.Module):
    """Its weight is made anew before every call, outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.more(self.work(x)))


class Twice(nn.Module):
    """Calls each of its blocks twice a step."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


def spectral_block() -> nn.Module:
    """The norm's hook is on the block itself: it runs before forward, and not when forward alone runs again."""
    return nn.utils.spectral_norm(Hooked())


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.more(torch.tanh(x @ self.weight)))


BLOCKS = [
    Codebook,
    Replaced,
    Late,
    Draws,
    DrawsNumPy,
    DrawsPython,
    GlobalPython,
    GlobalNumPy,
    Growing,
    Sliding,
    InAnObject,
    TwoNames,
    InPlaceAttribute,
    Spectral,
    spectral_block,
]


def job_of(model: Callable[[], nn.Module]) -> Job:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        data=lambda: [x] * 6,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_what_a_block_keeps_is_put_back_before_it_is_computed_again(
    block: Callable[[], nn.Module], twice: bool, plan: tuple
) -> None:  # type: ignore[type-arg]
    made = job_of((lambda: Twice(block)) if twice else lambda: nn.Sequential(block(), block(), block()))
    equal, most = verify(made, plan, 4)
    assert equal, most


@pytest.mark.parametrize("block", [Codebook, Replaced, Late, InPlaceAttribute, TwoNames, Spectral, spectral_block])
def test_copies_of_what_a_block_keeps_are_predicted_to_the_byte(block: Callable[[], nn.Module]) -> None:
    made = job_of(lambda: Twice(block))
    for plan in PLANS:
        assert peak(rehearse(made, plan)).bytes == peak(track(made, plan, seeded(made))).bytes, plan


SHARED_CHANCE = torch.Generator().manual_seed(0)
SHARED_LIST: list[float] = []


class Elsewhere(Block):
    """Draws from a generator that no block owns."""

    def factor(self, x: Tensor) -> Tensor:
        return torch.rand(WIDTH, generator=SHARED_CHANCE) + 0.5


class ElsewhereCounts(Block):
    def factor(self, x: Tensor) -> float:
        SHARED_LIST.append(1.0)
        return 1.0 / len(SHARED_LIST)


class ChangesLater(Elsewhere):
    """Is well-behaved at first: what can't be put back comes in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().factor(x) if self.calls > 2 else torch.ones(WIDTH)


@pytest.mark.parametrize("block", [Elsewhere, ElsewhereCounts, ChangesLater])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_can_not_be_put_back_is_told_and_never_different(block: type[nn.Module], plan: tuple) -> None:  # type: ignore[type-arg]
    with pytest.raises(Mistake, match=r"the block (0|1|2) .*computes something else when it runs again"):
        verify(job_of(lambda: nn.Sequential(block(), block(), block())), plan, 5)


class OverwritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.work(x.relu_())  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_block_that_overwrites_its_input_is_refused_by_name(plan: tuple) -> None:  # type: ignore[type-arg]
    made = job_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(OverwritesInput() for _ in range(3))))
    verify(made, (), 2)
    with pytest.raises(Mistake, match=r"the block \d changes its input in place"):
        rehearse(made, plan)
    with pytest.raises(Mistake, match=r"the block \d changes its input in place"):
        verify(made, plan, 2)


class Packed(nn.Module):
    """Takes and gives a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: PackedSequence) -> PackedSequence:
        assert isinstance(x, PackedSequence)
        return self.memory(x)[0]  # type: ignore[no-any-return]


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Packed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x).view(2, 3, WIDTH), torch.tensor([3, 2]), batch_first=True)
        for block in self.blocks:
            packed = block(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


def test_named_tuples_reach_a_block_as_they_are() -> None:
    assert verify(job_of(OfPacked), (Checkpoint(every=1),), 3)[0]


def test_nothing_that_a_block_keeps_is_different_after_it_was_computed_again() -> None:
    made = job_of(lambda: nn.Sequential(Growing(), Sliding(), InAnObject()))
    kept = []
    for plan in ((), (Checkpoint(every=1),)):
        model = seeded(made)
        verify_steps(made, plan, model)
        kept.append((len(model[0].seen), list(model[1].seen), model[1].counts, model[2].kept.calls))  # type: ignore[arg-type]
    assert kept[0] == kept[1]


def verify_steps(made: Job, plan: tuple, model: nn.Module) -> None:  # type: ignore[type-arg]
    from itertools import islice

    from shoestring.training.evidence.rehearse import build_run
    from shoestring.training.loop import steps

    for _ in steps(build_run(made, plan, model), islice(Feed(made), 3)):
        pass
