"""What a plan moves to and from the disk, and the measured speed at which it does, are in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.technique import total_cost
from shoestring.core.units import bytes_text
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.planning.plan import load_plan
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.predict import disk_speed
from shoestring.training.report.outcome_text import training_outcome_text
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import with_traits
from tests.models import job

MACHINE = Hardware(disk=3e8, direct=2e9, moving=1e-10)


def test_a_plan_that_moves_bytes_says_how_many_and_how_fast(tmp_path: Path) -> None:
    outcome = Planner(job("chain"), MACHINE).outcome(None, forced=(OffloadActivations(),))
    told, shown = outcome.as_json(), training_outcome_text(outcome)
    assert told["chosen"]["traffic_bytes"] > 0 and told["chosen"]["details"]["disk_speed"] == pytest.approx(3e8)
    assert f"to and from the disk: {bytes_text(told['chosen']['traffic_bytes'])} a step, at 286 MiB/s" in shown
    outcome.chosen.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").details.disk_speed == outcome.chosen.details.disk_speed


def test_a_plan_that_moves_nothing_says_nothing_of_the_disk() -> None:
    outcome = Planner(job("chain"), MACHINE).outcome(None, forced=())
    told = outcome.as_json()
    assert told["chosen"]["details"]["disk_speed"] == told["plain"]["details"]["disk_speed"] == 0.0
    assert "disk" not in training_outcome_text(outcome)


@pytest.mark.parametrize(
    ("techniques", "least", "most"),
    [
        ((OffloadActivations(),), 3e8, 3e8),
        ((OffloadModel(),), 2e9, 2e9),
        ((OffloadOptimizer(),), 2e9, 2e9),
        ((OffloadModel(moments="8bit"),), 2e9, 2e9),
        (
            (OffloadActivations(), OffloadOptimizer()),
            3.1e8,
            1.9e9,
        ),  # part of it is spilled through the page cache, part passes it by
    ],
)
def test_the_speed_is_that_measured_for_the_way_the_bytes_go(
    techniques: tuple[Technique, ...], least: float, most: float
) -> None:
    found = Planner(job("gpt2"), MACHINE).ledger()
    after = total_cost(techniques, with_traits(found, "own process"))
    assert 0.999 * least <= disk_speed(after) <= 1.001 * most
    assert (
        after.traffic.disk == pytest.approx(disk_speed(after) * after.traffic.disk_seconds) and after.traffic.disk > 0
    )
