"""Techniques of a training step: their subject is a Run, and their cost is a Ledger.

Contract: A technique wraps the user's modules from outside, for the time of a forward, and leaves nothing behind on the
model (tests/training/test_technique.py).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import ClassVar, Self

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.optimization.stepping import StepDivision, why_not_in
from shoestring.core.running.run import Run
from shoestring.core.technique import Technique, text

MIXED = 1.0  # the drift where layers that mix samples (batch norm) see only a part of the batch


class Owned(Enum):
    """What `apply` may change in place, if the technique says so (`TrainingTechnique.owns`)."""

    WEIGHTS = "where the weights' numbers are in memory, and how many of them"
    TRAINED = "which weights are trained"
    GROUPS = "the optimizer's groups of weights and their settings"
    STATE = "the optimizer's state"


class TrainingTechnique(Technique[Run, Ledger], ABC):
    """Base class of training techniques: what the planner asks besides `cost` and `apply`, with defaults.

    `drift`, for a technique at level `changed`: an upper bound on the distance between its weights and those of plain
    training, relative to the distance that plain training moves, over ten steps of SGD with momentum. Below 1, the
    weights are nearer to the plainly trained ones than to the initial ones. Tests hold every technique to its drift, on
    models without random numbers.
    """

    saves_memory: ClassVar[bool] = False  # it is meant to save tensor memory: the user is warned if it saves none
    splits_batch: ClassVar[bool] = False  # it computes a part of a batch at a time
    divides: ClassVar[StepDivision | None] = None  # None: it steps all weights at once
    folders: ClassVar[tuple[str, ...]] = ()  # knobs that name a folder; these are never taken from a plan file

    def refusal(self, ledger: Ledger) -> str:
        """Why it can't work here; empty if it can. Overriding methods call this one too."""
        return "" if self.divides is None else why_not_in(ledger.findings.traits, self.divides)

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
    def traits_of_run(cls, run: Run) -> frozenset[str]:
        """Traits of the job's model and optimizer that it depends on and that a step does not show."""
        return frozenset()

    @classmethod
    def probes(cls, run: Run) -> Mapping[str, AbstractContextManager[Callable[[], object]]]:
        """Operations whose seconds it needs to know, by their name in `Anchor.probes`; timed after real steps of a
        plain run."""
        return {}

    @property
    def owns(self) -> frozenset[Owned]:
        """What `apply` changes in place, because memory has no room for two copies or because the optimizer holds it.
        The run that it was given can't be used without this technique afterwards. Everything else stays unchanged
        (tests/training/test_technique.py)."""
        return frozenset()

    @property
    def parts(self) -> int:
        """Number of parts, if it splits the batch."""
        return 1

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
