from __future__ import annotations

import json

import pytest

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.privacy.release import TooFew
from shoestring.federated.tasks.settings import TuneCandidate, candidates_of, settings_of
from shoestring.federated.tasks.text import tuning_text
from shoestring.federated.tasks.tune import rung_sizes, tune
from tests.federated.tasks.toy import Quadratic, cohort_of, names_of

GRID = candidates_of(settings_of("lr=0.01,0.03,0.1,0.2,0.3,0.5,0.8,1.0 epochs=1,2"))
# One step of rate r leaves (1 - 2 r) of the way to a device's own mean, two steps (1 - 2 r)^2: 0.5 leaves nothing


def test_the_rate_that_is_known_to_be_best_is_found() -> None:
    found = tune(GRID, cohort_of(group=str), names_of(60))
    assert found.best.candidate.settings["lr"] == 0.5
    assert {one.candidate.settings["lr"] for one in found.tried if one.as_good} == {
        0.5
    }  # with 1 epoch or 2 they are the same
    assert sum(one.as_good for one in found.tried) == 2
    assert (
        found.tried[0] == found.best
        and found.best.behind == 0
        and found.best.error is not None
        and found.best.error > 0
    )
    behind = [one.behind for one in found.tried]
    assert behind == sorted(behind)  # type: ignore[type-var]
    assert found.telemetry.trainings == 16 * 60 and not found.withheld


def test_by_halves_the_same_is_found_with_less_work() -> None:
    found = tune(GRID, cohort_of(), names_of(150), halving=True)
    assert found.best.candidate.settings["lr"] == 0.5
    assert [(rung.settings, rung.devices) for rung in found.rungs] == [(16, 10), (8, 20), (4, 40), (2, 80)]
    assert found.telemetry.trainings == 16 * 10 + 8 * 20 + 4 * 40 + 2 * 80 < 16 * 150 // 3
    assert found.telemetry.devices == 150 and found.telemetry.up == sum(rung.telemetry.up for rung in found.rungs)
    assert len(found.tried) == 16 and [one.rung for one in found.tried] == sorted(
        (one.rung for one in found.tried), reverse=True
    )


def test_a_larger_metric_is_better_where_the_goal_says_so() -> None:
    found = tune(candidates_of(settings_of("lr=0.01,0.5")), cohort_of(goal="max near"), names_of(40))
    assert (
        found.best.candidate.name == "lr=0.5"
        and found.most
        and found.tried[1].behind is not None
        and found.tried[1].behind > 0
    )


def test_equal_settings_are_as_good_as_each_other_despite_rounding() -> None:
    same = [TuneCandidate(f"copy {number}", {"lr": 0.1}) for number in range(5)]
    found = tune(same, cohort_of(), names_of(30))
    assert all(one.as_good and one.behind == pytest.approx(0, abs=1e-12) for one in found.tried)


def test_a_setting_that_diverges_is_never_the_best() -> None:
    wild = TuneCandidate("wild", {"lr": 60.0, "epochs": 40})
    found = tune([wild, *GRID[:4]], cohort_of(), names_of(30))
    assert found.best.candidate != wild and found.tried[-1].candidate == wild and found.tried[-1].mean is None
    assert found.failed == {"wild": 30} and "diverged" in tuning_text(found)
    halved = tune([wild, *GRID[:4]], cohort_of(), names_of(200), halving=True)
    assert [one.rung for one in halved.tried if one.candidate == wild] == [0]


def test_a_setting_that_diverges_on_one_device_gives_way_to_the_best_that_does_not() -> None:
    found = tune(GRID, cohort_of(Quadratic(steep="device 5")), names_of(60))
    assert found.best.candidate.settings == {"lr": 0.2, "epochs": 2}  # leaves 0.6^2 of the way
    assert found.failed == {one.name: 1 for one in GRID if one.settings["lr"] >= 0.3}


def test_where_every_setting_diverges_nothing_is_chosen() -> None:
    with pytest.raises(TooFew, match="30 no finite number"):
        tune(
            [TuneCandidate("wild", {"lr": 60.0, "epochs": 40}), TuneCandidate("wilder", {"lr": 90.0, "epochs": 40})],
            cohort_of(),
            names_of(30),
        )


def test_a_device_whose_records_spoil_every_setting_disqualifies_none() -> None:
    found = tune(GRID, cohort_of(Quadratic(spoilt="device 2")), names_of(40))
    assert not found.failed and found.best.candidate.settings["lr"] == 0.5 and found.best.devices == 39


def test_one_setting_is_tuned_as_many_are() -> None:
    found = tune(GRID[:1], cohort_of(), names_of(12), halving=True)
    assert found.best.devices == 12 and found.best.as_good and len(found.tried) == 1


def test_a_goal_that_no_device_measures_is_refused() -> None:
    with pytest.raises(Mistake, match="20 no accuracy"):
        tune(GRID, cohort_of(goal="max accuracy"), names_of(20))


def test_rungs_never_ask_fewer_devices_than_the_least() -> None:
    for settings in range(1, 40):
        for devices in (10, 19, 29, 30, 31, 69, 70, 500):
            sizes = rung_sizes(settings, devices, 10)
            assert (
                sum(sizes) == devices
                and min(sizes) >= 10
                and sizes == sorted(sizes)
                and 2 ** (len(sizes) - 1) < max(settings, 2)
            )
    with pytest.raises(TooFew):
        rung_sizes(4, 9, 10)


def test_means_over_samples_choose_too_and_the_text_says_what_is_best() -> None:
    found = tune(GRID, cohort_of(), names_of(60), by="samples")
    assert found.best.candidate.settings["lr"] == 0.5
    text = tuning_text(tune(GRID, cohort_of(), names_of(150), halving=True))
    assert "has the least loss" in text and "rungs" in text and json.dumps(found.as_json())
