"""Watching runs: what is served, to whom, and how soon news and deaths show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from shoestring.core.errors import Mistake
from shoestring.runs.folder import Folder, Lock
from shoestring.runs.reports.report import silence
from shoestring.show.watch import serve
from shoestring.show.watch.follow import DRAW, LOOK, FollowedRun, Watch
from shoestring.show.watch.places import check
from shoestring.show.watch.server import WatchServer
from tests.show.made_runs import add, append, made_run, step_fields
from tests.waiting import HUNG


@contextmanager
def served(*paths: Path, host: str = "127.0.0.1") -> Iterator[WatchServer]:
    with WatchServer(Watch(paths), host) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=HUNG)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def text_of(server: WatchServer, path: str = "/", **headers: str) -> str:
    answer = asked(server, path, **headers)
    assert answer.status == 200
    return answer.read().decode().replace("&nbsp;", " ")


def pushed(stream: HTTPResponse) -> Iterator[str]:
    """The pages a stream sends."""
    lines: list[str] = []
    while line := stream.readline().decode():
        if line.startswith("data: "):
            lines.append(line[len("data: ") :])
        elif line == "\n" and lines:
            yield "".join(lines).replace("&nbsp;", " ")
            lines = []


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that trains, at step 120 of 400."""
    path = made_run(tmp_path / "runs" / "gpt-1", done=120)
    lock = Lock(path)
    yield path
    lock.release()


def test_one_run_is_shown_at_once(run: Path) -> None:
    with served(run) as server:
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
        for place in ("/", "/run/gpt-1"):
            text = text_of(server, place)
            assert "Step 120 of 400" in text and "EventSource" in text and "All runs" not in text
        assert text_of(server, "/healthz") == "ok\n"
        assert (
            asked(server, "/run/other").status
            == asked(server, "/events?run=other").status
            == asked(server, "/x").status
            == 404
        )
        assert asked(server, "/run/..%2F..%2Fetc%2Fpasswd").status == 404


def test_news_are_pushed(run: Path) -> None:
    with served(run) as server:
        pages = pushed(asked(server, "/events"))
        assert "Step 120 of 400" in next(pages)
        add(run, "step", **step_fields(121))
        add(run, "warning", text="the <disk> is nearly full")
        fresh = next(page for page in pages if "nearly full" in page)  # it may look between the two
        assert "Step 121 of 400" in fresh and "The &lt;disk&gt; is nearly full" in fresh


def test_what_was_seen_is_not_sent_again(run: Path) -> None:
    with served(run) as server:
        address = text_of(server).split('data-events="')[1].split('"')[0].replace("&amp;", "&")
        pages = pushed(asked(server, address))
        add(run, "step", **step_fields(121))
        assert "Step 121 of 400" in next(pages)


def test_a_run_whose_process_is_gone_shows_as_dead_at_the_next_look(tmp_path: Path) -> None:
    path = made_run(tmp_path / "gpt-1", done=120)
    lock = Lock(path)
    with served(path) as server:
        pages = pushed(asked(server, "/events"))
        assert "Training" in next(pages)
        lock.release()
        fresh = next(pages)
        assert "Died at step 120 of 400." in fresh and "can go on from step 100" in fresh


def test_a_folder_of_runs_means_all_of_them_and_those_to_come(run: Path) -> None:
    made_run(run.parent / "second <run>", job="digits", done=10)
    (run.parent / "not a run").mkdir()
    with served(run.parent) as server:
        text = text_of(server)
        for words in (
            "2 runs",
            "1 training, 1 died",
            'href="/run/gpt-1"',
            'href="/run/second%20%3Crun%3E"',
            "second &lt;run&gt;",
        ):
            assert words in text, words
        assert "All runs" in text_of(server, "/run/second%20%3Crun%3E")
        pages = pushed(asked(server, "/events"))
        next(pages)
        made_run(run.parent / "third")
        assert "3 runs" in next(pages)


def test_runs_of_the_same_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    twin = made_run(tmp_path / "elsewhere" / "gpt-1", done=7)
    with served(run, twin, run) as server:
        assert "2 runs" in text_of(server)
        assert "step 7 of 400" in text_of(server, "/run/gpt-1-2")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.7", ""])
def test_a_name_that_is_not_ours_is_refused(run: Path, host: str) -> None:
    with served(run) as server:
        for path in ("/", "/events", "/run/gpt-1", "/healthz"):
            answer = asked(server, path, Host=host)
            assert answer.status == 403 and "gpt" not in answer.read().decode()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "LOCALHOST:80", "[::1]", "[::1]:80"])
def test_our_own_names_are_served(run: Path, host: str) -> None:
    with served(run) as server:
        assert asked(server, Host=host).status == 200


def test_beyond_this_machine_a_token_is_needed(run: Path) -> None:
    with served(run, host="0.0.0.0") as server:
        for path in ("/", "/events", "/healthz", "/?token=", f"/?token={server.token}x", "/?token=%ff"):
            assert asked(server, path).status == 403, path
        assert asked(server, Cookie="shoestring-1=x; =").status == 403
        answer = asked(server, f"/?token={server.token}")
        cookie = answer.headers["Set-Cookie"]
        assert answer.status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert server.token not in answer.read().decode()
        assert asked(server, Cookie=cookie.split(";")[0]).status == 200
        assert server.url.endswith(f"/?token={server.token}")
        assert asked(server, f"/?token={server.token}", Host="evil.example").status == 403
        assert asked(server, f"/?token={server.token}", Host="192.168.0.7:80").status == 200


def test_on_this_machine_no_token_is_needed_and_none_is_set(run: Path) -> None:
    with served(run) as server:
        assert asked(server, "/?token=x").headers["Set-Cookie"] is None


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_a_page_can_only_be_looked_at(run: Path, method: str) -> None:
    with served(run) as server:
        answer = asked(server, method=method)
        assert answer.status == 405 and answer.headers["Allow"] == "GET"


