"""The command line as a user meets it: JSON, exit codes, and one clear message for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoestring.commands.main import main
from shoestring.core import rooms
from shoestring.core.units import bytes_text
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

NET = """
import torch
from torch import nn
from shoestring import Job

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4))
        self.head = nn.Linear(width, 10)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def batches(batch, width):
    draw = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(batch, width, generator=draw)
        yield {"x": x, "y": x[:, :10].argmax(1)}

def elsewhere(net):
    net.extra = nn.Parameter(torch.empty(3, device="meta"))
    return net

def job(width: int = 64, batch: int = 512, fault: str = "") -> Job:
    if fault == "raises":
        raise KeyError("nothing here")
    model = (lambda: elsewhere(Net(width))) if fault == "device" else (lambda: Net(width))
    loss = lambda output, batch: nn.functional.cross_entropy(output, batch["y"])
    return Job(
        model=model, data=lambda: batches(batch, width), forward=lambda model, batch: model(batch["x"]),
        loss=(lambda output, batch: loss(output, batch) * float("nan")) if fault == "nan" else loss,
        weight=lambda batch: len(batch["y"]), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), batch=batch, steps=4,
    )
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


REAL = sys.executable  # for tests of the bytes of a process, or of what is imported


def shoestring(
    *words: object, cwd: Path | None = None, python: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python or sys.executable, "-m", "shoestring", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=HUNG,
        cwd=cwd,
        env=os.environ | variables,
    )


def answer(*words: object, cwd: Path, python: str = "") -> dict[str, Any]:
    done = shoestring(*words, "--json", cwd=cwd, python=python)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_plan_train_and_verify_agree_on_one_job(net: Path, tmp_path: Path) -> None:
    use = ["--use", "Checkpoint(every=2)", "--use", "Accumulate(pieces=4)", "--use", "Allocator(kind='huge')"]
    plan = answer("plan", net, "--memory", "1GiB", *use, "--save", tmp_path / "plan.json", cwd=tmp_path, python=REAL)
    assert [one["name"] for one in plan["chosen"]["techniques"]] == ["Accumulate", "Checkpoint", "Allocator"]
    assert {"peak_bytes", "process_bytes", "step_seconds", "exactness"} <= set(plan["chosen"]) & set(plan["plain"])
    assert {"runners_up", "tried", "fitting", "seconds"} <= set(plan)
    report = answer("train", net, "--plan", tmp_path / "plan.json", cwd=tmp_path, python=REAL)
    assert report["predicted"]["peak_bytes"] == report["measured"]["peak_bytes"] == plan["chosen"]["peak_bytes"]
    assert report["predicted"]["process_bytes"] == pytest.approx(report["measured"]["process_bytes"], rel=0.06)
    assert report["steps"] == 4 and len(report["weights_sha256"]) == 64 and report["losses"][-1] < report["losses"][0]
    assert (tmp_path / report["run"] / "report.html").exists()
    verdict = answer("verify", net, "--plan", tmp_path / "plan.json", cwd=tmp_path)
    assert all(one["kept"] for one in verdict["verdicts"]) and verdict["largest_difference"] < 1e-2
    assert verdict["measured"]["peak_bytes"] == plan["chosen"]["peak_bytes"]


def test_a_budget_below_plain_is_met_by_a_plan(net: Path, tmp_path: Path) -> None:
    size = ("--width", 32, "--batch", 16384)  # many activations for few operations
    plain = answer("plan", net, *size, "--use", "FusedOptimizer()", cwd=tmp_path, python=REAL)["plain"]["process_bytes"]
    report = answer("train", net, *size, "--memory", int(0.85 * plain), cwd=tmp_path, python=REAL)
    assert report["techniques"] and report["measured"]["process_bytes"] <= 0.85 * plain


