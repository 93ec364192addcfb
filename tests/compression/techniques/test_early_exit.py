"""Exits as a technique of compression: trained, calibrated, written, loaded, and reported beside what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake
from shoestring.commands.main import run as command
from shoestring.compression.begin import begin_session
from shoestring.compression.exits.early_exit import EarlyExitModel
from shoestring.compression.exits.evidence import PartSeconds
from shoestring.compression.library import source_of
from shoestring.compression.onnx.export import export_onnx
from shoestring.compression.session import CompressOptions, CompressSession, loaded_model
from shoestring.compression.techniques.early_exit import EarlyExit, exits_again
from shoestring.core.budget import Budget
from shoestring.core.errors import OverBudget
from shoestring.core.job import default_forward
from tests.machine import CountedWork

FILE = """
import torch
from torch import nn
from shoestring import Job

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
    def forward(self, x):
        return x + 0.2 * self.work(x)

def batch(seed):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :4].argmax(1)

def model():
    torch.manual_seed(0)
    first, last = nn.Linear(32, 32), nn.Linear(32, 4)
    with torch.no_grad():
        first.weight.copy_(torch.eye(32)), last.weight.copy_(4 * torch.eye(4, 32))
    return nn.Sequential(first, *(Block() for _ in range(6)), last)

def job():
    return Job(model=model, data=lambda: [batch(n) for n in range(10)], held_out=lambda: [batch(100 + n) for n in range(20)], steps=1)
"""


def counted(model: EarlyExitModel, *given: Any, **more: Any) -> PartSeconds:
    """Costs of parts as blocks, so that thresholds do not depend on a clock; heads cost a tenth of a block."""
    blocks = [0, *model.after, len(model.names)]
    parts = tuple(float(end - begin) for begin, end in pairwise(blocks))
    return PartSeconds(parts, (0.1,) * len(model.after))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shoestring.compression.techniques.leave_early.seconds_by_part", counted)
    (tmp_path / "job.py").write_text(FILE)
    return tmp_path / "job.py"


def data(file: Path) -> Any:
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names


def test_heads_are_trained_thresholds_calibrated_and_the_folder_gives_the_model_with_exits(
    file: Path, tmp_path: Path
) -> None:
    small = shoestring.compress(file, tmp_path / "small", use=["EarlyExit(every=2, loss=0.5)"])
    model, told = small.model, small.report["exits"]
    assert isinstance(model, EarlyExitModel) and model.after == (2,), "a head that no sample needs is not stored"
    assert told["after_blocks"] == [2]
    for kind in ("predicted", "measured"):
        assert sum(told["shares"][kind]) == pytest.approx(1) and len(told["shares"][kind]) == 2
        assert sum(told["shares"][kind][:-1]) > 0.5, "half of the answers may be other ones, so most rows leave"
        assert told["loss"][kind] <= 0.6 and told["speedup"][kind] > 0
    assert any("exits after blocks 2" in one for one in small.report["notes"])
    made = data(file)
    x = made["batch"](7)[0]
    loaded = shoestring.load(tmp_path / "small", job=file)
    assert torch.equal(loaded(x), model(x))
    answered = model.answer(x)
    whole: Tensor = made["model"]().eval()(x)
    stays = answered.exits == 1
    assert loaded.depths.tolist() == answered.exits.tolist()
    torch.testing.assert_close(answered.output[stays], whole[stays]), "who goes to the end is answered as before"
    agreement = float((answered.output.argmax(1) == whole.argmax(1)).float().mean())
    assert agreement > 0.5, "heads have learned from the model's own answers"


def test_exits_stand_beside_storage(file: Path, tmp_path: Path) -> None:
    small = shoestring.compress(file, tmp_path / "small", use=["EarlyExit(every=3, loss=0.5, steps=50)", "Half()"])
    assert isinstance(small.model, EarlyExitModel)
    assert {one["technique"] for one in small.report["layers"]} >= {"Half"}
    assert small.report["size_bytes"]["measured"] == small.report["size_bytes"]["predicted"]


def test_the_command_takes_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "compress",
        str(file),
        "--use",
        "EarlyExit(every=3, loss=0.5, steps=50)",
        "--out",
        str(tmp_path / "c"),
        "--json",
    ]
    assert command(words) == 0
    assert json.loads(capsys.readouterr().out)["exits"]["after_blocks"] == [3]


def test_what_can_not_be_is_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="6 blocks, so no exit"):
        shoestring.compress(file, tmp_path / "a", use=["EarlyExit(every=6)"])
    job = Job(model=lambda: nn.Linear(4, 2), data=lambda: [(torch.randn(8, 4), torch.zeros(8).long())] * 40)
    with pytest.raises(Mistake, match="no chain of like blocks"):
        shoestring.compress(job, tmp_path / "b", use=["EarlyExit()"])
    for knobs in ({"every": 0}, {"loss": 2.0}, {"measure": "mood"}, {"delta": 1.0}):
        with pytest.raises(Mistake, match="EarlyExit"):
            EarlyExit(**knobs)  # type: ignore[arg-type]


def test_an_edit_that_no_one_wrote_is_refused(file: Path) -> None:
    edit = {"after": [2], "heads": [{"width": 1 << 40, "classes": 4, "pool": "none", "grid": 1}], "measure": "margin"}
    with pytest.raises(ValueError, match="a head of"):
        exits_again(data(file)["model"](), [edit])


def test_an_onnx_file_is_refused(file: Path, tmp_path: Path) -> None:
    small = shoestring.compress(file, tmp_path / "small", use=["EarlyExit(every=3, loss=0.5, steps=5)"])
    with pytest.raises(Mistake, match="each takes its own way"):
        export_onnx(small.model, default_forward, data(file)["batch"](0), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def planned(work: CountedWork, limit: float, job: Job | None = None) -> CompressSession:
    """The plan for an answer in this share of the plain model's time, for nine answers in ten."""
    if job is None:
        names: dict[str, Any] = {}
        exec(FILE.replace("range(6)", "range(3)"), names)
        job = names["job"]()
    model, (x, *_) = job.model().eval(), job.data()[0]
    with torch.no_grad():
        begin = work.now
        model(x[:1])
        whole = work.now - begin
    given = Budget(latency=limit * whole, percentile=0.9)
    return begin_session(source_of(job, None, {}), CompressOptions(given, unseen=256))


