"""Files that are sealed as ours are and say what can't be: in every room they are used or refused in a sentence, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import warnings
from binascii import crc32
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.compression.command import report_written
from shoestring.compression.loading.source import open_source
from shoestring.core.command_line.command import Call
from shoestring.core.costs.cluster_file import read_cluster
from shoestring.core.files.seal import seal
from shoestring.core.running.run import plain_run
from shoestring.data.feed import Feed
from shoestring.federated.planning.available import available_techniques
from shoestring.federated.planning.kept_plan import plan_in as federated_plan_in
from shoestring.jobfile import load_job
from shoestring.planning.plan import Outcome
from shoestring.privacy.ledger import PrivacyLedger, ReleasedRound, line_of
from shoestring.processes.messages import Cause, Failure, message_text, read_message
from shoestring.processes.named_job import claim_of_run, flags_for
from shoestring.processes.task import read_task, task_text
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint, damage, list_checkpoints, reading_untrusted
from shoestring.runs.events.event_log import NAME
from shoestring.runs.events.event_log import line_of as event_line
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder
from shoestring.runs.modules import changes, kept_modules
from shoestring.runs.options import RunOptions
from shoestring.runs.reports.export import export_weights
from shoestring.runs.reports.report import report_of
from shoestring.runs.request import differences
from shoestring.runs.resume import OpenedRun, planning_options
from shoestring.runs.session import Session, kept_plan
from shoestring.runs.weights.tensors import TensorFile
from shoestring.runs.weights.weight_files import open_tensors as opened_weights
from shoestring.show.page import page
from shoestring.show.run_end import report_finished
from shoestring.training.execution.snapshot import PARTS, restore
from shoestring.training.execution.tasks import DoctorTask, TrainTask
from shoestring.training.loop import steps
from shoestring.training.on_paper.transformer import read_transformer
from shoestring.training.planning.plan import TrainingDetails, load_plan, plan_in, training_plan
from tests.mutations import places, variants, with_value

NET = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 8) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 2)), steps=2,
               data=[(torch.randn(16, 8), torch.arange(16) % 2) for _ in range(12)])
"""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


MERSENNE = 625  # numbers of the state of Python's generator


class Room:
    """Folders of every room, made once."""

    def __init__(self, place: Path) -> None:
        self.place, self.net, self.run = place, place / "net.py", place / "run"
        self.net.write_text(NET)
        for _ in shoestring.train(str(self.net), (), run=self.run):
            pass

    def compressed(self, name: str, *use: str) -> Path:
        folder = self.place / name
        if not folder.exists():
            shoestring.compress(
                Job(model=net, data=[(torch.randn(16, 8), torch.arange(16) % 2) for _ in range(12)]),
                folder,
                use=list(use),
                samples=16,
                latency="1h",  # who limits it may have a folder that grows, as that of a smaller structure does here
            )
        return folder


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return Room(tmp_path_factory.mktemp("room"))


@contextmanager
def told(what: object = "") -> Iterator[None]:
    """Whatever a file says, a user gets a sentence and no error of Python's."""
    try:
        yield
    except Mistake as error:
        assert str(error) and len(str(error)) < 2000, "a sentence"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {str(what)[:300]}") from error


