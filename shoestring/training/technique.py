"""Techniques of a training step: their subject is a Run, and their cost is a Ledger.

Contract: A technique wraps the user's modules from outside, for the time of a forward, and leaves nothing behind on the
model (tests/training/test_technique.py). The mesh follows from a plan's techniques in one place, `mesh_sizes`: as
many workers along stage and tensor as they want, the others along data (tests/core/test_mesh.py).
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import ClassVar, Protocol, Self

from torch import Tensor
from torch.optim import Optimizer

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.ledger import Ledger
from shoestring.core.mesh import Mesh
from shoestring.core.run import Run
from shoestring.core.staging import Staging
from shoestring.core.stepping import StepDivision, why_not_in
from shoestring.core.technique import Technique, text

UNITING = "what unites workers"  # stands for all such techniques in the table of conflicts
MIXED = 1.0  # the drift where layers that mix samples (batch norm) see only a part of the batch


class Owned(Enum):
    """What `apply` may change in place, if the technique says so (`TrainingTechnique.owns`)."""

    WEIGHTS = "where the weights' numbers are in memory, and how many of them"
    TRAINED = "which weights are trained"
    GROUPS = "the optimizer's groups of weights and their settings"
    STATE = "the optimizer's state"


class StageLine(Protocol):
    """All stages of a model in one process."""

    def gradients(self, batch: Batch) -> float:
        """Add the gradients of a batch to those of the weights; returns its loss."""

    def weight_gradients(self) -> dict[str, Tensor]:
        """By name, the sum of the gradients of all workers that use a weight."""

    def weights(self) -> dict[str, Tensor]: ...

    def buffers(self) -> dict[str, Tensor]: ...


class TrainingTechnique(Technique[Run, Ledger], ABC):
    """What the planner asks of a training technique beside `cost` and `apply`, with the usual answers.

    `drift`, for a technique at level `changed`: an upper bound on the distance between its weights and those of plain
    training, relative to the distance that plain training moves, over ten steps of SGD with momentum. Below 1, the
    weights are nearer to the plainly trained ones than to the initial ones. Tests hold every technique to its drift, on
    models without random numbers.
    """

    saves_memory: ClassVar[bool] = False  # it is meant to save memory of tensors: a warning says where it saves none
    speeds_up: ClassVar[bool] = False  # it makes steps faster, so it is useful even with plenty of memory
    splits_batch: ClassVar[bool] = False  # it computes a part of a batch at a time
    divides: ClassVar[StepDivision | None] = (
        None  # how it divides the optimizer's step; None: all weights are stepped at once
    )
    folders: ClassVar[tuple[str, ...]] = ()  # knobs that name a folder; these are never taken from a plan file
    unites: ClassVar[str] = ""  # the mesh axis along which it makes workers train one model; empty: none

    def refusal(self, ledger: Ledger) -> str:
        """Why it can't work here; empty if it can. Overriding methods call this one too."""
        return "" if self.divides is None else why_not_in(ledger.findings.traits, self.divides)

    @property
    def called(self) -> tuple[str, ...]:
        return (*super().called, UNITING, f"{UNITING} along {self.unites}") if self.unites else super().called

    @classmethod
    def easing(cls, samples: int) -> tuple[Self, ...]:
        """Settings under which a real step of `samples` samples needs less memory, the mildest first: used to measure a
        step that does not fit this machine plainly. Empty: it can't help."""
        return ()

    @classmethod
    def variants(cls) -> tuple[Self, ...]:
        """Settings that must be measured in a step of their own, because their cost does not follow from the plain
        step."""
        return ()

    @property
    def key(self) -> str:
        """The name of such a setting's step in `Ledger.by_precision`."""
        return text(self)

    @property
    def computes_in(self) -> str:
        """The dtype that it has the model compute in, which not every machine supports; empty: the model's own."""
        return ""

    @classmethod
    def noted(cls, optimizer: Optimizer) -> frozenset[str]:
        """Traits of the job's optimizer that it depends on."""
        return frozenset()

    @classmethod
    def noticed(cls, run: Run) -> frozenset[str]:
        """Traits of the job's model that it depends on and that a step does not show."""
        return frozenset()

    @classmethod
    def probes(cls, run: Run) -> Mapping[str, AbstractContextManager[Callable[[], object]]]:
        """Operations whose seconds it needs to know, by their name in `Anchor.probes`; timed after real steps of a
        plain run."""
        return {}

    @property
    def owns(self) -> frozenset[Owned]:
        """What `apply` changes in place, because memory has no room for two of it, or because the optimizer holds it: the run that was
        given can't be used without this technique any more. All else stays as it was (tests/training/test_technique.py)."""
        return frozenset()

    @property
    def across(self) -> int:
        """Workers that it needs along the axis that it unites; 0: all that the other axes leave."""
        return 0

    @property
    def parts(self) -> int:
        """Number of parts, if it splits the batch."""
        return 1

    @property
    def agrees(self) -> float:
        """Fraction of steps after which the workers that it unites agree on what to do; 0: they never wait for each
        other."""
        return 1.0

    @property
    def serves(self) -> bool:
        """Whether the first worker keeps the weights and computes nothing, so that the others need more memory."""
        return False

    def staging(self, ledger: Ledger, after: Ledger) -> Staging | None:
        """If it cuts the model into stages: where, and the schedule. `ledger` is the argument of its `cost`, `after`
        the ledger of the whole plan, in which other techniques may have changed the seconds of blocks."""
        return None

    def tried_as(self) -> TrainingTechnique | None:
        """If it cuts the model into stages: the setting whose stages must compute the losses and gradients of one
        process. That is tried with numbers before a plan states its exactness. None: there are no stages."""
        return None

    def line(self, run_of: Callable[[Mesh], Run]) -> StageLine:
        """All stages of such a setting in one process; `run_of` prepares the run of the worker at a mesh position."""
        raise NotImplementedError(f"{text(self)} has no stages")

    def talking(self, steps: int) -> Mapping[TrainingTechnique, int]:
        """How many of `steps` steps communicate like every step under which setting; empty: all steps are alike."""
        return {}

    def agreements(self, steps: int) -> int:
        """After how many of `steps` steps workers agree on what to do."""
        return sum(self.talking(steps).values()) or steps

    @property
    def predictable(self) -> bool:
        """Whether the process's memory follows from that of its tensors by rule, so that no trial is needed."""
        return False

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that its worker process must start with."""
        return {}

    def making(self) -> AbstractContextManager[object]:
        """The context in which the job's model is constructed and techniques are applied."""
        return nullcontext()


