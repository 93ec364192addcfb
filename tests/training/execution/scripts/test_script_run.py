"""Run folders from a script: the steps one by one, and everything that a run of the command has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.data.feed import NO_BATCH
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.events.history import History
from shoestring.runs.reports.report import report_of
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from tests.waiting import until

BATCHES = [
    (torch.randn(8, 16, generator=torch.Generator().manual_seed(number)), torch.arange(8) % 4) for number in range(5)
]


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)), nn.Linear(16, 4)
    )


def job(**more: Any) -> Job:
    return Job(model=net, data=lambda: BATCHES[:4], held_out=lambda: BATCHES[4:], steps=12, every=3, **more)


@pytest.mark.parametrize("techniques", [(), (Checkpoint(every=1),)], ids=["plain", "checkpoint"])
def test_a_script_that_left_its_run_goes_on_with_the_same_bits(techniques: Any, tmp_path: Path) -> None:
    whole, parts = net(), net()
    parts.load_state_dict(whole.state_dict())
    steps = list(shoestring.train(job(), techniques, whole, run=tmp_path / "a"))
    first = list(islice(shoestring.train(job(), techniques, parts, run=tmp_path / "b", save_every=5), 7))
    assert report_of(tmp_path / "b").state == "stopped"
    rest = list(
        shoestring.train(job(), techniques, net(), run=tmp_path / "b")
    )  # a new process would have other weights, too
    assert [*first, *rest] == steps and [step.number for step in steps if step.metrics] == [3, 6, 9, 12]
    told = report_of(tmp_path / "b")
    assert told.state == "finished" and told.weights_sha256 == report_of(tmp_path / "a").weights_sha256
    assert told.weights_sha256 == weights_sha256(whole.state_dict())
    again = net()
    assert not list(shoestring.train(job(), techniques, again, run=tmp_path / "b"))
    assert weights_sha256(again.state_dict()) == told.weights_sha256, "a finished run gives its weights"


def test_another_job_is_refused_in_the_words_of_a_script(tmp_path: Path) -> None:
    list(shoestring.train(job(), run=tmp_path / "a"))
    with pytest.raises(Mistake, match="adopt=True"):
        list(shoestring.train(job(clip=1.0), run=tmp_path / "a"))
    with pytest.raises(Mistake, match="save_every='1 epoch'"):
        list(shoestring.train(job(), run=tmp_path / "c", save_every="1 epoch"))


def test_fit_keeps_a_run_too(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    fitted = shoestring.fit(net(), loss, BATCHES, run=tmp_path / "a", steps=7)
    assert len(fitted.losses) == 7 and report_of(tmp_path / "a").state == "finished"


def test_two_scripts_do_not_train_in_one_folder(tmp_path: Path) -> None:
    one = shoestring.train(job(), run=tmp_path / "a")
    next(one)
    with pytest.raises(Mistake, match="in use by process"):
        next(iter(shoestring.train(job(), run=tmp_path / "a")))
    one.close()  # type: ignore[attr-defined]


SCRIPT = """# warm
import sys, shoestring
sys.path.insert(0, {root!r})
from tests.training.execution.scripts.test_script_run import job
try:
    for step in shoestring.train(job(), run={run!r}, save_every=100):
        if step.number == 3:
            sys.stdin.readline()   # until the signal was sent
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 0, "interrupted"), (signal.SIGTERM, 143, "")])
def test_a_signal_saves_and_then_does_what_it_always_does(
    number: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    run = tmp_path / "a"
    script = SCRIPT.format(root=str(Path(__file__).parents[4]), run=str(run))
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until(lambda: len(History().read(run).steps) >= 3 or child.poll() is not None, "step 3")
    os.kill(child.pid, number)
    assert child.communicate("\n")[0].strip() == said and child.returncode == code
    told = report_of(run)
    assert told.state == "stopped" and told.checkpoints[-1].step == told.step
    assert len(list(shoestring.train(job(), run=run))) == 12 - told.step


def test_a_run_goes_on_with_its_plan_and_says_so_if_another_is_given(tmp_path: Path) -> None:
    list(islice(shoestring.train(job(), (), run=tmp_path / "a"), 3))
    with pytest.warns(
        UserWarning, match=r"begun with, plain, not with Checkpoint\(every=1\): adopt=True takes that one"
    ):
        list(islice(shoestring.train(job(), (Checkpoint(every=1),), run=tmp_path / "a"), 3))
    list(shoestring.train(job(), (Checkpoint(every=1),), run=tmp_path / "a", adopt=True))
    assert [one.name for one in report_of(tmp_path / "a").plan.techniques or ()] == ["Checkpoint"]


@pytest.mark.parametrize("data", [[], lambda: iter(())], ids=["list", "iterator"])
@pytest.mark.parametrize("use", [(), ("Checkpoint(every=1)",)], ids=["plain", "checkpoint"])
def test_data_without_a_batch_are_refused_as_the_command_refuses_them(data: Any, use: Any, tmp_path: Path) -> None:
    """Also by a plan for other data, in a run folder, and by `verify`, which would find untrained weights alike."""
    empty, plan = Job(net, data, steps=3), shoestring.plan(job(), use=use)
    for way in (
        lambda: list(shoestring.train(empty, use)),
        lambda: list(shoestring.train(empty, plan)),
        lambda: list(shoestring.train(empty, plan, run=tmp_path / "run")),
        lambda: shoestring.verify(empty, plan),
    ):
        with pytest.raises(Mistake, match=NO_BATCH):
            way()
