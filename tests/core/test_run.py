"""Parts of a run with state: what one can do is what its class says, never an attribute that happens to have a name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.ledger import Ledger
from shoestring.core.link import Link
from shoestring.core.mesh import on_one_axis
from shoestring.core.run import Run, RunState
from shoestring.training.data_parallel.compress_gradients import CompressGradients
from shoestring.training.evidence.rehearse import prepared
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
        Mistake, match=r"'mine' of the run's state is a Looks.*inherit from shoestring.core.run.RunState"
    ):
        prepared(made, (Outside(),), seeded(made))


def test_thin_matrices_that_wait_for_their_buckets_are_not_taken_for_state_on_disk() -> None:
    made = replace(job("chain"), mesh=on_one_axis(Link(0, 2)))
    run = prepared(made, (CompressGradients("powersgd"),), seeded(made))
    assert all(isinstance(part, RunState) for part in run.state.values())
    assert not any(part.on_disk for part in run.state.values())