def test_a_budget_that_nothing_meets_is_refused_with_the_least_that_works(net: Path, tmp_path: Path) -> None:
    done = shoestring("plan", net, "--memory", "50MiB", "--json", cwd=tmp_path)
    assert done.returncode == 3 and "the least that works is" in done.stderr
    found = json.loads(done.stdout)
    assert found["least_bytes"] == found["nearest"]["process_bytes"] > 50 * 2**20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "NET", "--memory", "6 bananas"], "'6 bananas' is not a size"),
        (["plan", "NET", "--widht", "3"], "--width"),
        (["plan", "NET", "--width", "wide"], "whole number"),
        (["plan", "nothing.py"], "neither a file nor a built-in job"),
        (["plan", "NET", "--use", "Checkpont(every=2)"], "did you mean Checkpoint?"),
        (["plan", "NET", "--use", "Checkpoint(evry=2)"], "it has every, groups, schedule"),
        (["plan", "NET", "--use", "Checkpoint(every=2"], "is not a technique"),
        (["plan", "NET", "--use", "StepInBackward()", "--use", "Accumulate(pieces=2)"], "can't be combined"),
        pytest.param(
            ["plan", "NET", "--use", "Accumulate(pieces=1000)"], "a piece needs a sample", marks=pytest.mark.slow
        ),
        (["plan", "NET", "--plan", "missing.json"], "there is no plan file"),
        (["trian", "NET"], "did you mean train?"),
        (["train", "NET", "--memory"], "--memory needs a value; see shoestring train --help"),
        (["train", "NET", "--devices", "x"], "--devices takes a whole number, and 'x' is none"),
        (
            ["plan", "NET", "--exact", "bit"],
            "--exact takes one of 'bits', 'rounding', 'distribution', and 'bit' is none of them",
        ),
        (["plan", "NET", "--exact", "draws"], "argument --exact: 'draws' is called 'distribution' now"),
        (["plan"], "what is missing: job"),
        (["train", "NET", "--run", "/sys/shoestring"], "'/sys/shoestring' can't be used ("),
        (["plan", "NET", "--widht", "3"], "did you mean --width?"),
        (["train", "NET", "--memroy", "3GiB"], "did you mean --memory?"),
        (["train", "--memroy", "3GiB", "NET"], "did you mean --memory?"),
        (["train", "nte.py"], "did you mean net.py?"),
        (["plan", "gtp"], "did you mean gpt?"),
        (["export", "RUN", "--to", "csv", "--otu", "x"], "did you mean --out?"),
        (
            ["plan", "NET", "--memory", "600"],
            "--memory 600: that is 600 bytes, and no process is that small; did you mean 600MiB?",
        ),
        (["plan", "NET", "--steps", "0"], "--steps 0: give 1 or more"),
        (["plan", "NET", "--seed", "x"], "--seed x: this flag takes a whole number"),
        (["plan", "NET", "--width", "--memory", "1GiB"], "--width needs a value, such as --width 64"),
        (["plan", "NET", "--fault", "raises"], "raised KeyError"),
        pytest.param(
            ["train", "NET", "--fault", "nan", "--use", "FusedOptimizer()"],
            "the loss became nan in step 1",
            marks=pytest.mark.slow,
        ),
        (["train", "NET", "--fault", "device", "--use", "FusedOptimizer()"], "device"),
        (["plan", "gpt", "--width", "64"], "a --width of 64 can't be divided among 5 --heads"),
        (["dance"], "'dance' is no command"),
        (["watch", "missing"], "there is no missing"),
        (["export", "missing", "--to", "csv"], "missing is not a run of shoestring"),
    ],
)
def test_a_mistake_gets_one_clear_message_exit_code_2_and_no_traceback(
    words: list[str], said: str, net: Path, tmp_path: Path
) -> None:
    done = shoestring(*(net if word == "NET" else word for word in words), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if line.startswith("shoestring:")]) == 1


QUICK = [
    ["--help"],
    ["plan", "--help"],
    ["plan", "NET", "--widht", "3"],
    ["plan", "NET", "--memory", "6 bananas"],
    ["plan", "NET", "--use", "Checkpont(every=2)"],
    ["plan", "NET", "--use", "Checkpoint(evry=2)"],
    ["--version"],
    ["train", "NET", "--help"],
    ["train", "--help", "NET"],
    ["plan", "NET", "--memory", "600"],
    ["train", "NET", "--use", "Checkpoint(every=2"],
    ["watch", "missing"],
    ["export", "missing", "--to", "csv"],
]


