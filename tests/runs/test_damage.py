"""A run's folder that was damaged: whatever bit flips, whatever stands where a file should be, it is told or it does not matter."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from shoestring.commands.main import run as command
from shoestring.core.errors import Mistake
from shoestring.core.files.seal import Damaged, seal, unseal
from shoestring.core.technique import technique_json
from shoestring.planning.plan import Outcome
from shoestring.processes.named_job import claim_of_run
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint, list_checkpoints, newest_good
from shoestring.runs.events.event_log import NAME, Events, line_of, read
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder, Unusable, holder
from shoestring.runs.reports.export import checkpoint_of, export_steps, export_weights
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.runs.request import request_for
from shoestring.runs.resume import open_run
from shoestring.runs.session import kept_plan, kept_report
from shoestring.show.page import page
from shoestring.show.watch.follow import FollowedRun
from shoestring.training.commands.run_plan import following_plan
from shoestring.training.execution import training
from shoestring.training.execution.snapshot import PARTS
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.options import PlanOptions
from shoestring.training.planning.plan import load_plan, plan_in, training_plan
from tests.records import records
from tests.show.made_runs import append, made_run, step_fields
from tests.tasks import train_task
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import torch
from torch import nn
from shoestring import Job

def data():
    while True:
        x = torch.randn(4, 6)
        yield x, x[:, :3].argmax(1)

def job(width: int = 6, steps: int = 6) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)), data=data, steps=steps)
"""
KEPT = ("run.json", "plan.json", "report.json", NAME)  # what every flipped bit of is told


def warned(text: str) -> None:
    print(text, file=sys.stderr)


class Trained:
    """A small run that is finished, and what a command would go on from."""

    def __init__(self, place: Path, *techniques: Any) -> None:
        self.job, self.path = place / "small.py", place / "run"
        self.job.write_text(JOB)
        self.asked = request_for(self.job, {"width": 5}, 1 << 30, None, False, None)
        held = open_run(self.path, self.asked, self.job.read_bytes(), False, False)
        chosen = training_plan(techniques)
        held.folder.write("plan.json", Outcome(chosen).as_json())
        task = train_task(self.job, 6, map(technique_json, techniques), self.path, {"steps": 2}, {"width": 5})
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            result = training.train(task, lambda event: None)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        told = report_json(report_of(self.path))
        held.folder.write(
            "report.json",
            {name: told[name] for name in ("losses", "predicted", "measured", "techniques")}
            | {"steps": 6, "shown": "", "weights_sha256": result.weights_sha256},
        )
        (self.path / "report.html").write_text(page(report_of(self.path)))
        held.lock.release()
        self.files = sorted(path for path in self.path.rglob("*") if path.is_file())
        self.before = self.outlook()

    def outlook(self) -> tuple[Any, str, bool]:
        """What is trained from: the request and the plan; the checkpoint; and whether a newer one was passed over, which is told."""
        held = open_run(self.path, self.asked, self.job.read_bytes(), False, False)
        try:
            plan = kept_plan(held.folder, plan_in)
            good, bad = newest_good(held.folder.checkpoints, PARTS)
        finally:
            held.lock.release()
        assert plan is not None and good is not None
        return (held.request, held.changed, plan), good.path.name, bool(bad)

    def look(self, out: Path) -> dict[str, Any]:
        """All that only looks."""
        report = report_of(self.path)
        page(report)
        told = report_json(report)
        FollowedRun("run", self.path).look(0.0)
        for kind in ("csv", "json"):
            export_steps(Folder(self.path), kind, out / kind)
            (out / kind).unlink()
        try:
            claim_of_run(Folder(self.path))
        except Unusable as error:
            assert re.search(r"(run|modules)\.json is damaged", str(error))
        kept_report(Folder(self.path), warned)
        return told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), Accumulate(pieces=2))