def test_a_latency_is_kept_by_exits_and_the_folder_says_how_deep_samples_go(tmp_path: Path, work: CountedWork) -> None:
    """Counted in operations of layers, which no format of weights makes fewer."""
    session = planned(work, 0.6)
    (chosen,) = session.plan.techniques
    assert isinstance(chosen, EarlyExit) and session.plan.predicted["quality"] > 0.5
    measured = session.write_and_measure(tmp_path / "small")
    report = session.report(measured, tmp_path / "small")
    for one in (report.latency_ms.p50, report.latency_ms.mean):
        assert one.measured == pytest.approx(one.predicted, rel=0.15), "operations are the same each time"
    assert measured.latency.at(0.9) < measured.latency.p99 or measured.exits.shares[-1] < 0.01
    assert measured.latency.at(0.9) <= 0.6 * session.plain_latency.p50 and not report.missed
    assert measured.size == session.plan.predicted["size_bytes"], "with the heads that are used, and no other"
    loaded, batch = loaded_model(session.source, tmp_path / "small"), session.given.unseen[0]
    assert isinstance(loaded, EarlyExitModel)
    loaded(batch[0])
    assert set(loaded.depths.tolist()) <= set(range(len(loaded.after) + 1)) and len(loaded.depths) == len(batch[0])


def test_heads_are_only_trained_where_the_model_misses_the_latency(work: CountedWork) -> None:
    assert planned(work, 2.0).outcome.chosen.techniques == ()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Linear(4, 3), "no chain of like blocks"),
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)), nn.Unflatten(1, (2, 2))),
            "every token",
        ),
    ],
)
def test_why_a_model_can_not_have_exits_is_told_among_the_others(
    make: Callable[[], nn.Module], why: str, work: CountedWork
) -> None:
    def batches(seed: int) -> list[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(8, 4, generator=generator),) for _ in range(8)]

    job = Job(
        model=make, data=lambda: batches(0), held_out=lambda: batches(1), forward=lambda model, batch: model(batch[0])
    )
    with pytest.raises(OverBudget, match=f"EarlyExit can't be used: .*{why}"):
        planned(work, 0.5, job)
