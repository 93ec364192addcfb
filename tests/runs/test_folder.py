"""One process at a time in a run's folder, whatever others do to it at the same moment; and what killed ones leave is never in the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file, temporary_folder, write_whole
from shoestring.runs.folder import Folder, Lock, holder
from shoestring.runs.request import Request
from shoestring.runs.resume import OpenedRun, open_run
from shoestring.training.links import shared_memory as shared
from tests.records import records, steps_in
from tests.waiting import HUNG, PASS_GATE, Gates, until

ROUNDS = 100
RACER = """
import os, sys
from pathlib import Path
from shoestring.core.errors import Mistake
from shoestring.runs.folder import Folder, Lock, holder
from shoestring.runs.request import Request
from shoestring.runs.resume import open_run

place, rounds = Path(sys.argv[1]), int(sys.argv[2])
asked = {"source": "", "flags": {}, "memory": None, "use": None, "inexact": False, "exact": None, "plan": None, "environment": {}}
while not (place / "go").exists():
    pass
won = 0
while won < rounds:
    try:
        held = open_run(place / "run", asked, (place / "job.py").read_bytes(), True, False)
    except Mistake as refused:
        assert "in use by process" in str(refused), refused
        continue
    guard = os.open(place / "in the folder", os.O_CREAT | os.O_EXCL)   # refused if another process thinks that it is alone there
    os.close(guard)
    assert holder(place / "run") == os.getpid()
    assert (place / "run" / "run.json").exists()
    won += 1
    os.unlink(place / "in the folder")
    held.lock.release()
"""


def test_of_two_processes_that_begin_anew_in_one_folder_one_at_a_time_has_it(tmp_path: Path) -> None:
    """At least 200 times, as fast as they can."""
    (tmp_path / "job.py").write_text("")
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), str(ROUNDS)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    (tmp_path / "go").touch()
    for racer in racers:
        _, said = racer.communicate(timeout=HUNG)
        assert racer.returncode == 0, said
    assert len(list(tmp_path.glob("run-before-*"))) == 2 * ROUNDS - 1


def test_who_loses_the_race_for_a_new_folder_leaves_it_to_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path).lock.release()
    set_aside, winner = Folder.set_aside, []

    def set_aside_and_lose(folder: Folder) -> Path:
        aside = set_aside(folder)
        winner.append(Lock(tmp_path / "run"))  # which has not written its request yet
        return aside

    monkeypatch.setattr(Folder, "set_aside", set_aside_and_lose)
    with pytest.raises(Mistake, match="in use by process"):
        open_run(tmp_path / "run", asked(), b"", fresh=True, adopt=False)
    assert holder(tmp_path / "run") == os.getpid(), "the winner still holds it"
    winner[0].release()


def test_a_kill_while_a_folder_is_set_aside_forgets_nothing_that_was_spent(tmp_path: Path) -> None:
    begun(tmp_path).lock.release()
    (tmp_path / "run" / "privacy.jsonl").write_bytes(b"spent")
    Folder(tmp_path / "run").set_aside()  # killed here, or another process was quicker to lock the new folder
    begun(tmp_path).lock.release()
    assert (tmp_path / "run" / "privacy.jsonl").read_bytes() == b"spent"


def asked() -> Request:
    return Request(job="job.py", source=sha256(b"").hexdigest())


def begun(place: Path) -> OpenedRun:
    (place / "job.py").write_text("")
    return open_run(place / "run", asked(), (place / "job.py").read_bytes(), fresh=False, adopt=False)


@pytest.mark.parametrize(
    "kill", [0, 1, 2, 3]
)  # at the first, second ... moment at which something is about to reach the disk
def test_a_kill_while_a_run_is_begun_never_keeps_the_same_command_out(kill: int, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from tests.runs.test_folder import begun
fsync, left = os.fsync, {kill}

def deadly(file):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    fsync(file)

os.fsync = deadly
begun(Path(sys.argv[1]))
"""
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert any(".tmp-" in name for name in left) == (kill in (0, 2)), "it was killed in the middle of a draft"
    begun(tmp_path).lock.release()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"lock", "run.json", "job.py"}
    assert (tmp_path / "run" / "job.py").read_text() == (tmp_path / "job.py").read_text()


