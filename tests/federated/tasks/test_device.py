from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.federated.devices.records import records_of
from shoestring.federated.model.layout import layout_of
from shoestring.federated.playing.play import add_sums
from shoestring.federated.round import DeviceView, Objective, Order
from shoestring.federated.simulation.cohort import Engine, engine_work
from shoestring.federated.tasks.compare import compare
from shoestring.federated.tasks.evaluate import evaluate
from shoestring.federated.tasks.gather import Cohort
from shoestring.federated.tasks.privacy.registry import Registry
from shoestring.federated.tasks.settings import TuneCandidate, candidates_of, settings_of
from shoestring.federated.tasks.statistics.totals import AFTER, BEFORE
from shoestring.federated.tasks.tune import tune
from tests.federated.toys import ONE_BY_ONE, records, toy_job

NAMES = [f"d{number}" for number in range(16)]


def real() -> tuple[Cohort, Engine, torch.Tensor]:
    job = toy_job(len(NAMES))
    torch.manual_seed(0)
    model = job.model()
    engine = Engine(job, layout_of(model), ONE_BY_ONE)
    row = layout_of(model).row(model)
    own = {name: records_of(job, name, records(number, 24 + number), 3) for number, name in enumerate(NAMES)}
    return (
        Cohort(job, engine, own.__getitem__, {"": row, "zero": torch.zeros_like(row)}, Registry(None), seed=3, chunk=5),
        engine,
        row,
    )


def test_an_evaluation_measures_what_a_round_would() -> None:
    cohort, engine, row = real()
    result = evaluate([TuneCandidate("job"), TuneCandidate("fast", {"lr": 0.3})], cohort, NAMES)
    devices = [DeviceView(cohort.records(name)) for name in NAMES]
    for candidate, rate in (("job", 0.1), ("fast", 0.3)):
        updates = engine_work(engine)(
            Order(3, 0, row, judges=True), devices, Objective(replace(cohort.job.local, lr=rate))
        )
        for when, told in ((BEFORE, updates.before), (AFTER, updates.after)):
            sums: dict[str, tuple[float, float]] = {}
            for one in told:
                add_sums(sums, one)
            for metric, (total, weight) in sums.items():
                found = result.one(candidate, metric, when)
                assert found.by_sample is not None and found.by_sample.mean == pytest.approx(total / weight, rel=1e-6)
                assert found.devices == sum(bool(one) for one in told) >= 10
    assert result.one("fast", "loss", AFTER).by_device.mean < result.one("fast", "loss", BEFORE).by_device.mean


def test_a_rate_that_learns_is_found_and_told_from_one_that_does_not() -> None:
    cohort, _, _ = real()
    found = tune(candidates_of(settings_of("lr=0.0001,0.3 epochs=3")), cohort, NAMES)
    assert found.best.candidate.settings["lr"] == 0.3 and not found.tried[1].as_good
    report = compare(
        TuneCandidate("begun", trains=False), TuneCandidate("nothing", model="zero", trains=False), cohort, NAMES
    )
    assert {one.metric for one in report.changes} == {"loss", "accuracy"}
