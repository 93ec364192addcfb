"""`shoestring distill` as a user meets it: it trains, goes on after kill -9 with the same bits, and refuses what can't be."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.commands import main
from shoestring.compression.distillation import job as distillation
from shoestring.compression.distillation.options import DistillOptions
from shoestring.compression.distillation.sources import parse_teacher, pin_teacher, teacher_opener, teacher_weights_file
from shoestring.core.command_line.arguments import arguments_of
from shoestring.core.errors import Crashed, Mistake
from shoestring.jobfile import flags_of, load_job
from shoestring.processes.launch import run_worker
from shoestring.runs.checkpoints.checkpoints import list_checkpoints
from shoestring.runs.events.event import Begun, Event, Stepped
from shoestring.runs.folder import Folder, Lock
from shoestring.runs.request import request_for
from tests.compression.distillation.toys import NET, batches
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")
FILE = Path(str(distillation.__file__))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distil")
    (path / "net.py").write_text(NET)
    return path


@pytest.fixture(scope="module")
def big(place: Path) -> Path:
    """A run as `train` leaves it, by its worker alone."""
    folder = place / "big"
    folder.mkdir()
    Folder(folder).begin(request_for(place / "net.py", {"steps": 60}, None, None, False, None), NET.encode())
    run_worker(train_task(place / "net.py", 60, (), folder, {"steps": 20, "keep": 2}, {"steps": 60}), {})
    return folder


def asked(place: Path, teachers: list[str], **more: Any) -> dict[str, Any]:
    return {"student": f"{place / 'net.py'} --width=12 --blocks=2", "teacher": shlex.join(teachers), **more}


def learned(place: Path, folder: Path, flags: dict[str, Any], look: Any = None) -> str:
    folder.mkdir(exist_ok=True)
    task = train_task(FILE, flags["steps"], (), folder, {"steps": 5, "keep": 2}, flags)
    return run_worker(task, {}, look or (lambda event: None)).weights_sha256


def test_a_run_is_pinned_to_its_best_weights_and_loads_them(big: Path) -> None:
    written = pin_teacher(f"{big.parent / 'net.py'}@{big}")
    found = parse_teacher(written)
    assert (
        Path(found.weights).name.startswith("best-") and found.digest and parse_teacher(pin_teacher(written)) == found
    )
    teacher = teacher_opener(written)()
    right = [
        float((teacher.model.eval()(x).argmax(1) == y).float().mean())
        for x, y in load_job(big.parent / "net.py", {}).data()
    ]
    assert sum(right) / len(right) > 0.6  # of five classes


@pytest.mark.parametrize("more", [{}, {"passes": 2, "noise": "0.1", "unlabelled": "net.py"}], ids=["plain", "noisy"])
def test_killed_and_gone_on_a_student_has_the_same_bits(
    more: dict[str, Any], place: Path, big: Path, tmp_path: Path
) -> None:
    flags = asked(
        place,
        [pin_teacher(f"{place / 'net.py'}@{big}")],
        steps=14,
        **{key: str(place / "net.py") if key == "unlabelled" else value for key, value in more.items()},
    )
    expected = learned(place, tmp_path / "whole", flags)
    pid = 0

    def look(event: Event) -> None:
        nonlocal pid
        pid = event.pid if isinstance(event, Begun) else pid
        if isinstance(event, Stepped) and event.step == 8 and pid:
            os.kill(pid, signal.SIGKILL)

    before = {one: one.read_bytes() for one in (big / "checkpoints").rglob("*") if one.is_file()}
    with pytest.raises(Crashed):
        learned(place, tmp_path / "killed", flags, look)
    assert learned(place, tmp_path / "killed", flags) == expected
    assert {one: one.read_bytes() for one in before} == before  # the teacher's weights are as they were


def test_a_student_of_a_teachers_layers_begins_as_them(place: Path, big: Path) -> None:
    from shoestring.runs.weights.initial_weights import fresh_model

    written = pin_teacher(f"{place / 'net.py'}@{big}")
    job = load_job(FILE, {"student": str(place / "net.py"), "teacher": shlex.join([written]), "layers": "every=2"})
    student, teacher = fresh_model(job), teacher_opener(written)().model
    assert len(student) == 4 and torch.equal(student[2][0].weight, teacher[3][0].weight)  # type: ignore[arg-type,index,union-attr]
    assert teacher_weights_file(written).endswith("weights.safetensors")


def test_a_distilled_run_is_a_teacher_without_asking_its_own(place: Path, big: Path, tmp_path: Path) -> None:
    flags = asked(place, [pin_teacher(f"{place / 'net.py'}@{big}")], steps=4, objective="kl + hidden(0=0)")
    Folder(tmp_path).begin(request_for(FILE, flags, None, None, False, None), FILE.read_bytes())
    learned(place, tmp_path, flags)
    from shoestring.compression.distillation.teachers import Teachers

    moved = big.rename(big.with_name("elsewhere"))
    try:
        said = Teachers((teacher_opener(pin_teacher(f"{place / 'net.py'}@{tmp_path} --width 12 --blocks 2")),)).say(
            batches()[0]
        )
    finally:
        moved.rename(big)
    assert said.outputs[0].shape == (16, 5)


def test_a_teacher_that_changed_or_lost_its_checkpoint_is_refused(place: Path, big: Path) -> None:
    written = parse_teacher(pin_teacher(f"{place / 'net.py'}@{big}"))
    with pytest.raises(Mistake, match="is not the one with which this run was started"):
        teacher_opener(str(written).replace(written.digest, "0" * 8))()
    with pytest.raises(Mistake, match="does not exist any more"):
        teacher_opener(f"{place / 'net.py'}@{big}/checkpoints/step-00000001")()
    with pytest.raises(Mistake, match="is not the job file"):
        load_job(FILE, {"student": f"{place / 'net.py'}#00000000", "teacher": f"{place / 'net.py'}@{big}"})


def test_what_is_no_teacher_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Folder(tmp_path / "begun").path.mkdir()
    Folder(tmp_path / "begun").begin(request_for(place / "net.py", {}, None, None, False, None), NET.encode())
    for teacher, said in (
        (tmp_path / "nowhere", "neither a file"),
        (tmp_path / "empty", "no run of shoestring"),
        (f"{place / 'net.py'}@{tmp_path / 'begun'}", "no good checkpoint"),
        (tmp_path / "begun", "only if you name it"),
        (f"{place / 'net.py'}@none.safetensors", "there is no file"),
        (f"{place / 'net.py'} --depth 3", "no option"),
        ("", "give a job file"),
    ):
        with pytest.raises(Mistake, match=said):
            pin_teacher(str(teacher))
    assert not list_checkpoints(Folder(tmp_path / "begun").checkpoints)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "without a teacher"),
        (("--teacher", "nowhere"), "neither a file"),
        (("--teacher", "net.py", "--depth", "3"), "no option"),
        (("--teacher", "net.py", "--temperature", "hot"), "takes a number"),
        (("--teacher", "net.py", "--peers", "2"), "give one --teacher"),
        (("--peers", "2", "--layers", "every=2"), "leave them out"),
        (("--teacher", "net.py", "--layers", "every=2"), "names no weights"),
        (("--teacher", "net.py", "--noise", "loud"), "standard deviation"),
    ],
)
def test_a_command_that_can_not_be_is_refused(
    words: tuple[str, ...],
    said: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert main.run(["distill", "net.py", *words, "--run", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err


def test_the_commands_flags_are_those_of_the_job() -> None:
    own = {flag.name for flag in flags_of(FILE)} - {"student", "steps", "epochs", "seed"}
    assert own == set(arguments_of(DistillOptions))


@pytest.mark.slow
def test_a_teacher_is_trained_and_a_student_learns_from_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = str(place / "net.py")
    assert main.run(["train", net, "--run", "big", "--json"]) == 0
    capsys.readouterr()
    words = [
        "distill",
        net,
        "--teacher",
        f"{net}@big",
        "--width",
        "12",
        "--blocks=2",
        "--student-alpha",
        "0.7",
        "--alpha",
        "0.2",
        "--steps",
        "60",
        "--run",
        "small",
        "--json",
    ]
    assert main.run(words) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert "--alpha is a flag of distill" in told.err
    request = Folder(Path("small")).request()
    assert request is not None
    assert sorted(shlex.split(request.flags["student"])[1:]) == ["--alpha=0.7", "--blocks=2", "--width=12"]
    assert request.flags["alpha"] == 0.2 and report["losses"][-1] < 0.7 * report["losses"][0]
    assert (
        main.run(
            [
                "distill",
                net,
                "--teacher",
                f"{net}@big",
                "--width",
                "12",
                "--blocks=2",
                "--alpha",
                "0.3",
                "--run",
                "small",
            ]
        )
        == 2
    )
    assert "--alpha changed" in capsys.readouterr().err
    assert main.run(["distill", net, "--teacher", f"{net}@big", "--classes", "4", "--run", "odd"]) == 2
    assert "(32, 4) and (32, 5)" in capsys.readouterr().err
    assert main.run(["distill", net, "--peers", "2", "--steps", "6", "--run", "peers"]) == 0
    from safetensors.torch import load_file

    load_job(net, {}).model().load_state_dict(load_file("peers/peer.safetensors"))
    assert (
        main.run(
            [
                "distill",
                net,
                "--teacher",
                f"{net}@small --width 12 --blocks=2",
                "--teacher",
                f"{net}@peers/peer.safetensors",
                "--steps",
                "4",
                "--run",
                "third",
            ]
        )
        == 0
    )  # two stages
    assert main.run(["export", "small", "--to", "safetensors", "--out", "small.safetensors"]) == 0
    load_job(net, {"width": 12, "blocks": 2}).model().load_state_dict(load_file("small.safetensors"))


def test_a_second_distillation_in_one_folder_is_refused(
    place: Path, big: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(tmp_path / "run")
    words = ["distill", str(place / "net.py"), "--teacher", f"{place / 'net.py'}@{big}", "--run", str(tmp_path / "run")]
    assert main.run(words) == 2 and "in use by process" in capsys.readouterr().err
    lock.release()
