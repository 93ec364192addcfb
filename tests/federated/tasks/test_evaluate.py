from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import to_json
from shoestring.federated.devices.records import Records
from shoestring.federated.tasks.device import Question, ask_devices
from shoestring.federated.tasks.evaluate import evaluate
from shoestring.federated.tasks.gather import gather_totals
from shoestring.federated.tasks.privacy.release import TooFew
from shoestring.federated.tasks.settings import TuneCandidate, candidates_of, settings_of
from shoestring.federated.tasks.statistics.totals import AFTER, BEFORE, sum_totals
from shoestring.federated.tasks.text import evaluation_text
from tests.federated.tasks.toy import CURVATURE, ZERO, Quadratic, cohort_of, job_of, names_of, records_of

RATES = candidates_of(settings_of("lr=0.1,0.5"))


def losses(names: list[str], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Held-out losses after one step of each device by hand, summed over samples, and how many samples."""
    found = []
    for name in names:
        device = records_of(name)
        w = float(torch.tensor(rate * CURVATURE * float(device.data[device.trained].mean()), dtype=torch.float32))
        found.append((float((CURVATURE * (w - device.data[device.held_out]) ** 2 / 2).sum()), len(device.held_out)))
    return np.array([one[0] for one in found]), np.array([float(one[1]) for one in found])


def test_means_are_those_of_every_devices_own_result() -> None:
    names = names_of(40)
    result = evaluate(RATES, cohort_of(), names)
    for candidate, rate in zip(RATES, (0.1, 0.5), strict=True):
        sums, counts = losses(names, rate)
        found = result.one(candidate.name, "loss", AFTER)
        assert found.devices == 40 and len(set(counts)) > 5
        assert found.by_sample is not None and found.by_sample.mean == pytest.approx(
            sums.sum() / counts.sum(), rel=1e-5
        )
        assert found.by_device.mean == pytest.approx((sums / counts).mean(), rel=1e-5)
        assert found.by_device.error == pytest.approx((sums / counts).std(ddof=1) / np.sqrt(40), rel=1e-5)
        assert found.histogram is not None and found.histogram.devices == 40
    before = [result.one(candidate.name, "loss", BEFORE) for candidate in RATES]
    assert (
        before[0].by_device == before[1].by_device
        and before[0].by_device.mean > result.one("lr=0.5", "loss", AFTER).by_device.mean
    )


def test_models_are_compared_without_training_where_none_is_asked_for() -> None:
    result = evaluate(
        [TuneCandidate("zero", trains=False), TuneCandidate("far", model="far", trains=False)],
        cohort_of(),
        names_of(20),
    )
    assert {one.when for one in result.measured} == {BEFORE} and result.telemetry.trainings == 0
    assert result.one("far", "loss", BEFORE).by_device.mean < result.one("zero", "loss", BEFORE).by_device.mean


def test_groups_are_told_of_when_they_are_large_enough() -> None:
    group = {name: ("phone", "tablet", "watch")[min(number // 15, 2)] for number, name in enumerate(names_of(33))}
    result = evaluate(RATES, cohort_of(group=group.__getitem__), names_of(33))
    assert {one.group: one.devices for one in result.measured} == {"": 33, "tablet": 15, "others": 18}
    parts = [result.one("lr=0.5", "loss", AFTER, name) for name in ("tablet", "others")]
    assert sum(one.devices * one.by_device.mean for one in parts) == pytest.approx(
        33 * result.one("lr=0.5", "loss", AFTER).by_device.mean
    )


def test_chunks_change_no_bit_of_the_result() -> None:
    first, second = (evaluate(RATES, cohort_of(chunk=chunk), names_of(30)) for chunk in (1, 13))
    assert first.as_json() == second.as_json()


def test_a_device_that_fails_is_counted_by_kind_and_the_others_go_on() -> None:
    result = evaluate(RATES, cohort_of(Quadratic(breaks="device 4")), names_of(21))
    assert result.telemetry.errors == (("RuntimeError", 1),) and (result.telemetry.asked, result.telemetry.devices) == (
        21,
        20,
    )
    assert "secret" not in json.dumps(result.as_json()) + evaluation_text(result)


def test_where_every_device_fails_nothing_of_their_errors_text_is_told() -> None:
    with pytest.raises(Mistake, match="none of the 1 devices could answer: 1 RuntimeError") as told:
        evaluate(RATES, cohort_of(Quadratic(breaks="device 0")), names_of(1))
    assert "secret" not in str(told.value)


def test_a_device_without_a_finite_number_or_anything_held_out_is_no_part_of_a_mean() -> None:
    def some(name: str) -> Records:
        found = records_of(name)
        return replace(found, held_out=found.held_out[:0]) if name == "device 1" else found

    result = evaluate(RATES, cohort_of(Quadratic(spoilt="device 4"), some), names_of(21))
    assert dict(result.telemetry.errors) == {"holds nothing out": 1, "no finite number": 1}
    assert {one.devices for one in result.measured} == {19}


def test_a_setting_that_diverges_is_counted_and_spoils_nothing() -> None:
    wild = (*RATES, TuneCandidate("wild", {"lr": 50.0, "epochs": 30}))
    result = evaluate(wild, cohort_of(), names_of(20))
    assert result.failed == {"wild": 20} and "wild: no finite number on 20 devices" in evaluation_text(result)
    assert result.one("lr=0.5", "loss", AFTER) == evaluate(RATES, cohort_of(), names_of(20)).one(
        "lr=0.5", "loss", AFTER
    )


def test_what_leaves_a_device_is_sums_and_nothing_that_it_was_made_of() -> None:
    question, name = Question(RATES), "device 7"
    (told,) = ask_devices(question, job_of(), Quadratic(), {"": ZERO}, [records_of(name)], 3, lambda: 0.0)
    written = json.dumps(to_json(told))
    assert name not in written
    device = records_of(name)
    assert len(device.data) > 2 and not any(f"{float(sample)!r}" in written for sample in device.data)
    assert told.telemetry.up == 8 * sum(entry.numbers for entry in told.entries)
    backwards = Records(name, device.data, device.trained.flip(0), device.held_out.flip(0))
    (same,) = ask_devices(question, job_of(), Quadratic(), {"": ZERO}, [backwards], 3, lambda: 0.0)
    for one, other in zip(told.entries, same.entries, strict=True):
        assert one.moments.sums == pytest.approx(other.moments.sums)


def test_the_sum_of_all_is_what_devices_told_in_any_order() -> None:
    question, names = Question(RATES), names_of(15)
    first, second = (
        sum_totals(gather_totals(question, cohort_of(), some).sums.values()) for some in (names, names[::-1])
    )
    for one, other in zip(first.entries, second.entries, strict=True):
        assert one.moments.sums == pytest.approx(other.moments.sums) and one.histogram == other.histogram


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: evaluate([], cohort_of(), names_of(20)), "no candidate"),
        (lambda: evaluate(RATES, cohort_of(), []), "no device"),
        (lambda: evaluate(RATES, cohort_of(), [*names_of(20), "device 3"]), "'device 3' is asked twice"),
        (lambda: evaluate([*RATES, RATES[0]], cohort_of(), names_of(20)), "two candidates are called 'lr=0.1'"),
        (lambda: evaluate([TuneCandidate("x", model="fra")], cohort_of(), names_of(20)), "did you mean far"),
        (lambda: evaluate([TuneCandidate("x", {"epoch": 1})], cohort_of(), names_of(20)), "did you mean epochs"),
        (lambda: evaluate(RATES, cohort_of(local=Local()), names_of(20)), r"held_out=0\.2"),
    ],
)
def test_what_can_not_work_is_told_before_any_device_is_asked(wrong: object, told: str) -> None:
    with pytest.raises(Mistake, match=told):
        wrong()  # type: ignore[operator]


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(TooFew):
        evaluate(RATES, cohort_of(), names_of(9))


def test_the_text_has_every_candidate_and_its_json_no_sum() -> None:
    result = evaluate(RATES, cohort_of(), names_of(20), edges={"near": (0.5,)})
    text, written = evaluation_text(result), result.as_json()
    assert all(one.name in text for one in RATES) and "20 of 20 devices answered" in text
    assert "seen" not in written and json.loads(json.dumps(written)) == written
    assert all(
        one.histogram is None or one.histogram.edges == (0.5,) for one in result.measured if one.metric == "near"
    )