@pytest.fixture
def ended_if_it_hangs() -> Iterator[None]:
    def hangs(number: int, frame: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(int(HUNG))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def flip_and_look(run: Trained, count: int, out: Path) -> dict[str, int]:
    """Flip bits one by one; gives how often it was refused and how often an older checkpoint was used."""
    draw, tally = random.Random(count), {"refused": 0, "older": 0}
    for _ in range(count):
        path = draw.choice(run.files)
        whole = path.read_bytes()
        bit = draw.randrange(8 * max(len(whole), 1))
        path.write_bytes(flipped(whole, bit))
        try:
            asked, checkpoint, told_of = run.outlook()
            assert asked == run.before[0], f"bit {bit} of {path.name}: something else would be trained"
            assert checkpoint == run.before[1] or told_of, f"bit {bit} of {path}"
            assert path.name not in ("run.json", "plan.json"), f"bit {bit} of {path.name} was not noticed"
            tally["older"] += told_of
        except Mistake as error:
            assert (
                path.name in ("run.json", "plan.json")
                and f"{path.name} is damaged" in str(error)
                and "--fresh" in str(error)
            )
            tally["refused"] += 1
        told = run.look(out)
        assert bool(told["damage"]) == (path.name in KEPT), f"bit {bit} of {path.name}"
        path.write_bytes(whole)
    assert run.outlook() == run.before
    return tally


def test_no_flipped_bit_of_a_run_leads_to_other_weights_or_an_error(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained.before[1:] == ("step-00000006", False)
    tally = flip_and_look(trained, 250, tmp_path)
    assert min(tally.values()) > 0 and "report.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_thousand_flipped_bits(trained: Trained, tmp_path: Path) -> None:
    assert min(flip_and_look(trained, 10_000, tmp_path).values()) > 100


def test_a_flipped_bit_of_streamed_weights_is_never_exported(tmp_path: Path) -> None:
    run = Trained(tmp_path, OffloadModel())
    whole = export_weights(checkpoint_of(Folder(run.path), None), tmp_path / "whole").read_bytes()
    (stream,) = run.path.glob("*.bin")
    data, draw, refused = stream.read_bytes(), random.Random(0), 0
    for number in range(100):
        stream.write_bytes(flipped(data, draw.randrange(8 * len(data))))
        try:
            assert export_weights(checkpoint_of(Folder(run.path), None), tmp_path / str(number)).read_bytes() == whole
        except Mistake as error:
            assert "is not what was written there" in str(error)
            refused += 1
    assert refused > 5


# Sealed files


def test_every_flipped_bit_of_a_sealed_file_is_found() -> None:
    data = {"chosen": {"techniques": [{"name": "Accumulate", "knobs": {"pieces": 2}}]}, "x": [1.5, None, "ü"]}
    whole = seal(data)
    assert unseal(whole) == (data, True) and json.loads(whole)["chosen"] == data["chosen"]
    for bit in range(8 * len(whole)):
        with pytest.raises(Damaged):
            unseal(flipped(whole, bit))
    for size in range(len(whole)):
        with pytest.raises(Damaged):
            unseal(whole[:size])


def test_a_file_of_ours_without_its_seal_is_refused() -> None:
    whole = seal({"pieces": 2})
    for spelling in (b'"sha257"', b'"sha256x"', b'"SHA256"'):
        with pytest.raises(Damaged):
            unseal(whole.replace(b'"sha256"', spelling).replace(b": 2", b": 3"))
    for indent in (None, 1, 2):
        with pytest.raises(Damaged, match="SHA-256 is missing"):
            unseal(json.dumps({"pieces": 2}, indent=indent).encode())
    assert unseal(b'{"pieces": 2}', ours=False) == ({"pieces": 2}, False), "somebody wrote it by hand"


def test_a_plan_that_was_changed_by_hand_is_told_so(trained: Trained, tmp_path: Path) -> None:
    text = (trained.path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path / "plan.json").techniques == (Accumulate(pieces=2),)
    (tmp_path / "plan.json").write_text(text.replace('"pieces": 2', '"pieces": 4'))
    with pytest.raises(Mistake, match='remove its line "sha256"'):
        load_plan(tmp_path / "plan.json")
    lines = [line for line in text.replace('"pieces": 2', '"pieces": 4').splitlines() if '"sha256"' not in line]
    (tmp_path / "plan.json").write_text("\n".join(lines))
    assert load_plan(tmp_path / "plan.json").techniques == (Accumulate(pieces=4),)


def test_deeply_nested_json_is_damage_like_any_other(trained: Trained, tmp_path: Path) -> None:
    deep = b'{"a": ' * 100_000
    for name in KEPT:
        whole = (trained.path / name).read_bytes()
        (trained.path / name).write_bytes(deep + b"\n")
        assert trained.look(tmp_path)["damage"]
        (trained.path / name).write_bytes(whole)
    with pytest.raises(Mistake, match="not a plan as it was saved"):
        (tmp_path / "deep").write_bytes(deep)
        load_plan(tmp_path / "deep")


# Pipes, devices, folders


@contextmanager
def replaced(path: Path, put: Callable[[Path], object]) -> Iterator[None]:
    """While inside, something else stands at a path. Other tests copy the folder: a device left there would fill the disk."""
    aside = path.with_name("aside")
    path.rename(aside)
    put(path)
    try:
        yield
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        aside.rename(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_without_waiting(
    kind: str, trained: Trained, tmp_path: Path, ended_if_it_hangs: None
) -> None:
    put = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}
    for path in trained.files:
        with replaced(path, put[kind]):
            try:
                asked, checkpoint, told_of = trained.outlook()
                assert (
                    path.name in ("job.py", "report.json", "report.html", NAME)
                    or told_of
                    or "step-00000006" not in str(path)
                )
                assert asked == trained.before[0] and (checkpoint == trained.before[1] or told_of)
            except Mistake as error:
                assert path.name in ("run.json", "plan.json", "lock") and path.name in str(error)
            if path.name == NAME:
                with pytest.raises(Mistake, match=f"{kind}, not a file"):
                    Events(trained.path)
            assert holder(trained.path) is None
            assert bool(trained.look(tmp_path)["damage"]) == (path.name in KEPT)


# Events


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=20)
    lines = (path / NAME).read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"step":', b'"stop":')
    lines[9] = lines[9][:40] + b"\n"
    (path / NAME).write_bytes(b"".join(lines))
    told = report_of(path)
    assert len(told.curves.losses) == 18 and told.step == 20
    assert told.damage[0].startswith("2 lines of events.jsonl are damaged") and told.damage[0] in page(told)
    made, damage = export_steps(Folder(path), "csv", tmp_path / "csv")
    numbers = [int(row.split(",")[0]) for row in made.read_text().splitlines()[1:]]
    assert damage and numbers == [number for number in range(1, 21) if number not in (4, 8)]


@pytest.mark.parametrize(
    "bad",
    [
        {"event": "step", "time": 1.0},
        {"event": "step", "time": 1.0, **step_fields(3), "loss": "low"},
        {"event": "saved", "time": 1.0},
        {"event": "begun", "time": 1.0, "step": 1},
        {"event": "measured", "time": 1.0},
        {"event": ["x"], "time": 1.0},
        {"event": "warning"},
        {"event": "step", "time": 1.0, **step_fields(3), "process": 1 << 70},
        {"event": "step", "time": 1.0, **step_fields(3), "step": True},
    ],
)
def test_an_event_that_lacks_what_its_kind_needs_is_skipped(bad: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(line_of({"event": "finished", "time": 2.0}) + b"\n" + line_of(bad) + b"\n")
    found = read(tmp_path)
    assert [event.kind for event in found.events] == ["finished"] and found.damaged == 1


def test_a_line_without_its_crc_is_skipped(tmp_path: Path) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        (tmp_path / NAME).write_text(json.dumps({"event": "finished", "time": 2.0}, separators=separators) + "\n")
        found = read(tmp_path)
        assert not found.events and found.damaged == 1


def test_folding_on_gives_what_folding_all_at_once_gives(tmp_path: Path) -> None:
    """Also where the word is lost that a run went back."""
    path, draw, on = made_run(tmp_path / "run", done=9), random.Random(1), History()
    for _ in range(60):
        kind = draw.choice(["step", "step", "step", "step", "begun", "adopted", "measured", "saved"])
        number = draw.randrange(1, 30)
        fields = {
            "step": step_fields(number) | draw.choice([{}, {"moved": 7, "sent": number}]),
            "measured": {"peak_bytes": number},
            "begun": {"step": number, "steps": 40},
            "saved": {"step": number},
            "adopted": {"differences": []},
        }[kind]
        append(path, [{"event": kind, "time": float(number), **fields}])
        now, before = report_json(report_of(path, on.read(path))), report_json(report_of(path))
        assert now | {"now": 0} == before | {"now": 0}
        steps: dict[int, float] = {}
        for event in records(path):
            if event["event"] == "begun":
                steps = {one: loss for one, loss in steps.items() if one <= event["step"]}
            elif event["event"] == "step":
                steps[event["step"]] = event["loss"]
        assert dict(zip(on.steps.number, on.steps.loss, strict=True)) == steps and list(on.steps.number) == sorted(
            steps
        )


# Checkpoints


def written_again(checkpoint: RunCheckpoint, name: str, data: bytes) -> None:
    """Change a file of a checkpoint so that all hashes fit."""
    (checkpoint.path / name).write_bytes(data)
    files = json.loads((checkpoint.path / "manifest.json").read_bytes().split(b"\n")[0])["files"]
    files[name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    line = json.dumps({"files": files}).encode()
    (checkpoint.path / "manifest.json").write_bytes(line + b"\n" + sha256(line).hexdigest().encode() + b"\n")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("state.json", b"{"),
        ("state.json", b"[" * 100_000),
        ("state.json", b'{"dict": []}'),
        ("state.json", b"3"),
        ("state.json", b'{"dict": [["step", {"tensor": "not there"}]]}'),
        ("state.json", b'{"dict": 5}'),
        ("weights.safetensors", b"x" * 100),
        ("state.safetensors", (5).to_bytes(8, "little") + b"[[[[["),
    ],
)
def test_a_checkpoint_that_hashes_well_and_cannot_be_unpacked_is_passed_over(
    name: str, data: bytes, trained: Trained, tmp_path: Path
) -> None:
    shutil.copytree(trained.path / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    *_, before, last = list_checkpoints(tmp_path / "checkpoints")
    written_again(last, name, data)
    good, bad = newest_good(tmp_path / "checkpoints", PARTS)
    assert good == before and [one for one, _ in bad] == [last] and "Traceback" not in bad[0][1]


def test_a_folder_that_only_looks_like_a_checkpoint_is_none(trained: Trained) -> None:
    for name in ("step-²", "step-٣", "step-", "step-1x"):
        (trained.path / "checkpoints" / name).mkdir()
    assert trained.outlook() == trained.before
    for name in ("step-²", "step-٣", "step-", "step-1x"):
        (trained.path / "checkpoints" / name).rmdir()


# The plan that follows from what was measured


def test_a_damaged_plan_to_go_on_with_leaves_the_plan_that_was(trained: Trained) -> None:
    following, whole = trained.path / "plan-next.json", (trained.path / "plan.json").read_bytes()
    following.write_bytes(whole.replace(b'"pieces": 2', b'"pieces": 3'))
    held = open_run(trained.path, trained.asked, trained.job.read_bytes(), False, False)
    try:
        with pytest.raises(Mistake, match=r"plan-next.json is damaged .*: leave --replan out"):
            following_plan(PlanOptions(), None, held.folder, None, None)  # type: ignore[arg-type]
    finally:
        held.lock.release()
        following.unlink()
    assert (trained.path / "plan.json").read_bytes() == whole


# By the command


def test_the_command_tells_of_damage_and_its_advice_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(JOB)
    training_plan(peak_bytes=1 << 20, process_bytes=1 << 29, step_seconds=0.01).save(Path("saved.json"))
    words = ["train", "small.py", "--run", "a", "--save-every", "2"]

    def said(*more: str) -> tuple[int, str, dict[str, Any]]:
        code = command([*words, *more, "--json"])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, err, json.loads(out) if code == 0 else {}

    code, err, first = said("--plan", "saved.json")
    assert code == 0, err

    events = Path("a", NAME)
    events.write_bytes(events.read_bytes().replace(b'"step":3', b'"stop":3', 1))
    report = Path("a", "report.json")
    report.write_bytes(report.read_bytes().replace(b'"losses"', b'"lasses"'))
    code, err, again = said()
    assert code == 0 and "report.json is damaged" in err and "1 line of events.jsonl is damaged" in err
    assert again["weights_sha256"] == first["weights_sha256"] and len(again["losses"]) == 5
    assert Folder(Path("a")).read("report.json") == again

    plan = Path("a", "plan.json")
    report.unlink()
    plan.write_bytes(plan.read_bytes().replace(b'"exactness"', b'"exactnesz"'))
    code, err, _ = said()
    assert code == 2 and "plan.json is damaged" in err and "--adopt plans anew" in err
    code, err, adopted = said("--adopt", "--plan", "saved.json")
    assert code == 0 and adopted["weights_sha256"] == first["weights_sha256"], err

    request = Path("a", "run.json")
    request.write_bytes(request.read_bytes().replace(b'"inexact": false', b'"inexact": true '))
    code, err, _ = said()
    assert code == 2 and "run.json is damaged" in err and "--fresh" in err
