"""Several workers from a script: what is sent to them, what can't be, and the trained weights in the very model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake
from shoestring.core.workers.staging import Staging
from shoestring.jobfile import load_job
from shoestring.planning.plan import Outcome
from shoestring.runs.events.event import Stepped, Validated
from shoestring.runs.options import RunOptions
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.execution.scripts import sent_job as sending
from shoestring.training.execution.scripts.script_group import NobodyAsks, StepsFromEvents, group_of
from shoestring.training.execution.scripts.sent_job import Given, check_guard, refuse_while_imported, send_job
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.plan import TrainingDetails, TrainingPlan, training_plan

BATCHES = [
    (torch.randn(8, 16, generator=torch.Generator().manual_seed(number)), torch.arange(8) % 4) for number in range(3)
]
GUARD = 'if __name__ == "__main__":'


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def job(**more: Any) -> Job:
    return Job(**{"model": Given(net()), "data": Given(BATCHES), "loss": loss, "steps": 7} | more)


def staged() -> TrainingPlan:
    """A plan for two workers, made by hand: nothing is measured for it."""
    cut = Staging((2, 2), "1f1b", 4, 0.2, names=("0", "1", "2", "3"))
    return training_plan(
        (Pipeline(stages=2, pieces=4),),
        details=TrainingDetails(world=2, mesh={"data": 1, "stage": 2, "tensor": 1}, staging=cut),
    )


@pytest.mark.usefixtures("warm_workers")
def test_two_stages_train_the_very_model_as_one_process_would(tmp_path: Path) -> None:
    alone, model = net(), net()
    expected = [step.loss for step in shoestring.train(job(), (), alone)]
    steps = list(shoestring.train(job(), staged(), model, devices=2, run=tmp_path / "run"))
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-5)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-6)
    told = report_of(tmp_path / "run")
    found = json.loads(json.dumps(report_json(told)))
    assert told.state == "finished" and found["mesh"] == {"data": 1, "stage": 2, "tensor": 1}
    assert found["cut"] == [2, 2] and found["schedule"] == "1f1b"
    assert found["bubble"]["predicted"] == 0.2 and 0 < found["bubble"]["measured"] < 1
    kinds = [[work[0] for work in own] for own in found["timeline"]["measured"]]
    assert kinds == [list("FFBFBFBB"), list("FBFBFBFB")], "the measured picture has every action in its order"
    assert found["timeline"]["step"] == 7 and found["timeline"]["steps"] == 5, "the two tracked steps do not count"
    assert len(found["peaks"]) == 2 and [one["place"]["stage"] for one in found["workers"]] == [0, 1]
    assert [one["measured"]["peak_bytes"] for one in found["workers"]] == found["peaks"]
    assert "Who computes when" in (tmp_path / "run" / "report.html").read_text()


def test_a_job_is_the_same_in_another_process(tmp_path: Path) -> None:
    model = net()
    made = send_job(job(clip=0.5), model, tmp_path, 2)
    assert made.origin is not None and made.clip == 0.5 and made.loss is loss
    again = load_job(made.origin.file, {})
    one, other = again.model(), again.model()
    assert one is not other and torch.equal(one[0][0].weight, model[0][0].weight), (
        "every call gives the model as it was sent"
    )
    assert torch.equal(list(again.data())[1][0], BATCHES[1][0])
    written = Path(made.origin.file).read_text()
    (tmp_path / "b").mkdir()
    assert Path(send_job(job(clip=0.5), net(), tmp_path / "b", 2).origin.file).read_text() == written  # type: ignore[union-attr]


def local() -> Any:
    def inner(output: Tensor, batch: Any) -> Tensor:
        return output.sum()

    return inner


@pytest.mark.parametrize(
    "more, words",
    [
        (
            {"loss": lambda output, batch: output.sum()},
            "the job's loss can't be sent .* it is a lambda, .* with def at the top level",
        ),
        ({"loss": local()}, "the job's loss can't be sent .*local"),
        ({"data": Given(one for one in BATCHES)}, "the data can't be sent .*generator.*write a job file"),
        ({"show": lambda model: ""}, "the job's show can't be sent"),
    ],
)
def test_what_can_not_be_sent_is_said_before_anything_is_started(more: dict[str, Any], words: str) -> None:
    with pytest.raises(Mistake, match=words):
        next(shoestring.train(job(**more), staged(), net(), devices=2))
    if "loss" in more:
        with pytest.raises(Mistake, match="devices= starts"):
            shoestring.fit(net(), more["loss"], BATCHES, devices=2)


def test_a_plan_for_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Mistake, match=r"DataParallel\(\) is a plan for 3 workers, and devices=2 are to train: plan for as many"
    ):
        next(
            shoestring.train(
                job(), training_plan((DataParallel(),), details=TrainingDetails(world=3)), net(), devices=2
            )
        )
    with pytest.raises(Mistake, match="devices=0: give 1 or more"):
        shoestring.fit(net(), loss, BATCHES, devices=0)
    with pytest.raises(
        Mistake, match=r"Pipeline\(\) divides a model between workers, and there is one: give devices=2"
    ):
        shoestring.plan(job(), use=["Pipeline(stages=2)"])
    with pytest.raises(Mistake, match="3 workers can't be divided into groups of 2"):
        shoestring.plan(job(), use=["Pipeline(stages=2)"], devices=3)


def script(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(text)
    monkeypatch.setattr(sending, "script_file", lambda: str(file))
    return file


def test_a_script_without_a_guard_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "import shoestring\nshoestring.fit(...)\n", monkeypatch)
    with pytest.raises(
        Mistake, match=f"import mine.py to find Net there, and would begin anew: put what begins it under `{GUARD}`"
    ):
        check_guard("Net", 2)
    script(tmp_path, f"import shoestring\n{GUARD}\n    shoestring.fit(...)\n", monkeypatch)
    check_guard("Net", 2)
    monkeypatch.setattr(sending, "script_file", lambda: "")
    with pytest.raises(Mistake, match="Net, which was defined at a prompt or in a notebook"):
        check_guard("Net", 2)


def test_a_script_that_trains_while_a_worker_imports_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import shoestring\nclass Net: pass\nlist(shoestring.train('gpt'))\n")
    monkeypatch.setattr(sending, "origin", sending.SentOrigin())
    sending.origin.file = str(file)
    with pytest.raises(Mistake, match=r"mine\.py calls shoestring\.train while a worker process imports it"):
        sending.script()
    assert sending.SCRIPT not in sys.modules and not sending.origin.importing
    refuse_while_imported("train")  # it is over
    file.write_text(f"import shoestring\nclass Net: pass\n{GUARD}\n    list(shoestring.train('gpt'))\n")
    try:
        assert sending.script().Net.__module__ == sending.SCRIPT
    finally:
        sys.modules.pop(sending.SCRIPT, None)


def test_a_script_of_its_own_says_what_to_write(tmp_path: Path) -> None:
    """As a user meets it: a real script, started by Python."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch, shoestring\nfrom torch import nn\nclass Net(nn.Linear): pass\n"
        "shoestring.fit(Net(4, 4), nn.functional.mse_loss, [torch.ones(4, 4)], devices=2)\n"
    )
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.strip().splitlines()[-1].endswith(
        f"devices=2 starts processes that import mine.py to find Net there, and would begin anew: put what begins it under `{GUARD}`"
    )


def test_steps_are_told_once_with_their_validation() -> None:
    told: list[Any] = []
    follow = StepsFromEvents(told.append)
    for event in (
        Stepped(1, 3.0, 0.1, 1, 1),
        Stepped(2, 2.0, 0.1, 1, 1),
        Validated(2, metrics={"loss": 2.5}),
        Stepped(2, 2.0, 0.1, 1, 1),
        Stepped(3, 1.0, 0.1, 1, 1),
    ):
        follow(event)
    follow.flush()
    assert told == [(1, 3.0, {}), (2, 2.0, {"loss": 2.5}), (3, 1.0, {})]


def test_a_group_that_nobody_asks_any_more_is_noted_as_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(*_: Any, **__: Any) -> Any:
        raise NobodyAsks

    monkeypatch.setattr("shoestring.training.execution.scripts.script_group.run_group", left)
    made = send_job(job(), net(), tmp_path, 2)
    group = group_of(replace(job(), origin=None), made, Outcome(staged()), net(), RunOptions(run=tmp_path / "run"), 2)
    with pytest.raises(NobodyAsks):
        group.run()
    assert report_of(tmp_path / "run").state == "stopped"