@pytest.mark.parametrize("command", ["plan", "train", "distill", "federate", "compress", "verify"])
@pytest.mark.parametrize("job", ["nothing.py", "broken.py", "folder", "run"])
def test_help_is_shown_whatever_the_job_is(
    command: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def job(:")
    for name in ("folder", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "job.py").write_text("def job(width: int = 7):\n    raise SystemExit('help runs no job')\n")
    for words in ([command, job, "--help"], [command, "--help", job]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown = capsys.readouterr().out
        assert ended.value.code in (0, None) and f"usage: shoestring {command}" in shown
        assert ("--width" in shown) if job == "run" else ("they can't be shown" in shown)


def test_help_lists_the_flags_of_the_job(net: Path) -> None:
    shown = [shoestring("train", *words).stdout for words in ((net, "--help"), ("--help", net))]
    assert shown[0] == shown[1] and "flags of the job net.py:" in shown[0]
    said = " ".join(shown[0].split())
    assert (
        "--width INT a whole number (default 64)" in said
        and "--fault STR text (default empty)" in said
        and "--epochs N" in said
    )
    assert shoestring("--version").stdout.startswith("shoestring ")


def test_help_begins_with_what_a_newcomer_needs_however_the_rooms_were_declared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = rooms.own_entries()
    shown = []
    for order in (entries, entries[::-1]):  # a wheel has them by name
        rooms.own_rooms.cache_clear()
        monkeypatch.setattr(rooms, "own_entries", lambda order=order: order)
        with pytest.raises(SystemExit):
            main(["--help"])
        shown.append(capsys.readouterr().out)
    rooms.own_rooms.cache_clear()
    assert shown[0] == shown[1] and re.findall(r"^    (\w+)", shown[0], re.MULTILINE)[:3] == ["plan", "train", "verify"]


@pytest.mark.parametrize("words", [["train", "job.py"], ["plan", "/nowhere/job.py"], ["doctor"], ["watch", "runs"]])
def test_a_current_folder_that_was_deleted_is_said(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "the current folder was deleted or moved" in capsys.readouterr().err


def test_a_flag_of_the_job_that_the_command_has_too_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def job(patience: int = 3, step: int = 1): ...\n")
    done = shoestring("train", "own.py", "--patience", "4", cwd=tmp_path)
    assert done.returncode == 2 and "give the job's argument another name" in done.stderr
    assert (
        "--patience: flags of the command have these names"
        in shoestring("train", "own.py", "--help", cwd=tmp_path).stdout
    )
    assert "gave NoneType, not a Job" in shoestring("train", "own.py", "--step", "4", cwd=tmp_path).stderr, (
        "and none is abbreviated"
    )


def test_help_and_argument_errors_import_nothing_heavy(net: Path) -> None:
    for words in QUICK:
        words = [str(net) if word == "NET" else word for word in words]
        code = (
            f"import sys\nbefore = set(sys.modules)\nimport shoestring.commands.main as c\n"
            f"try: c.run({words!r})\nexcept SystemExit: pass\n"
            f"assert not {{'torch', 'pathlib', 'typing', 'inspect', 'shutil', 'json'}} & (set(sys.modules) - before)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0, words


def test_doctor_shows_both_speeds_of_the_disk_and_keeps_them(tmp_path: Path) -> None:
    done = shoestring("doctor", cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    (kept,) = (json.loads(path.read_text()) for path in (tmp_path / ".cache" / "shoestring").glob("hardware-*"))
    assert rows["disk"] == f"{bytes_text(kept['disk'])}/s, written and read back"
    assert rows["disk, direct"] == (
        f"{bytes_text(kept['direct'])}/s past the page cache" if kept["direct"] else "no direct I/O here"
    )
    assert (
        f"best of {kept['tries']} tries" in rows["measured"] and f"{kept['busy']:.0%} of the cores" in rows["measured"]
    )
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept["when"])) in rows["measured"] and kept["tries"] >= 3
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


def test_traceback_shows_where_a_job_raised(net: Path) -> None:
    done = shoestring("plan", net, "--fault", "raises", "--traceback")
    assert done.returncode == 2 and "net.py" in done.stderr and "Traceback" in done.stderr


ROUTED = """
import torch
from torch import nn
from shoestring import Job

class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
    def forward(self, x):
        score = self.a(x)
        chosen = score[score.sum(1) > 0]           # how many rows this keeps depends on the weights
        return self.head(torch.cat([self.b(chosen), score[score.sum(1) <= 0]]))

def job() -> Job:
    x, y = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(64, dtype=torch.long)
    return Job(model=Routed, data=lambda: [(x, y)] * 9, steps=3)
"""


@pytest.mark.slow
def test_a_model_that_fake_tensors_cannot_run_is_planned_on_real_ones_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "routed.py"
    path.write_text(ROUTED)
    report = answer("train", path, "--use", "FusedOptimizer()", "--use", "Allocator(kind='huge')", cwd=tmp_path)
    assert "real tensors" in report["basis"] and report["predicted"]["peak_bytes"] == report["measured"]["peak_bytes"]
