"""Watching runs of which one is broken, slow or hostile: the others are shown, and the terminal stays quiet."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Event

import pytest

from shoestring.runs.events.event_log import NAME
from shoestring.runs.events.history import History
from shoestring.runs.reports.report import Report, report_of
from shoestring.show.watch.follow import FollowedRun, Watch
from tests.show.made_runs import made_run
from tests.show.watch.test_server import asked, served, text_of
from tests.waiting import HUNG, until


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan.json", "plan.json is a pipe, not a file"),
        ("report.json", "report.json is a pipe, not a file"),
        ("lock", "step 5 of 400"),
        (NAME, "events.jsonl is a pipe, not a file"),
        ("run.json", None),
    ],
)
def test_a_pipe_in_one_run_does_not_keep_the_others_waiting(name: str, words: str | None, tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "good", done=7)
    bad = made_run(tmp_path / "runs" / "bad", done=5)
    with served(tmp_path / "runs") as server:
        assert "2 runs" in text_of(server)
        (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)
        server.watch.searched = -1e9
        for followed in server.watch.runs.values():
            followed.looked = followed.due = -1e9
        assert "step 7 of 400" in text_of(server, "/run/good")
        if words is None:  # what has no run.json is no run
            assert asked(server, "/run/bad").status == 404 and "step 7 of 400" in text_of(server)
        else:
            assert words in text_of(server, "/run/bad") and "2 runs" in text_of(server)


def test_a_run_that_takes_for_ever_to_read_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "runs" / "good", done=7)
    made_run(tmp_path / "runs" / "stuck", done=5)
    let_go = Event()

    class Stuck(FollowedRun):
        def draw(self) -> float:
            if self.name == "stuck":
                let_go.wait()
            return super().draw()

    monkeypatch.setattr("shoestring.show.watch.follow.FollowedRun", Stuck)
    monkeypatch.setattr("shoestring.show.watch.follow.PATIENCE", 0.2)
    with served(tmp_path / "runs") as server:
        until(
            lambda: "step 7 of 400" in text_of(server, "/run/good"), "the first look at it"
        )  # which may take longer here
        for _ in range(3):
            assert "step 7 of 400" in text_of(server, "/run/good")
            assert "2 runs" in text_of(server)
        assert "This run is being read" in text_of(server, "/run/stuck")
        let_go.set()
        until(lambda: "step 5 of 400" in text_of(server, "/run/stuck"), "the end of reading it")


def test_whatever_a_run_does_to_the_page_the_others_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "runs" / "good", done=7)
    made_run(tmp_path / "runs" / os.fsdecode(b"caf\xe9"), done=5)  # a name that is not UTF-8
    bad = made_run(tmp_path / "runs" / "bad", done=5)

    def told(path: Path, history: History) -> Report:
        if path == bad:
            raise RecursionError("too deep")
        return report_of(path, history)

    monkeypatch.setattr("shoestring.show.watch.follow.report_of", told)
    with served(tmp_path / "runs") as server:
        assert "This run can&#39;t be read: too deep" in text_of(server, "/run/bad")
        text = text_of(server)
        assert "3 runs" in text and "/run/caf%EF%BF%BD" in text
        assert "step 5 of 400" in text_of(server, "/run/caf%EF%BF%BD")


@pytest.mark.parametrize("line", ["GET http://[/ HTTP/1.1", "GET //[ HTTP/1.1", "GET http://[::1/run/x HTTP/1.1"])
def test_an_address_that_is_none_is_answered_and_makes_no_noise(
    line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(made_run(tmp_path / "run", done=3)) as server:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=HUNG) as connection:
            connection.sendall(f"{line}\r\nHost: localhost\r\n\r\n".encode())
            assert connection.recv(100).split(b"\r\n")[0].split()[1] in (b"400", b"404")
        assert asked(server).status == 200
    assert capfd.readouterr().err == ""


def test_many_tabs_may_come_at_once(tmp_path: Path) -> None:
    """The server does not take connections yet, and none of them is turned away."""
    from shoestring.show.watch.server import WatchServer

    with WatchServer(Watch([made_run(tmp_path / "run", done=3)])) as server:
        tabs = [socket.create_connection(("127.0.0.1", server.server_port), timeout=HUNG) for _ in range(60)]
        for tab in tabs:
            tab.close()
