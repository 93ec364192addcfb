"""Validation in groups: every worker takes its part of every held-out batch, and all find what one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
from shoestring.jobfile import load_job
from shoestring.measure.timeline import peak
from shoestring.runs.events.history import metrics_of
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import best_weights
from shoestring.runs.reports.report import report_of
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.group_technique import mesh_sizes
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.records import records, steps_in
from tests.training.members import Group

JOB = Path(__file__).with_name("validating.py")
EXACT = (DataParallel(), Shard(1), Shard(2), Shard(3))
OTHERS = (LocalSteps(h=2), CompressGradients("int8"), Asynchronous("server"), Asynchronous("hogwild"), DropStragglers())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("alone")
    Group(folder, 1, JOB, [], 8, str(folder)).results()
    return metrics_of(report_of(folder).validated)


@pytest.mark.parametrize("technique", [*EXACT, *OTHERS], ids=str)
def test_a_group_finds_what_one_process_does(
    technique: Technique, tmp_path: Path, alone: list[dict[str, float]]
) -> None:
    (tmp_path / "run").mkdir()
    results = Group(tmp_path, 3, JOB, [technique], 8, str(tmp_path / "run")).results()
    told = report_of(tmp_path / "run")
    assert told.why_ended == "steps" and told.best is not None
    best = best_weights(Folder(tmp_path / "run"))
    assert best.step == told.best.step and set(best.all_weights()) == {
        f"{k}.{j}.{kind}" for k in range(3) for j in (0, 2) for kind in ("weight", "bias")
    } | {"3.weight", "3.bias"}
    if technique in EXACT:
        assert [one["step"] for one in metrics_of(told.validated)] == [3, 6, 8]
        for metric in ("loss", "accuracy"):
            assert [one[metric] for one in metrics_of(told.validated)] == pytest.approx(
                [one[metric] for one in alone], rel=1e-4
            )
        peaks = [
            peak(rehearse(replace(load_job(JOB, {}), mesh=on_one_axis(Link(rank, 3, True))), (technique,)))
            for rank in range(3)
        ]
        assert [worker["peak_bytes"] for worker in results[0]["workers"]] == [one.bytes for one in peaks]
        assert len({result["weights_sha256"] for result in results if result["weights_sha256"]}) == 1
    else:
        last = told.validated[-1]
        assert last.step == 8 and last.metrics["loss"] == pytest.approx(alone[-1]["loss"], rel=0.2)
        if isinstance(technique, LocalSteps):  # when they meet: at the next even step
            assert [one["step"] for one in metrics_of(told.validated)] == [4, 6, 8]


@pytest.mark.parametrize("technique", [DataParallel(), Shard(3)], ids=str)
def test_bytes_that_are_sent_for_a_validation_are_no_steps(technique: Technique, tmp_path: Path) -> None:
    sent = []
    for validates in (True, False):
        place = tmp_path / str(validates)
        place.mkdir()
        (place / "run").mkdir()
        Group(place, 2, JOB, [technique], 4, str(place / "run"), flags={"validates": validates}).results()
        sent.append([step["sent"] for step in steps_in(records(place / "run"))])
    assert sent[0] == sent[1] and len(sent[0]) == 4


@pytest.mark.parametrize(
    "technique",
    [
        Pipeline(2, 4),
        pytest.param(Pipeline(3, 3, "gpipe"), marks=pytest.mark.slow),
        pytest.param(Pipeline(2, 4, "zero-bubble"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True], ids=["together", "gathered"])
def test_stages_find_what_one_process_does(technique: Pipeline, whole: bool, tmp_path: Path) -> None:
    """Together, each computes its part of every held-out batch; a `validate` of the job's own is given all weights."""
    flags = {"own": True} if whole else {}
    found = []
    for place, world, plan in ((tmp_path / "alone", 1, []), (tmp_path / "stages", technique.stages, [technique])):
        place.mkdir()
        (place / "run").mkdir()
        results = Group(place, world, JOB, plan, 8, str(place / "run"), flags=flags).results()
        found.append(metrics_of(report_of(place / "run").validated))
    plain, staged = found
    assert [one["step"] for one in staged] == [one["step"] for one in plain] == [3, 6, 8]
    for metric in ("loss", "accuracy") if not whole else ("accuracy",):
        assert [one[metric] for one in staged] == pytest.approx([one[metric] for one in plain], rel=1e-4)
    if whole:  # what it makes itself can't be rehearsed
        return
    sizes = mesh_sizes((technique,), technique.stages)
    peaks = [
        peak(rehearse(replace(load_job(JOB, flags), mesh=imagined_mesh(sizes, rank, True)), (technique,))).bytes
        for rank in range(technique.stages)
    ]
    assert [worker["peak_bytes"] for worker in results[0]["workers"]] == peaks


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stages_of_split_layers_find_what_one_process_does(own: bool, tmp_path: Path) -> None:
    found = {}
    for name, world, plan in (("alone", 1, []), ("cut", 4, [TensorParallel(2), Pipeline(2, 2)])):
        (tmp_path / name / "run").mkdir(parents=True)
        Group(
            tmp_path / name,
            world,
            JOB.parents[1] / "tensor" / "split_validating.py",
            plan,
            4,
            str(tmp_path / name / "run"),
            flags={"own": own},
        ).results()
        found[name] = metrics_of(report_of(tmp_path / name / "run").validated)
    metric = "loss of the first" if own else "loss"
    assert [one["step"] for one in found["cut"]] == [2, 4]
    assert [one[metric] for one in found["cut"]] == pytest.approx([one[metric] for one in found["alone"]], rel=1e-5)
