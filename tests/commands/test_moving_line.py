"""The line that moves while training or planning: what stands in the terminal in the end, and what a pipe gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoestring.core.command_line.command import Call
from shoestring.processes import streams
from shoestring.runs.events.event import Begun, Stepped, Validated, Warned
from shoestring.runs.events.event_log import Events
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.show.moving_line import MovingLine
from shoestring.show.page.words import seconds_left
from shoestring.show.terminal import Screen
from shoestring.show.ticker import Ticker
from shoestring.training.commands.progress import Shower, telling


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def standing(written: str) -> list[str]:
    """What stands in a terminal after this was written."""
    lines, place = [""], 0
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]", written):
        if part == "\x1b[K":
            lines[-1] = lines[-1][:place]
        elif part in "\r\n":
            place = 0
            lines += [""] * (part == "\n")
        else:
            lines[-1] = lines[-1][:place].ljust(place) + part + lines[-1][place + 1 :]
            place += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_nothing_is_left_of_a_longer_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", kind)
    line = MovingLine(Terminal())
    line.show("a long line about step 9")
    line.show("step 10")
    assert standing(line.stream.getvalue()) == ["step 10"]  # type: ignore[attr-defined]
    line.say("warning: hot")
    assert standing(line.stream.getvalue()) == ["warning: hot", "step 10"]  # type: ignore[attr-defined]
    line.end()
    line.say("done")
    assert standing(line.stream.getvalue()) == ["warning: hot", "step 10", "done", ""]  # type: ignore[attr-defined]
    line.show("once more")
    line.clear()
    assert standing(line.stream.getvalue())[-2:] == ["done", ""]  # type: ignore[attr-defined]


def test_a_pipe_gets_plain_lines() -> None:
    line = MovingLine(StringIO())
    line.show("step 1")
    line.say("warning: hot")
    line.show("step 2")
    line.end()
    assert line.stream.getvalue() == "step 1\nwarning: hot\nstep 2\n"  # type: ignore[attr-defined]


def shower(path: Path, stream: StringIO, epochs: int = 3) -> Shower:
    held: Any = SimpleNamespace(folder=Folder(path), request=SimpleNamespace(memory=None))
    job: Any = SimpleNamespace(steps=0, epochs=epochs)
    return Shower(Call("train"), MovingLine(stream), job, held, Ticker(print))


def step(number: int, seconds: float = 1.0, epoch: int = 0) -> Stepped:
    return Stepped(number, 2.0, seconds, 1 << 20, 1 << 20, epoch=epoch)


def test_epochs_validations_and_warnings_are_shown_without_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.training.commands.progress.screen", lambda stream: Screen(90))
    stream = Terminal()
    show = shower(tmp_path, stream)
    show(Begun(steps=0, step=0))
    for event in (step(1), step(2, epoch=1), Validated(2, 1, {"loss": 1.5}), Warned("hot")):
        show(event)
    assert standing(stream.getvalue()) == [
        "warning: hot",
        "step 2, epoch 1 of 3  loss 2.000  held out: loss 1.500  memory 1.00 MiB",
    ]
    show(step(3, epoch=1))
    assert standing(stream.getvalue())[-1].startswith("step 3, epoch 2 of 3")


def test_a_run_that_goes_on_has_the_same_time_left_in_terminal_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.training.commands.progress.screen", lambda stream: Screen(120))
    events = Events(tmp_path)
    steps = [step(number, 1.0 + number % 3) for number in range(1, 31)]
    for event in (Begun(steps=90, step=0), *steps, Validated(20, 1, {"loss": 2.0}, 6.0)):
        events.add(event)
    show = shower(tmp_path, stream := Terminal(), epochs=0)
    for event in (Begun(steps=90, step=25), step(26, 40.0), step(27, 3.0)):
        events.add(event)
        show(event)
    report = report_of(tmp_path, History().read(tmp_path))
    left = seconds_left(report)
    assert left is not None and left == pytest.approx(63 * 2.0 + 3 * 6.0)
    assert f"about {round(left / 60)} min left" in standing(stream.getvalue())[-1]


def test_planning_says_what_it_does_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr("shoestring.show.moving_line.screen", lambda stream: Screen(60))
    with telling(Call("train")) as doing:
        doing("timing a real step", 14.0)
        assert standing(stream.getvalue()) == ["planning, about 14 s: timing a real step …"]
        doing("trying a plan with so long a name that no terminal has room for it", None)
        assert len(standing(stream.getvalue())[0]) == 59
    assert standing(stream.getvalue()) == [""]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"LC_ALL": "C"}, "##.. 5 ... \\u4e16"),
        ({"LC_ALL": "C.UTF-8"}, "██░░ 5 … 世"),
        ({"PYTHONIOENCODING": "latin-1"}, "##.. 5 ... \\u4e16"),
    ],
)
def test_a_terminal_without_other_characters_gets_ascii(settings: dict[str, str], shown: str) -> None:
    code = "import sys\nfrom shoestring.processes.streams import speak_plainly\nspeak_plainly(sys.stdout)\nprint('██░░ 5 … 世')"
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING")
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=variables | settings)
    assert done.stdout.decode() == shown + "\n", done.stderr


def test_every_character_of_ours_has_a_plain_one() -> None:
    assert all(text.isascii() for text in streams.PLAIN.values())
