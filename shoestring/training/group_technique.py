"""Techniques that make several workers train one model, and those of them that cut it into stages.

Contract: The mesh follows from a plan's techniques in one place, `mesh_sizes`: as many workers along stage and tensor as
they want, the others along data (tests/core/workers/test_mesh.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Protocol

from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.technique import text
from shoestring.core.workers.mesh import Mesh
from shoestring.core.workers.staging import Staging
from shoestring.training.technique import TrainingTechnique

UNITING = "what unites workers"  # stands for all such techniques in the table of conflicts


class GroupTechnique(TrainingTechnique, ABC):
    """Unites workers, so that they train one model."""

    unites: ClassVar[str]  # the axis of the mesh along which its workers are arranged

    @property
    def conflict_names(self) -> tuple[str, ...]:
        return (*super().conflict_names, UNITING, f"{UNITING} along {self.unites}")

    @property
    def across(self) -> int:
        """Workers that it needs along the axis that it unites; 0: all that the other axes leave."""
        return 0

    @property
    def agrees(self) -> float:
        """Fraction of steps after which the workers that it unites agree on what to do; 0: they never wait for each
        other."""
        return 1.0

    @property
    def serves(self) -> bool:
        """Whether the first worker keeps the weights and computes nothing, so that the others need more memory."""
        return False

    def talking(self, steps: int) -> Mapping[TrainingTechnique, int]:
        """How many of `steps` steps communicate like every step under which setting; empty: all steps are alike."""
        return {}

    def agreements(self, steps: int) -> int:
        """After how many of `steps` steps workers agree on what to do."""
        return sum(self.talking(steps).values()) or steps


class StageLine(Protocol):
    """All stages of a model in one process."""

    def gradients(self, batch: Batch) -> float:
        """Add the gradients of a batch to those of the weights; returns its loss."""

    def weight_gradients(self) -> dict[str, Tensor]:
        """By name, the sum of the gradients of all workers that use a weight."""

    def weights(self) -> dict[str, Tensor]: ...

    def buffers(self) -> dict[str, Tensor]: ...


class StagedTechnique(GroupTechnique, ABC):
    """Cuts the model into stages, one for each worker."""

    @abstractmethod
    def staging(self, ledger: Ledger, after: Ledger) -> Staging:
        """Where it cuts, and the schedule. `ledger` is the argument of its `cost`, `after` the ledger of the whole
        plan, in which other techniques may have changed the seconds of blocks."""

    @abstractmethod
    def trial_setting(self) -> StagedTechnique:
        """The setting whose stages must compute the losses and gradients of one process. That is tried with numbers
        before a plan states its exactness."""

    @abstractmethod
    def line(self, run_of: Callable[[Mesh], Run]) -> StageLine:
        """All stages of such a setting in one process; `run_of` prepares the run of the worker at a mesh position."""


def uniting(techniques: Iterable[TrainingTechnique]) -> list[GroupTechnique]:
    """Those of a plan that unite workers."""
    return [technique for technique in techniques if isinstance(technique, GroupTechnique)]


def mesh_sizes(techniques: Iterable[TrainingTechnique], world: int, per_copy: int = 1) -> dict[str, int]:
    """The mesh of `world` workers: as many along stage and tensor as techniques ask for, and the rest along data. This
    is the only place that decides it; core/workers/mesh.py defines the order of ranks. `per_copy`: if no technique unites
    workers, so many are assumed along stage, because batches have too few samples for all."""
    united = uniting(techniques)
    asked = {technique.unites: technique for technique in united if technique.across}
    stages, ways = (asked[axis].across if axis in asked else 1 for axis in ("stage", "tensor"))
    if not united:
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
    united = Counter(technique.unites for technique in uniting(techniques))
    return [axis for axis, size in sizes.items() if size > 1 and united[axis] != 1]
