"""Folders that somebody sent us: whatever they name, sealed as we seal it, is not run and not opened. It is shown, with what to give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring
from shoestring import Mistake
from shoestring.commands.main import run as command
from shoestring.core.files.seal import seal

NET = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 8, words: str = "") -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)), steps=2,
               data=[(torch.randn(16, 8), torch.arange(16) % 2) for _ in range(12)])
"""
CANARY = """
import pathlib
pathlib.Path({marker!r}).write_text("I was run")
"""


class Sent:
    """A run and a compressed model, and a job file that leaves a mark where it is imported, whoever does it."""

    def __init__(self, place: Path) -> None:
        self.place, self.marker = place, place / "marker"
        self.net, self.canary = place / "net.py", place / "canary.py"
        self.net.write_text(NET)
        self.canary.write_text(CANARY.format(marker=str(self.marker)) + NET)
        self.run, self.small = place / "run", place / "small"
        for _ in shoestring.train(str(self.net), run=self.run):
            pass
        shoestring.compress(self.run, self.small, job=self.net, use=["Half()"], samples=16)

    def copied(self, folder: Path, to: Path) -> Path:
        shutil.copytree(folder, to)
        shutil.copy(self.canary, to / "job.py")
        return to

    @property
    def quiet(self) -> bool:
        return not self.marker.exists()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Sent:
    return Sent(tmp_path_factory.mktemp("sent"))


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    change(data)
    path.write_bytes(seal(data))


def names_of(sent: Sent, folder: Path) -> list[str]:
    """How a folder may name code, each of which would be found."""
    (folder.parent / "linked.py").symlink_to(sent.canary)
    return [
        str(sent.canary),
        str(folder / "job.py"),
        f"/proc/self/cwd/{folder.name}/job.py",
        f"{folder.name}/job.py",
        f"{folder}/../{folder.name}/job.py",
        str(folder.parent / "linked.py"),
        "/dev/stdin",
        "job.py",
    ]


