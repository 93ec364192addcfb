"""How an optimizer's step can be divided. Whether it can is tried (core/optimization/stepping_trial.py).

Plain training steps all weights in one call. Some techniques step a part of them at a time, which gives the same result
only if the update of a weight depends on that weight alone:

    IN_TURNS   one weight after the other, each in a call of its own         StepInBackward, OffloadModel, OffloadOptimizer
    APART      some weights in this process, the others in another           Pipeline
    IN_PARTS   some numbers of every weight here, the others elsewhere       Shard, TensorParallel, OffloadModel,
               one after the other, in chunks                                OffloadOptimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn, optim

from shoestring.core.private import marks_of


class StepDivision(Enum):
    IN_TURNS = "can't step weights in turns"
    APART = "can't step weights apart"
    IN_PARTS = "can't step parts of weights"


@dataclass(frozen=True)
class Stepping:
    """Why an optimizer's step can't be divided, for each kind of division; kinds that change nothing are left out."""

    reasons: Mapping[StepDivision, str]

    def why_not(self, division: StepDivision) -> str:
        return self.reasons.get(division, "")

    @property
    def traits(self) -> frozenset[str]:
        """The same as traits of the job, for a ledger; `why_not_in` reads them."""
        return frozenset(f"{division.value}: {reason}" for division, reason in self.reasons.items())


UNDIVIDED = Stepping({})  # every division is possible


def why_not_in(traits: Iterable[str], division: StepDivision) -> str:
    """Why a step can't be divided this way, by the traits of a job; empty if it can."""
    begin = f"{division.value}: "
    return next((trait.removeprefix(begin) for trait in traits if trait.startswith(begin)), "")


@contextmanager
def only(optimizer: optim.Optimizer, parameters: Tensor | Sequence[Tensor], group: dict[str, object]) -> Iterator[None]:
    """While inside, the optimizer knows only these parameters of a group; settings that a schedule changes still
    apply."""
    groups, members = optimizer.param_groups, group["params"]
    group["params"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    optimizer.param_groups = [group]
    try:
        yield
    finally:
        group["params"] = members
        optimizer.param_groups = groups


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter with other values and the same attributes, by which an optimizer may tell weights apart
    (`parameter.no_decay = True`)."""
    found = nn.Parameter(values, parameter.requires_grad)
    vars(found).update(marks_of(parameter))
    return found
