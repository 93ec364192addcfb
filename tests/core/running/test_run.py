"""Parts of a run with state: what one can do is what its class says, never an attribute that happens to have a name."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running import run_state
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import LivesOnDisk, RunState
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.technique import TrainingTechnique
from tests.models import job, seeded


class Looks:
    """Has by chance an attribute that the saver would call."""

    saved: ClassVar[dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Outside(TrainingTechnique):
    exact: ClassVar[bool] = True
    why: ClassVar[str] = "nothing"

    def cost(self, now: Ledger) -> Ledger:
        return now

    def apply(self, run: Run) -> Run:
        return replace(run, state={**run.state, "mine": Looks()})  # type: ignore[dict-item]


def test_state_of_a_class_that_does_not_say_what_it_can_do_is_refused_by_name() -> None:
    made = job("chain")
    with pytest.raises(
        Mistake, match=r"'mine' of the run's state is a Looks.*inherit from shoestring.core.running.run_state.RunState"
    ):
        build_run(made, (Outside(),), seeded(made))


def test_thin_matrices_that_wait_for_their_buckets_are_not_taken_for_state_on_disk() -> None:
    made = replace(job("chain"), mesh=on_one_axis(Link(0, 2)))
    run = build_run(made, (CompressGradients("powersgd"),), seeded(made))
    assert all(isinstance(part, RunState) for part in run.state.values())
    assert not run.state_that(LivesOnDisk)


def kinds_of_state(kind: type = RunState) -> set[type]:
    return {kind}.union(*map(kinds_of_state, kind.__subclasses__()))


def test_what_has_the_methods_of_an_ability_inherits_from_it() -> None:
    abilities = [one for one in vars(run_state).values() if isinstance(one, type) and issubclass(one, ABC)]
    names = {one: one.__abstractmethods__ & vars(one).keys() for one in abilities if one is not ABC}
    assert CATALOGUE and len(names) >= 6, "the catalogue is imported, so all our classes with state are known"
    wrong = [
        f"{kind.__name__}.{name} without {ability.__name__}"
        for kind in kinds_of_state()
        for ability, own in names.items()
        for name in own
        if hasattr(kind, name) and not issubclass(kind, ability)
    ]
    assert wrong == []
