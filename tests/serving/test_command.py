"""`shoestring serve` as a user runs it: planned, started, asked, stopped, and started again by the kept plan."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import shoestring
from shoestring.commands.main import main
from shoestring.runs.events.event import Event, Stopped
from shoestring.serving.events import Listening
from shoestring.show.watch.follow import Watch
from tests.waiting import HUNG, until
from tests.warm import python

JOB = """
import torch
from torch import nn
from shoestring import Job

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(300, 8), nn.Linear(8, 2)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))

def batches():
    generator = torch.Generator().manual_seed(0)
    for size in (3, 9, 30, 12):
        yield torch.randint(0, 300, (2, size), generator=generator), torch.tensor([0, 1])

def answer(text):
    if not text:
        raise ValueError("no text")
    output = yield torch.tensor([[ord(letter) % 300 for letter in text]])
    return {"class": int(output.argmax())}

def job() -> Job:
    return Job(model=Mean, data=batches, answer=answer)
"""
PLAN = ["--use", "DynamicBatching(tokens=64)"]


@contextmanager
def served(folder: Path, *words: str, ends: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """The address of a server that this command starts; by default it ends as Ctrl-C ends it."""
    command = [python(), "-m", "shoestring", "serve", "job.py", *PLAN, "--port", "0", "--run", "run", *words]
    with open(folder / "log", "w+b") as log:
        child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            until(lambda: "answers at" in (folder / "log").read_text() or child.poll() is not None)
            found = re.search(r"answers at (\S+)", (folder / "log").read_text())
            assert found is not None, (folder / "log").read_text()
            yield found[1]
            child.send_signal(ends)
            assert child.wait(HUNG) == (-ends if ends is signal.SIGKILL else 0), (folder / "log").read_text()
        finally:
            child.kill()
            child.wait()


def asked(url: str, body: object) -> object:
    request = Request(f"{url}answer", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=HUNG) as answer:
        return json.load(answer)


def state(place: Path) -> str:
    """What the watch page says of it."""
    followed = Watch([place]).runs["run"]
    followed.look(0.0)
    return followed.state


def test_a_job_answers_over_http_and_serves_again_by_the_kept_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, one of two in a folder, and from a script: as every run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    with served(tmp_path, ends=signal.SIGKILL) as url:
        first = asked(url, {"text": "hello"})
        assert isinstance(first, dict) and first["class"] in (0, 1)
    kept = (tmp_path / "run" / "plan.json").read_bytes()
    with served(tmp_path) as url:
        assert asked(url, {"text": "hello"}) == first and state(tmp_path) == "running"
        with pytest.raises(SystemExit) as ended:
            main(["serve", "job.py", *PLAN, "--run", "run"])
        assert ended.value.code == 2 and "run is in use by process" in capsys.readouterr().err
    told = list[Event]()

    def stop_once_it_listens(event: Event) -> None:
        told.append(event)
        if isinstance(event, Listening):
            os.kill(os.getpid(), signal.SIGTERM)

    done = shoestring.serve("job.py", use=PLAN[1:], port=0, run="run", tell=stop_once_it_listens)
    assert (done.requests, done.failures) == (0, 0) and isinstance(told[-1], Stopped) and state(tmp_path) == "stopped"
    assert (tmp_path / "run" / "plan.json").read_bytes() == kept
    assert "measuring the model" not in (tmp_path / "log").read_text()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events].count("listening") == 3
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--p99", "fast"], 2, "fast"),
        (["--p99", "5ms", "--latency", "5ms@50%"], 2, "give one of them"),
        (["--latency", "5ms"], 2, "20ms@95%"),
        (["--use", "DynamicBaching()"], 2, "did you mean"),
        (["--price", "free"], 2, "--price"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    told: str,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "job.py", *words])
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error
    assert os.listdir(tmp_path) == ["job.py"]
