"""How fast workers talk is measured between real processes, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.core.costs.hardware import measured_group
from shoestring.core.workers.sum_costs import fit_rates
from shoestring.core.workers.sums import LIBRARY, MEMORY, NAIVE, RING, TREE
from shoestring.measure.probe import cached_hardware, remember
from shoestring.training.execution import job_planning
from tests.machine import alone


@pytest.mark.usefixtures("warm_workers")
def test_a_group_is_measured_once_with_every_algorithm_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(job_planning, "busy_now", lambda: False)  # else only the usual one is kept
    machine = replace(alone(1), torch="any")
    found = job_planning.in_group(machine, 2, 2)
    kept = cached_hardware()
    assert kept is not None and set(kept.sums["2 near"]) == {MEMORY, LIBRARY, RING, TREE, NAIVE}
    assert found.speeds is not None and found.speeds.measured.keys() == kept.sums["2 near"].keys()
    monkeypatch.setattr(job_planning, "run_worker", lambda *given: pytest.fail("measured again"))
    assert job_planning.in_group(kept, 2, 2).speeds == found.speeds


def test_a_measurement_of_large_sums_that_are_slower_per_byte_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line through two large sums then begins below 0 seconds."""
    monkeypatch.setenv("HOME", str(tmp_path))
    rates = fit_rates(RING, (2,), [(1 << 10, 1e-3), (1 << 20, 2e-3), (16 << 20, 1e-1)])
    assert rates[-1].per_message < 0
    remember(measured_group(alone(1), "2 near", 2, {LIBRARY: rates, RING: rates}, 0.0))
    assert cached_hardware() is not None


@pytest.mark.parametrize("rate", [(-1e-9, 1.0, 8.0), (1e-9, -1.0, 8.0), (1e-9, 1.0, -8.0), (1e-9, 1.0)])
def test_a_rate_by_which_a_sum_takes_less_than_no_time_is_none(
    rate: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    remember(replace(alone(1), links={"2 near": (0.0, 0.0, 0.0)}, sums={"2 near": {RING: (rate,)}}))
    assert cached_hardware() is None