def test_files_of_others_are_no_drafts_and_keep_a_run_out(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.tmp-1").touch()
    with pytest.raises(Mistake, match=r"is not a run of shoestring \(notes.tmp-1\)"):
        begun(tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"notes.tmp-1"}


def test_a_draft_that_is_being_written_is_not_cleared_and_one_that_was_left_is(tmp_path: Path) -> None:
    left = tmp_path / "plan.json.tmp-1"
    left.write_text("half")
    with draft_file(tmp_path / "plan.json") as draft:
        draft.write_text("mine")
        code = (
            "import sys; from pathlib import Path; from shoestring.core.files.files import write_whole\n"
            "write_whole(Path(sys.argv[1]), b'theirs')"
        )
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path / "plan.json")])
        assert other.returncode == 0 and (tmp_path / "plan.json").read_text() == "theirs"
        assert draft.exists() and not left.exists()
    assert (tmp_path / "plan.json").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_drafted_too_and_an_error_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.tmp-1").mkdir()
    (tmp_path / "out.tmp-1" / "half").touch()
    with pytest.raises(ZeroDivisionError), draft_file(tmp_path / "out", folder=True) as draft:
        (draft / "model").write_text("some")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with draft_file(tmp_path / "out", folder=True) as draft:
        (draft / "model").write_text("all")
    assert (tmp_path / "out" / "model").read_text() == "all" and len(list(tmp_path.iterdir())) == 1


def test_a_page_is_written_through_a_link_and_to_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "page.html").symlink_to("elsewhere.html")
    write_whole(tmp_path / "page.html", b"page", asked=True)
    assert (tmp_path / "page.html").is_symlink() and (tmp_path / "elsewhere.html").read_bytes() == b"page"
    write_whole(Path("/dev/null"), b"page", asked=True)


@pytest.fixture
def short_place() -> Iterator[Path]:
    """A folder of which the name leaves room for a socket's; that of tmp_path may not."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def test_temporary_folders_of_killed_processes_are_cleared_and_others_are_not(
    short_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_place))
    killed = (
        "import os, signal, socket\nfrom shoestring.core.files.files import temporary_folder\nwith temporary_folder() as place:\n"
        "    socket.socket(socket.AF_UNIX).bind(str(place / 'socket'))\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert (
        subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(short_place)}).returncode
        == -signal.SIGKILL
    )
    assert len(list(short_place.iterdir())) == 1
    with temporary_folder() as first, temporary_folder() as second:
        assert set(short_place.iterdir()) == {first, second}
    assert not list(short_place.iterdir())


def test_memory_that_a_killed_worker_left_is_cleared_and_that_of_others_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PLACES", (str(tmp_path),))
    (tmp_path / "shoestring-shared-left").write_bytes(bytes(64))
    (tmp_path / "other").touch()
    mine = shared.create_file(4096)
    assert mine is not None and os.path.getsize(mine[0]) == 4096
    theirs = shared.create_file(4096)
    assert theirs is not None and {str(path) for path in tmp_path.iterdir()} == {
        mine[0],
        theirs[0],
        str(tmp_path / "other"),
    }
    os.close(mine[1])
    os.close(theirs[1])


@pytest.mark.slow
def test_a_launcher_that_was_killed_leaves_nothing_that_the_next_group_does_not_clear(
    tmp_path: Path, short_place: Path
) -> None:
    here, job = short_place, tmp_path / "job.py"
    job.write_text(JOB)
    words = [
        sys.executable,
        "-m",
        "shoestring",
        "train",
        "job.py",
        "--devices",
        "2",
        "--use",
        "DataParallel()",
        "--run",
        "run",
    ]
    environment = os.environ | {"TMPDIR": str(here)}
    with Gates(tmp_path, 5):
        launcher = subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: len(steps_in(records(tmp_path / "run"))) >= 2, "step 2")
        launcher.kill()
        launcher.wait()
    (left,) = here.glob("shoestring-*")
    assert (left / "socket").exists()
    until(lambda: holder(tmp_path / "run") is None, "the workers' end")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(here.glob("shoestring-*"))


def test_a_temporary_place_with_a_long_name_has_room_for_a_socket_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("long" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with temporary_folder() as place, socket.socket(socket.AF_UNIX) as one:
        one.bind(str(place / "socket"))


JOB = (
    PASS_GATE
    + """
import itertools
import torch
from shoestring import Job

def data():
    for number in itertools.count(1):
        pass_gate(".", number)
        yield torch.randn(8, 4), torch.zeros(8, dtype=torch.long)

def job() -> Job:
    return Job(model=lambda: torch.nn.Linear(4, 2), data=data, steps=20)
"""
)


def test_a_pipe_where_a_file_of_a_run_was_is_replaced_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.html")
    write_whole(tmp_path / "report.html", b"page")
    assert (tmp_path / "report.html").read_bytes() == b"page"


def test_nothing_is_written_where_a_link_in_a_run_leads(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "report.html").symlink_to("elsewhere")
    write_whole(tmp_path / "report.html", b"page")
    assert (tmp_path / "report.html").read_bytes() == b"page" and (tmp_path / "elsewhere").read_bytes() == b"theirs"