@pytest.mark.parametrize("path", ["/", "/events", "/healthz", "/nothing"])
def test_every_answer_is_strict(run: Path, path: str) -> None:
    with served(run) as server:
        headers = asked(server, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store" and headers["Server"] == "shoestring"


def test_whatever_a_run_says_is_text_and_never_markup(run: Path) -> None:
    evil = '<script>"x"</script>'
    Folder(run).write("run.json", {"job": evil, "flags": {evil: evil}, "memory": evil})
    fields = {
        "time": 1.0,
        "text": evil,
        "how": evil,
        "step": evil,
        "checkpoint": evil,
        "steps": 5,
        "differences": [evil],
    }
    append(run, [{"event": kind, **fields} for kind in ("warning", "adopted", evil, "failed")])
    with served(run) as server:
        text = text_of(server).split("<main>")[1].split("</main>")[0]
        assert "<script" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize("bad", [{"event": "step"}, {"event": "saved", "step": None}, {"event": "begun"}])
def test_what_is_damaged_in_a_run_is_told_and_the_rest_is_shown(run: Path, bad: dict[str, Any]) -> None:
    broken = made_run(run.parent / "broken", done=3)
    append(broken, [bad])
    (broken / "plan.json").write_text("{")
    with served(run.parent) as server:
        assert "Step 120 of 400" in text_of(server, "/run/gpt-1")
        text = text_of(server, "/run/broken")
        assert "plan.json is damaged" in text and "1 line of events.jsonl is damaged" in text and "2 warnings" in text
        assert "step 3 of 400" in text and "2 runs" in text_of(server)


def test_a_folder_that_is_no_run_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, words in (("missing", "there is no"), (".", "holds no run.json"), ("file", "is a file")):
        with pytest.raises(Mistake, match=words):
            serve([tmp_path / place], ready=lambda url: pytest.fail("it was served"))
        with pytest.raises(Mistake, match="give the folder of"):
            check(tmp_path / place)


def test_a_port_that_is_taken_is_said(run: Path) -> None:
    with served(run) as server, pytest.raises(Mistake, match="give another --port"):
        WatchServer(Watch([run]), port=server.server_port)


class Drawn(FollowedRun):
    """Counts how often it draws, which takes a hundredth of a second each time, on whatever machine."""

    count = 0

    def draw(self) -> float:
        self.count += 1
        super().draw()
        return 0.01


def test_a_run_is_drawn_only_when_there_is_news_and_not_too_often(run: Path) -> None:
    followed = Drawn("gpt-1", run)
    for tenth in range(100):
        followed.look(tenth / 10)
    assert followed.count == 1
    for step in range(100):
        add(run, "step", **step_fields(121 + step))
        followed.look(10 + step / 10)
    assert 3 <= followed.count <= 1 + 10 / DRAW


def test_news_that_are_more_than_a_step_are_drawn_at_the_next_look(tmp_path: Path) -> None:
    path = made_run(tmp_path / "gpt-1", done=3)
    lock = Lock(path)
    followed = Drawn("gpt-1", path)
    followed.look(0)
    followed.due = 1000.0
    lock.release()
    followed.look(LOOK)
    assert followed.count == 2 and followed.state == "died"


def test_a_run_that_is_resumed_or_begun_afresh_is_followed(tmp_path: Path) -> None:
    path = made_run(tmp_path / "gpt-1", done=120)
    followed = FollowedRun("gpt-1", path)
    followed.look(0)
    assert followed.state == "died" and not followed.fold.steps
    lock = Lock(path)
    add(path, "begun", pid=1, steps=400, step=100, how="")
    followed.look(10)
    assert followed.state == "running" and "Step 100 of 400" in followed.view.content
    path.rename(tmp_path / "aside")
    made_run(path, done=5)
    followed.look(20)
    assert "step 5 of 400" in followed.view.content
    lock.release()


def test_a_free_lock_is_not_taken_while_it_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_run(tmp_path / "gpt-1", done=3)
    Lock(path).release()
    followed = FollowedRun("gpt-1", path)
    followed.look(0)
    monkeypatch.setattr("shoestring.show.watch.follow.holder", lambda folder: pytest.fail("it was asked for"))
    for second in range(1, 5):
        followed.look(float(second))


def test_tabs_share_what_is_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.show.watch.follow.FollowedRun", Drawn)
    with served(run) as server:
        streams = [pushed(asked(server, "/events")) for _ in range(4)]
        assert len({next(stream) for stream in streams}) == 1
        assert [followed.count for followed in server.watch.runs.values()] == [1]  # type: ignore[attr-defined]


def test_serve_says_where_and_ends_when_interrupted(run: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from shoestring.show.watch import serve; "
        "serve([Path(sys.argv[1])], ready=lambda url: print(url, flush=True)); print('torch' in sys.modules)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().startswith("http://127.0.0.1:")
    child.send_signal(2)
    assert child.communicate(timeout=HUNG)[0] == "False\n" and child.returncode == 0


def test_the_page_of_a_run_of_5000_steps_is_small(tmp_path: Path) -> None:
    followed = FollowedRun("gpt-1", made_run(tmp_path / "gpt-1", steps=10_000, done=5000))
    followed.look(0)
    assert len(followed.view.content.encode()) < 80_000


def test_a_run_that_says_nothing_for_long_is_told_of() -> None:
    assert silence(20.0, [0.5], 7) == "" and silence(100.0, [15.0], 7) == ""
    assert silence(100.0, [0.5, 0.6], 7).startswith("No step for 1 min 40 s, though its process 7 is there")
