from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from shoestring.core.errors import Mistake
from shoestring.federated.devices.records import Records
from shoestring.federated.tasks.compare import SAME, compare, halves
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.statistics.totals import AFTER, BEFORE
from shoestring.federated.tasks.text import comparison_text
from shoestring.show.terminal import Screen
from tests.federated.tasks.toy import CURVATURE, Quadratic, cohort_of, names_of, records_of

ZERO, FAR = TuneCandidate("run 1", trains=False), TuneCandidate("run 2", model="far", trains=False)


def test_two_models_on_the_same_devices_give_the_difference_that_a_person_would_calculate() -> None:
    names = names_of(40)
    found = compare(ZERO, FAR, cohort_of(), names)
    values = np.array(
        [
            [float((CURVATURE * (w - one.data[one.held_out]) ** 2 / 2).mean()) for w in (0.0, 0.5)]
            for one in map(records_of, names)
        ]
    )
    loss = next(one for one in found.changes if one.metric == "loss")
    assert (loss.a, loss.b) == pytest.approx(tuple(values.mean(0))) and loss.devices == (40, 40)
    assert loss.percent == pytest.approx(100 * (values[:, 1].mean() / values[:, 0].mean() - 1))
    assert loss.error == pytest.approx((values[:, 1] - values[:, 0]).std(ddof=1) / np.sqrt(40))
    assert (
        loss.low is not None
        and loss.high is not None
        and loss.low < loss.percent < loss.high < 0
        and loss.verdict == "better"
    )
    assert found.when == BEFORE and found.design == "paired"


def test_settings_are_compared_by_the_personal_models_that_they_make() -> None:
    found = compare(TuneCandidate("slow", {"lr": 0.01}), TuneCandidate("right", {"lr": 0.5}), cohort_of(), names_of(30))
    assert found.when == AFTER and found.changes[0].verdict == "better"
    back = compare(TuneCandidate("right", {"lr": 0.5}), TuneCandidate("slow", {"lr": 0.01}), cohort_of(), names_of(30))
    assert next(one.verdict for one in back.changes if one.metric == "loss") == "worse"


def test_a_metric_of_which_nobody_says_what_is_good_is_higher_or_lower() -> None:
    a, b = TuneCandidate("slow", {"lr": 0.01}), TuneCandidate("right", {"lr": 0.5})
    assert {one.metric: one.verdict for one in compare(a, b, cohort_of(), names_of(60)).changes} == {
        "loss": "better",
        "near": "higher",
    }
    assert {one.metric: one.verdict for one in compare(a, b, cohort_of(goal="max near"), names_of(60)).changes} == {
        "loss": "better",
        "near": "better",
    }


def test_the_same_model_twice_shows_no_difference() -> None:
    found = compare(ZERO, replace(ZERO, name="again"), cohort_of(), names_of(20))
    assert {one.verdict for one in found.changes} == {SAME} and all(
        one.delta == 0 and one.p == 1 for one in found.changes
    )


def moved(name: str) -> Records:
    """Devices with an even number have records on the other side, where the second model is worse."""
    found = records_of(name)
    return replace(found, data=-found.data) if int(name.split()[1]) % 2 == 0 else found


def test_a_model_that_is_worse_for_one_group_is_seen() -> None:
    cohort = cohort_of(records=moved, group=lambda name: "even" if int(name.split()[1]) % 2 == 0 else "odd")
    found = compare(ZERO, FAR, cohort, names_of(80))
    verdicts = {one.group: one.verdict for one in found.changes if one.metric == "loss"}
    assert verdicts["even"] == "worse" and verdicts["odd"] == "better"
    text = comparison_text(found)
    narrow = comparison_text(found, Screen(width=60))
    assert all(len(line) <= 60 for line in narrow.splitlines()) and all(
        word in narrow for word in ("even", "odd", "worse", "better")
    )
    assert "Holm" in text and "even" in text and "worse" in text


def test_groups_are_judged_together() -> None:
    found = compare(ZERO, FAR, cohort_of(group=lambda name: f"g{int(name.split()[1]) % 8}"), names_of(160))
    groups = [one for one in found.changes if one.metric == "loss" and one.group]
    assert len(groups) == 8 and all(one.holm >= one.p for one in groups) and any(one.holm > one.p for one in groups)
    for one in found.changes:
        if one.p < 0.05 <= one.holm:
            assert one.verdict.startswith("perhaps")


def test_two_halves_of_the_devices_are_two_independent_samples() -> None:
    names = names_of(80)
    first, second = halves(names, 3)
    assert len(first) == len(second) == 40 and not set(first) & set(second) and halves(names, 3) != halves(names, 4)
    assert set(halves(names[::-1], 3)[0]) == set(first), "the order of names does not matter"
    found = compare(
        TuneCandidate("slow", {"lr": 0.01}), TuneCandidate("right", {"lr": 0.5}), cohort_of(), names, apart=True
    )
    loss = next(one for one in found.changes if one.metric == "loss")
    assert (
        found.design == "independent"
        and loss.devices == (40, 40)
        and loss.verdict == "better"
        and found.telemetry.trainings == 80
    )
    same = compare(ZERO, ZERO, cohort_of(), names, apart=True)
    assert "one half of the devices measured A" in comparison_text(same)


def test_both_must_be_judged_at_the_same_moment() -> None:
    for apart in (False, True):
        with pytest.raises(Mistake, match="that are both trained, or both not"):
            compare(ZERO, TuneCandidate("tuned"), cohort_of(), names_of(40), apart=apart)


def test_devices_on_which_one_of_them_diverged_are_counted() -> None:
    with pytest.raises(Mistake, match="no metric in common that may be released; wild: no finite number on 20 devices"):
        compare(TuneCandidate("a"), TuneCandidate("wild", {"lr": 60.0, "epochs": 40}), cohort_of(), names_of(20))
    found = compare(ZERO, FAR, cohort_of(Quadratic(spoilt="device 3")), names_of(20))
    assert found.telemetry.errors == (("no finite number", 1),) and found.changes[0].devices == (19, 19)


def test_a_candidate_is_not_better_for_having_diverged_where_it_is_hard() -> None:
    cohort = cohort_of(Quadratic(steep="device 0"))
    slow, right = TuneCandidate("slow", {"lr": 0.01}), TuneCandidate("right", {"lr": 0.5})
    found = compare(slow, right, cohort, names_of(40))
    assert (
        found.failed == {"right": 1} and {one.metric: one.verdict for one in found.changes}["loss"] == "perhaps better"
    )
    assert "right: no finite number on 1 device, which" in comparison_text(found)
    back = compare(right, slow, cohort, names_of(40))
    assert {one.metric: one.verdict for one in back.changes}["loss"] == "perhaps worse"


def test_a_metric_that_is_zero_has_a_verdict_and_no_percentage() -> None:
    def at_zero(name: str) -> Records:
        found = records_of(name)
        return replace(found, data=found.data * 0)

    found = compare(ZERO, FAR, cohort_of(records=at_zero), names_of(20))
    loss = next(one for one in found.changes if one.metric == "loss")
    assert (loss.percent, loss.low, loss.high, loss.verdict) == (None, None, None, "worse")
    assert "a percentage of it means nothing" in comparison_text(found)
    written = found.as_json()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
