"""Techniques of a training step: their subject is a run, and a ledger is what it costs."""

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

UNITING = "what unites workers"  # all such techniques, in the table of conflicts
MIXED = 1.0  # the drift of layers that mix samples (batch norm), where they see a part of the batch only


class Owned(Enum):
    """What `apply` may change in place, if the technique says so (`TrainingTechnique.owns`)."""

    WEIGHTS = "where the weights' numbers are in memory, and how many of them"
    TRAINED = "which weights are trained"
    GROUPS = "the optimizer's groups of weights and their settings"
    STATE = "the optimizer's state"


class StageLine(Protocol):
    """All stages of a model in one process."""

    def gradients(self, batch: Batch) -> float:
        """Add the gradients of a batch to those that weights have; gives its loss."""

    def weight_gradients(self) -> dict[str, Tensor]:
        """By name, the sum of what the workers that use a weight have."""

    def weights(self) -> dict[str, Tensor]: ...

    def buffers(self) -> dict[str, Tensor]: ...


class TrainingTechnique(Technique[Run, Ledger], ABC):
    """What the planner of a training step asks of a technique beside `cost` and `apply`, with what most answer.

    The `drift` of one that is `changed` is how far it may lead from the weights of plain training, as a share of the way that plain
    training went, in ten steps of SGD with momentum. Below 1 the weights are nearer to those of plain training than to those it began
    with. The tests hold every technique to it, on models that do not draw.
    """

    saves_memory: ClassVar[bool] = False  # it is there to save memory of tensors: where it saves none, that is told
    speeds_up: ClassVar[bool] = False  # it makes a step faster, so it is of use where memory is not short
    splits_batch: ClassVar[bool] = False  # it computes a part of a batch at a time
    divides: ClassVar[StepDivision | None] = (
        None  # how it divides the optimizer's step; None: all weights are stepped at once
    )
    folders: ClassVar[tuple[str, ...]] = ()  # knobs that name a folder: it is never taken from a file that is read back
    unites: ClassVar[str] = ""  # the axis of the mesh along which it makes workers train one model; empty: none

    def refusal(self, ledger: Ledger) -> str:
        """Why it can't work here; empty if it can. Whoever overrides it asks this one too."""
        return "" if self.divides is None else why_not_in(ledger.findings.traits, self.divides)

    @property
    def called(self) -> tuple[str, ...]:
        return (*super().called, UNITING, f"{UNITING} along {self.unites}") if self.unites else super().called

    @classmethod
    def easing(cls, samples: int) -> tuple[Self, ...]:
        """Settings under which one real step of so many samples needs less memory, the mildest first: the planner measures a step under
        them where a plain one does not fit this machine. None: it is not for that."""
        return ()

    @classmethod
    def variants(cls) -> tuple[Self, ...]:
        """Settings under which a step is measured on its own, because no arithmetic on the plain step says what it costs."""
        return ()

    @property
    def key(self) -> str:
        """Of such a setting: its step's name in `Ledger.by_precision`."""
        return text(self)

    @property
    def computes_in(self) -> str:
        """The dtype that it has the model compute in, which not every machine can; empty: the model's own."""
        return ""

    @classmethod
    def noted(cls, optimizer: Optimizer) -> frozenset[str]:
        """Traits of the job's optimizer that it cares about."""
        return frozenset()

    @classmethod
    def noticed(cls, run: Run) -> frozenset[str]:
        """Traits of the job's model that it cares about and that a step does not show."""
        return frozenset()

    @classmethod
    def probes(cls, run: Run) -> Mapping[str, AbstractContextManager[Callable[[], object]]]:
        """What it needs to know the seconds of, by the name in `Anchor.probes`: timed after real steps of a plain run."""
        return {}

    @property
    def owns(self) -> frozenset[Owned]:
        """What `apply` changes in place, because memory has no room for two of it, or because the optimizer holds it: the run that was
        given can't be used without this technique any more. All else stays as it was (tests/training/test_apply_is_pure.py)."""
        return frozenset()

    @property
    def across(self) -> int:
        """Workers that it needs along the axis that it unites; 0: all that the other axes leave."""
        return 0

    @property
    def parts(self) -> int:
        """Of one that splits the batch: into so many parts."""
        return 1

    @property
    def agrees(self) -> float:
        """After which share of the steps workers that it unites agree on what to do; 0: they never wait for each other."""
        return 1.0

    @property
    def serves(self) -> bool:
        """Whether the first worker keeps the weights and computes nothing, so that others need more memory."""
        return False

    def staging(self, ledger: Ledger, after: Ledger) -> Staging | None:
        """Of one that cuts the model into stages: where, and who does what when. `ledger` is what its `cost` is given, `after` the ledger
        of the whole plan, in which others may have changed the seconds of blocks."""
        return None

    def tried_as(self) -> TrainingTechnique | None:
        """Of one that cuts the model into stages: the setting whose stages must compute the losses and gradients of one process. That is
        tried with numbers before a plan says how exact it is. None: there are no stages."""
        return None

    def line(self, run_of: Callable[[Mesh], Run]) -> StageLine:
        """All stages of such a setting in one process; `run_of` prepares the run of the worker that stands there."""
        raise NotImplementedError(f"{text(self)} has no stages")

    def talking(self, steps: int) -> Mapping[TrainingTechnique, int]:
        """Of so many steps, those in which workers talk, by settings under which every step is like them; empty: all are alike."""
        return {}

    def agreements(self, steps: int) -> int:
        """Of so many steps, those after which workers agree on what to do."""
        return sum(self.talking(steps).values()) or steps

    @property
    def predictable(self) -> bool:
        """Whether under it the memory of the process follows that of its tensors by rule, so that no trial is needed."""
        return False

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that its worker process must start with."""
        return {}

    def making(self) -> AbstractContextManager[object]:
        """In this context the job's model is made and techniques are applied."""
        return nullcontext()


def mesh_sizes(techniques: Iterable[TrainingTechnique], world: int, per_copy: int = 1) -> dict[str, int]:
    """How so many workers stand: as many along stage and tensor as techniques want there, and all the others along data. This is the one
    place that decides it; core/mesh.py says how ranks are counted. `per_copy`: where no technique unites workers, as many are taken to
    stand along stage, because batches have too few samples for all."""
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
            f"{world} workers can't stand in lines of {stages * ways} ({wants}): give a multiple of {stages * ways} as --devices"
        )
    return {"data": world // (stages * ways), "stage": stages, "tensor": ways}


def axes_not_united(techniques: Iterable[TrainingTechnique], sizes: Mapping[str, int]) -> list[str]:
    """The axes of a mesh whose workers would train apart, or be united twice: each with several workers needs exactly one technique."""
    united = Counter(technique.unites for technique in techniques)
    return [axis for axis, size in sizes.items() if size > 1 and united[axis] != 1]


def check_division(techniques: Iterable[TrainingTechnique], run: Run) -> None:
    """Refuse techniques that divide the optimizer's step where that would change what it does."""
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
    """While inside, the model is made as its techniques want it."""
    with ExitStack() as stack:
        for technique in techniques:
            stack.enter_context(technique.making())
        yield