def unseal(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    found.pop("sha256", None)
    return dict(found)


def resealed(path: Path, whole: Any, use: Callable[[], object], each: int = 5) -> None:
    """Use a file with one thing after another in every place of it; what was there is put back."""
    before = path.read_bytes()
    try:
        use()  # as it was written it is used
        for one in variants(whole, each):
            if isinstance(one, dict):
                path.write_bytes(seal({key: value for key, value in one.items() if key != "sha256"}))
                with told(one):
                    use()
    finally:
        path.write_bytes(before)


WAYS = {
    "grid": ("Quantize(bits=4)",),
    "half": ("Half()",),
    "codebook": ("Codebook(bits=3)",),
    "sparse": ("Sparsify(share=0.95)",),
    "seeded": ("Sparsify(share=0.95, by='random')",),
    "pruned": ("Prune(channels=0.5)", "Half()"),
    "factorized": ("Factorize(share=0.5)", "Half()"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_manifest_of_a_compressed_model(way: str, room: Room) -> None:
    folder = room.compressed(way, *WAYS[way])
    x = torch.zeros(2, 8)
    whole = unseal(folder / "manifest.json")
    resealed(folder / "manifest.json", whole, lambda: shoestring.load(folder, model=net)(x), each=3)


def test_what_a_manifest_says_of_its_job(room: Room, tmp_path: Path) -> None:
    shoestring.compress(room.net, tmp_path / "small", use=["Half()"], samples=16, width=8)
    whole = unseal(tmp_path / "small" / "manifest.json")
    for one in variants({"job": whole["job"]}, 8):
        if isinstance(one, dict):
            (tmp_path / "small" / "manifest.json").write_bytes(seal(whole | one))
            with told(one), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shoestring.load(tmp_path / "small", job=room.net, width=8)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def test_the_header_of_a_tensor_file(room: Room) -> None:
    folder = room.compressed("half", "Half()")
    file, manifest = folder / "model.safetensors", folder / "manifest.json"
    (header, rest), before, sealed_before = header_of(file), file.read_bytes(), manifest.read_bytes()
    whole = unseal(manifest)
    try:
        for one in variants(header, 5):
            with_header(file, one, rest)
            manifest.write_bytes(seal(whole | {"tensors": sha256(file.read_bytes()).hexdigest()}))
            with told(one):
                shoestring.load(folder, model=net)
            with told(one):
                for found in opened_weights([str(file)]).values():
                    list(found.items())
    finally:
        file.write_bytes(before)
        manifest.write_bytes(sealed_before)
    assert TensorFile(file).entries


def test_an_index_of_tensor_files(room: Room, tmp_path: Path) -> None:
    shutil.copy(room.compressed("half", "Half()") / "model.safetensors", tmp_path / "one.safetensors")
    names = dict.fromkeys(TensorFile(tmp_path / "one.safetensors").entries, "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for one in variants({"metadata": {"total_size": 3}, "weight_map": names}, 6):
        index.write_text(json.dumps(one))
        with told(one):
            opened_weights([str(index)])


def test_what_was_asked_for(room: Room) -> None:
    folder = Folder(room.run)
    now = folder.request()
    assert now is not None

    def use() -> None:
        before = folder.request()
        if before is not None:
            planning_options(now, before)
            differences(before, now)
            flags_for(claim_of_run(folder), str(room.net), {})
        page(report_of(room.run))

    resealed(room.run / "run.json", unseal(room.run / "run.json"), use)


def test_a_plan(room: Room, tmp_path: Path) -> None:
    from shoestring.training.memory.accumulate import Accumulate
    from shoestring.training.memory.recompute.checkpoint import Checkpoint as Recompute

    folder = Folder(room.run)
    chosen = training_plan((Accumulate(pieces=2), Recompute(every=2)), details=TrainingDetails(blocks=(("0", 5),)))
    whole = json.loads(json.dumps(Outcome(chosen).as_json()))

    def use() -> None:
        plan = kept_plan(folder, plan_in)
        if plan is not None:
            str(plan), plan.as_json(), dict(plan.numbers())
        page(report_of(room.run))

    folder.write("plan.json", whole)
    resealed(room.run / "plan.json", whole, use, each=3)
    for one in variants(whole["chosen"], 4):
        (tmp_path / "plan.json").write_text(json.dumps({"shoestring": 3, "chosen": one}))
        with told(one):
            load_plan(tmp_path / "plan.json").as_json()


def test_the_plan_of_a_federation(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    whole = {
        "shoestring": 3,
        "chosen": {
            "techniques": [{"name": "TopK", "knobs": {"share": 0.1}}, {"name": "FedAdam", "knobs": {}}],
            "exactness": "changed",
            "up_bytes": 3.0,
            "basis": "",
            "warnings": [],
            "details": {"how": {"kind": "sequential", "chunk": 4, "why": ""}, "processes": 1},
        },
    }
    assert federated_plan_in(whole, available_techniques()).details.how.chunk == 4
    folder.write("plan.json", whole)
    resealed(
        tmp_path / "plan.json",
        whole,
        lambda: kept_plan(folder, partial(federated_plan_in, offers=available_techniques())),
        6,
    )


def test_a_report(room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(room.run)
    whole: dict[str, Any] = {
        "losses": [1.0],
        "predicted": {"peak_bytes": 3},
        "measured": {"peak_bytes": 4},
        "techniques": [],
        "steps": 2,
        "shown": "",
        "run": "a",
        "weights_sha256": "0" * 64,
        "exactness": "the same bits",
        "basis": "",
        "warnings": [],
        "metrics": {},
        "best": None,
        "epochs": 0,
        "ended": "steps",
        "budget": {"memory": None},
        "world": 1,
        "asked": {"steps": 2, "epochs": 0},
    }
    folder.write("report.json", whole)
    held: Any = OpenedRun(folder, None, None, False)  # type: ignore[arg-type]
    session = Session(held, page, print)
    resealed(
        room.run / "report.json",
        whole,
        lambda: report_finished(Call("train"), RunOptions(), folder.read("report.json"), session),
        3,
    )


def test_the_report_of_a_compression(room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    folder, source = room.compressed("half", "Half()"), open_source(str(room.net), {})
    report = folder / "report.json"
    resealed(report, unseal(report), lambda: report_written(Call("compress"), source, unseal(report), folder), 2)


def test_events(room: Room, tmp_path: Path) -> None:
    lines = (room.run / NAME).read_bytes().splitlines()
    shutil.copytree(room.run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    for number, line in enumerate(lines):
        record = json.loads(line)
        record.pop("crc", None)
        for one in variants(record, 2):
            text = event_line(one) if isinstance(one, dict) and one else json.dumps(one).encode()
            (tmp_path / "run" / NAME).write_bytes(b"\n".join([*lines[:number], text, *lines[number + 1 :]]) + b"\n")
            with told(one):
                page(report_of(tmp_path / "run", History().read(tmp_path / "run")))


def test_modules(room: Room) -> None:
    folder = Folder(room.run)
    whole = {"modules": {"net.py": "0" * 64, "layers/one.py": "1" * 64}}
    folder.write("modules.json", whole)
    resealed(room.run / "modules.json", whole, lambda: changes(kept_modules(folder) or {}, {}, room.place).remarks, 12)


def written_again(checkpoint: RunCheckpoint, name: str, data: bytes) -> None:
    (checkpoint.path / name).write_bytes(data)
    files = json.loads((checkpoint.path / "manifest.json").read_bytes().split(b"\n")[0])["files"]
    files[name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    line = json.dumps({"files": files}).encode()
    (checkpoint.path / "manifest.json").write_bytes(line + b"\n" + sha256(line).hexdigest().encode() + b"\n")


def at(whole: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        whole = whole[key]
    return whole


def test_the_state_of_a_checkpoint(room: Room, tmp_path: Path) -> None:
    shutil.copytree(room.run, tmp_path / "run")
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    job = load_job(room.net, {})
    whole = json.loads((checkpoint.path / "state.json").read_text())

    def use(out: Path) -> None:
        if damage(checkpoint, PARTS):
            return
        export_weights(checkpoint, out)
        feed, run = Feed(job), plain_run(job, job.model(), {})
        with reading_untrusted(checkpoint):
            restore(checkpoint, run, feed)
        for _ in steps(run, [next(feed)]):  # what was taken as it was written is used now
            pass

    use(tmp_path / "whole")
    words = [path for path in places(whole) if isinstance(at(whole, path), list) and len(at(whole, path)) == MERSENNE]
    assert len(words) == 2, "the feed's generator and the global one of Python"
    odd = [with_value(whole, (*path, 370), value) for path in words for value in (1e15, None, -1)]
    for number, one in enumerate([*variants(whole, 1), *odd]):
        written_again(checkpoint, "state.json", json.dumps(one).encode())
        with told(one):
            use(tmp_path / str(number))
    assert not list(tmp_path.glob("*tmp-*")), "drafts are gone"


def test_the_aliases_of_a_checkpoint_and_its_header(room: Room, tmp_path: Path) -> None:
    shutil.copytree(room.run, tmp_path / "run")
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    header, rest = header_of(checkpoint.path / "weights.safetensors")
    for number, one in enumerate(
        variants(header | {"__metadata__": {"format": "pt", "alias a": "0.weight", "alias b": "nowhere"}}, 3)
    ):
        text = json.dumps(one).encode()
        written_again(checkpoint, "weights.safetensors", len(text).to_bytes(8, "little") + text + rest)
        with told(one):
            if not damage(checkpoint, PARTS):
                export_weights(checkpoint, tmp_path / str(number))


def test_files_that_would_take_gigabytes_once_they_are_read(tmp_path: Path) -> None:
    text = b'{"modules": [%b[]]}' % (b"[]," * (5 << 20))  # an empty list takes some eighty bytes of memory
    for name, read in {
        "modules.json": Folder(tmp_path).read,
        "cluster.json": lambda name: read_cluster(tmp_path / name),
        "model.json": lambda name: read_transformer(tmp_path / name),
        "model.safetensors.index.json": lambda name: opened_weights([str(tmp_path / name)]),
    }.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(Mistake, match="its JSON has more than 8,388,608 values"):
            read(name)
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(Mistake, match="is a device, not a file"):
            read(name)


def test_tasks_and_messages(room: Room) -> None:
    read: Callable[[str], object]
    for text, read in [
        (task_text(TrainTask(file="a.py", steps=3)), read_task),
        (task_text(DoctorTask()), read_task),
        (message_text(Failure(Cause.JOB, "no")), read_message),
    ]:
        read(text)
        for one in variants(json.loads(text), 6):
            with told(one):
                read(json.dumps(one))


def test_a_privacy_ledger(tmp_path: Path) -> None:
    path, entry = tmp_path / "privacy.jsonl", ReleasedRound("run", 0, "0" * 16, 1.0, 0.1, 1e-5)
    whole, width = {"line": 0} | vars(entry), len(line_of(0, entry))
    for one in variants(whole, 12):
        text = json.dumps(one).encode()[:-1].ljust(width - 19)
        path.write_bytes(text + b',"crc":"%08x"}\n' % crc32(text))
        with told(one):
            found = PrivacyLedger(path, "run")
            assert found.entries or found.lost_rounds, "what may have been spent counts"
            found.epsilon()