def mesh_sizes(techniques: Iterable[TrainingTechnique], world: int, per_copy: int = 1) -> dict[str, int]:
    """The mesh of `world` workers: as many along stage and tensor as techniques ask for, and the rest along data. This
    is the only place that decides it; core/mesh.py defines the order of ranks. `per_copy`: if no technique unites
    workers, so many are assumed along stage, because batches have too few samples for all."""
    techniques = tuple(techniques)
    asked = {technique.unites: technique for technique in techniques if technique.across}
    stages, ways = (asked[axis].across if axis in asked else 1 for axis in ("stage", "tensor"))
    if not any(technique.unites for technique in techniques):
        stages = per_copy
    if world % (stages * ways):
        wants = " x ".join(f"{text(one)}: {one.across}" for one in asked.values())
        if world == 1:
            raise Mistake(
                f"{' and '.join(map(text, asked.values()))} divides a model between workers, and there is one: give --devices "
                f"{stages * ways}"
            )
        raise Mistake(
            f"{world} workers can't be divided into groups of {stages * ways} ({wants}): give a multiple of {stages * ways} as "
            f"--devices"
        )
    return {"data": world // (stages * ways), "stage": stages, "tensor": ways}


def axes_not_united(techniques: Iterable[TrainingTechnique], sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes whose workers would train apart, or be united twice: each axis with several workers needs exactly
    one technique."""
    united = Counter(technique.unites for technique in techniques)
    return [axis for axis, size in sizes.items() if size > 1 and united[axis] != 1]


def check_division(techniques: Iterable[TrainingTechnique], run: Run) -> None:
    """Refuse techniques that divide the optimizer's step where that would change its result."""
    for technique in techniques:
        if technique.divides is not None and (reason := run.stepping().why_not(technique.divides)):
            raise Mistake(
                f"{text(technique)} can't be used for this job: {reason}; leave it out, or use an optimizer that steps every "
                f"number by itself (Adam, AdamW, SGD, ...)"
            )


def environment(techniques: Iterable[TrainingTechnique]) -> dict[str, str]:
    return {name: value for technique in techniques for name, value in technique.environment.items()}


@contextmanager
def making(techniques: Iterable[TrainingTechnique]) -> Iterator[None]:
    """While inside, the model is constructed as its techniques need it."""
    with ExitStack() as stack:
        for technique in techniques:
            stack.enter_context(technique.making())
        yield