def test_no_job_that_a_compressed_model_names_is_run(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sent.copied(sent.small, tmp_path / "downloaded")
    monkeypatch.chdir(tmp_path)
    for name in names_of(sent, folder):
        reseal(folder / "manifest.json", lambda data, name=name: data["job"].update(file=name, sha256="0" * 64))  # type: ignore[misc]
        with pytest.raises(Mistake, match="only if you name it") as told:
            shoestring.load("downloaded")
        assert name in str(told.value) and sent.quiet
    with pytest.warns(UserWarning, match="is not the job that downloaded was made with"):
        assert shoestring.load("downloaded", job=sent.net)(torch.zeros(2, 8)).shape == (2, 2)
    assert (
        shoestring.load(
            "downloaded",
            model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
        )(torch.zeros(2, 8)).shape
        == (2, 2)
        and sent.quiet
    )


@pytest.mark.parametrize(
    "words",
    [
        ["compress", "downloaded", "--use", "Half()"],
        ["export", "downloaded", "--to", "hf"],
        ["export", "downloaded", "--to", "peft"],
        ["distill", "net.py", "--teacher", "downloaded"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_no_job_that_a_run_names_is_run(
    words: list[str], sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sent.copied(sent.run, tmp_path / "downloaded")
    shutil.copy(sent.net, tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    paths = [one for one in names_of(sent, folder) if one.startswith("/")]  # others are names of scripts
    assert paths
    for name in paths:
        reseal(folder / "run.json", lambda data, name=name: data.update(job=name, source="0" * 64))  # type: ignore[misc]
        assert command(words) == 2
        told = capsys.readouterr().err
        assert "only if you name it" in told and name in told and sent.quiet
    reseal(folder / "run.json", lambda data: data.update(job="script.py"))
    assert command(words) == 2 and "script" in capsys.readouterr().err and sent.quiet


def test_a_compressed_teacher_and_its_job_are_named_by_the_user(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoestring.compression.distillation.sources import teacher_opener

    folder = sent.copied(sent.small, tmp_path / "downloaded")
    reseal(folder / "manifest.json", lambda data: data["job"].update(file=str(folder / "job.py")))
    with pytest.raises(Mistake, match="only if you name it"):
        teacher_opener(str(folder))()
    assert teacher_opener(f"{sent.net}@{folder}")().model(torch.zeros(2, 8)).shape == (2, 2) and sent.quiet


def test_numbers_are_taken_from_a_folder_and_text_that_may_name_a_file_is_not(sent: Sent, tmp_path: Path) -> None:
    folder = sent.copied(sent.small, tmp_path / "downloaded")

    def flags(**given: Any) -> None:
        reseal(folder / "manifest.json", lambda data: data["job"].update(flags=given))

    flags(width=8, words="")
    shoestring.load(folder, job=sent.net)
    flags(width=8, words="/etc/passwd")
    with pytest.raises(Mistake, match=r"it was made with words='/etc/passwd'\. Text can name a file"):
        shoestring.load(folder, job=sent.net)
    shoestring.load(folder, job=sent.net, words="/etc/passwd")
    for wrong in ("8", 1e9, True, None, [8], 1 << 70, float("nan")):
        flags(width=wrong)
        with pytest.raises(Mistake, match="which is no value of that flag"):
            shoestring.load(folder, job=sent.net)
    flags(width=16)
    with pytest.raises(Mistake, match="has the shape"):
        shoestring.load(folder, job=sent.net)


def test_a_built_in_job_needs_no_name(tmp_path: Path) -> None:
    shoestring.compress("digits", tmp_path / "small", use=["Half()"], samples=16, width=4, depth=1)
    assert shoestring.load(tmp_path / "small")(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_checkpoint_names_no_file_outside_of_its_run(sent: Sent, tmp_path: Path) -> None:
    from shoestring.runs.checkpoints.checkpoints import RunCheckpoint
    from shoestring.runs.weights.tensors import UnreadableTensors

    checkpoint = RunCheckpoint(tmp_path / "run" / "checkpoints" / "step-00000002")
    for name in ("../secret.bin", "/etc/passwd", "a/b.bin", "..", "stream.json"):
        with pytest.raises(UnreadableTensors, match="no file of its run"):
            checkpoint.own_file(name)
    assert checkpoint.own_file("stream.bin") == tmp_path / "run" / "stream.bin"


def test_no_link_in_a_run_is_written_through(sent: Sent, tmp_path: Path) -> None:
    from shoestring.core.files.regular import NotRegular
    from shoestring.runs.events.event_log import Events
    from shoestring.training.memory.offload.disk_store import DiskStore

    (tmp_path / "mine").write_text("precious")
    for name in ("events.jsonl", "stream.bin"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    with pytest.raises(NotRegular, match="is a link"):
        Events(tmp_path)
    store = DiskStore(tmp_path / "stream.bin", torch.empty(0))
    store.reserve("a", 10)
    with pytest.raises(NotRegular, match="is a link"):
        store.open()
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_run_that_goes_on_takes_no_text_and_no_folder_from_its_files(sent: Sent, tmp_path: Path) -> None:
    from shoestring.training.commands.job_flags import check_flags
    from shoestring.training.memory.offload.offload_activations import OffloadActivations
    from shoestring.training.planning.plan import check_paths, load_plan, training_plan

    check_flags("run", sent.net, {"width": 8, "words": ""}, {})
    check_flags("run", sent.net, {"words": "mine.txt"}, {"words": "mine.txt"})
    with pytest.raises(Mistake, match="--words '/etc/passwd'"):
        check_flags("run", sent.net, {"words": "/etc/passwd"}, {})
    spill = OffloadActivations(to=str(tmp_path))
    training_plan((spill,)).save(tmp_path / "plan.json")
    with pytest.raises(Mistake, match="No folder that a file names"):
        load_plan(tmp_path / "plan.json")
    check_paths((spill,), (f"OffloadActivations(to={str(tmp_path)!r})",), "plan")


def test_a_planning_cache_has_no_other_file_hashed_than_modules(tmp_path: Path) -> None:
    from shoestring.planning.answers import importable

    assert importable(__file__) and not importable("/etc/passwd") and not importable("/proc/self/cwd/x.py")
    assert not importable(str(tmp_path / "elsewhere.py"))
