"""A whole room from outside: a package brings a subject, techniques, a budget, a command, a report and a page section; and runs, with
tasks for worker processes, events and figures of its own, which are killed, resumed, watched and exported as ours are.

No file of ours is edited for it. The room shortens texts: what counts is their size in bytes, and how many letters are lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from safetensors.numpy import load_file

from tests.waiting import HUNG, until

ROOM = '''
"""Texts made smaller."""
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from shoestring.core.budget import Budget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity, figures
from shoestring.core.technique import Technique, applied, parse_technique, text
from shoestring.planning.choose import Chooser, best_or_asked, requested_candidate
from shoestring.planning.plan import Plan
from shoestring.planning.room import Room

SIZE, LOST = Quantity("size_bytes", "size", counted=True), Quantity("letters_lost", "letters lost", "letters")


@dataclass(frozen=True)
class Length:
    size: float
    lost: float = 0.0

    def numbers(self):
        return {"size_bytes": self.size, "letters_lost": self.lost}


@dataclass(frozen=True)
class Strip(Technique[str, Length]):
    """Spaces at the end of lines; nobody misses them. Of ten characters, one is taken to be such a space."""
    order: ClassVar[int] = 10
    why: ClassVar[str] = "spaces that nobody sees"

    def cost(self, now):
        return replace(now, size=0.9 * now.size)

    def apply(self, words):
        return "\\n".join(line.rstrip() for line in words.splitlines())


@dataclass(frozen=True)
class Cut(Technique[str, Length]):
    to: int = 50   # percent of the text that stays

    order: ClassVar[int] = 20
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "the end is left out"

    @classmethod
    def choices(cls, now):
        return cls(75), cls(50), cls(25)

    def cost(self, now):
        return Length(now.size * self.to / 100, now.lost + now.size * (1 - self.to / 100))

    def apply(self, words):
        return words[: len(words) * self.to // 100]


class Texts(Room):
    catalogue = (Strip, Cut)
    objective = LOST
    subject = "this text"

    def __init__(self, words):
        self.words = words

    def sketch(self, one):
        return Plan(one.techniques, one.exactness, one.known, None)

    def confirm(self, one):
        return self.sketch(one).predicting(size_bytes=len(applied(one.techniques, self.words)))


@dataclass(frozen=True)
class Shortened:
    by: tuple[str, ...]


def shorten(asked, call):
    import json

    words = Path(asked.file).read_text()
    room, cost = Texts(words), Length(len(words))
    use = tuple(parse_technique(one, Texts.catalogue) for one in asked.use) if asked.use else None
    plain = room.confirm(requested_candidate((), cost))
    plan = best_or_asked(Chooser(room, cost), Budget.parse(size=asked.size), plain, use).chosen
    made = applied(plan.techniques, words)
    found = figures((SIZE, LOST), plan.numbers()).with_measured({"size_bytes": len(made), "letters_lost": len(words) - len(made)})
    if asked.report:
        from shoestring.runs.reports.report import Report
        from shoestring.show.page import page

        Path(asked.report).write_text(page(Report(of_room=Shortened(tuple(map(text, plan.techniques))))))
    if call.json:
        print(json.dumps({"plan": plan.as_json(), "measured": {one.quantity.name: one.measured for one in found}}))
    else:
        from shoestring.show.terminal import beside

        print(beside(found))
    return 0


def section(report):
    from markupsafe import Markup

    if not isinstance(report.of_room, Shortened):
        return ""
    return Markup("<section><h2>Shortened by</h2><p>{}</p></section>").format(" and ".join(report.of_room.by) + " <b>")
'''
OPTIONS = """
from shoestring.core.command_line.arguments import argument, dataclass


@dataclass(frozen=True)
class ShortenOptions:
    file: str = argument("file", "the text", positional=True)
    size: str | None = argument("BYTES", "most bytes")
    use: tuple[str, ...] | None = argument("TECHNIQUE", "exactly these techniques", repeated=True)
    report: str | None = argument("FILE", "where to write a page")


@dataclass(frozen=True)
class TightenOptions:
    file: str = argument("file", "the text", positional=True)
    letters: int = argument("N", "letters to take away", read=int, required=True)
    run: str = argument("DIR", "folder of the run", required=True)
"""
PLUGIN = """
from shoestring.core.command_line.command import Command, ExportFormat
from shoestring.core.rooms import RoomPlugin, Verb


class Shortening(RoomPlugin):
    name, counts, verb = "shorten", "letter", Verb("shorten", "shortening", "shortened")

    def commands(self):
        return (
            Command("shorten", "a text made small enough", "texts_options:ShortenOptions", "texts:shorten"),
            Command(
                "tighten", "a text made shorter, letter by letter", "texts_options:TightenOptions", "texts_run:tighten",
                keeps_result=True, runs=True,
            ),
            Command("doctor", "one of ours by name, which can't be replaced", "texts:Nothing", "texts:nothing"),
        )

    def exports(self):
        return (
            ExportFormat("txt", "the text", ".txt", "texts_run:export_text"),
            ExportFormat("safetensors", "one of ours by name, which can't be replaced", ".txt", "texts_run:export_text"),
        )

    def cautions(self, request):
        return (f"{request.asked['letters']} letters are gone for good",)

    def tasks(self):
        from texts_run import Tighten

        return {Tighten.kind: Tighten}

    def events(self):
        from texts_run import Dropped

        return (Dropped,)

    def quantities(self):
        from texts import LOST, SIZE

        return SIZE, LOST

    def part(self, request, history, folder):
        from texts_run import Dropped, Letters

        return Letters(request.asked, tuple(one.letter for one in history.of_kind(Dropped)))

    def page(self):
        from texts_page import ShortPage

        return ShortPage(self)


SHORTEN = Shortening()
"""
SHOWN = """
from markupsafe import Markup

from shoestring.show.page.room_page import Cell, RoomCell, RoomPage


class ShortPage(RoomPage):
    plans_memory = False
    style = ".letters{letter-spacing:1px}\\n"

    def flags(self, own):
        return own.asked

    def sections(self, own, report):
        letters = " ".join(own.letters)
        yield Markup("<section><h2>Letters that went</h2><p class='letters'>{}</p></section>").format(letters)

    def ending(self, own, why):
        return f", the last one {own.letters[-1]}"

    def cells(self, own):
        yield RoomCell("Letters", Cell(str(len(own.letters))))
"""
RUNS = """
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from shoestring.core.budget import Budget
from shoestring.core.technique import technique_from
from shoestring.planning.choose import Chooser, best_or_asked, requested_candidate
from shoestring.planning.plan import read_plan
from shoestring.processes.launch import run_worker
from shoestring.processes.task import Task
from shoestring.runs.events.event import Begun, Finished, RoomEvent, Stepped
from shoestring.runs.request import Request
from shoestring.runs.resume import open_run
from shoestring.runs.session import Execution, Session
from shoestring.show.page import page


@dataclass(frozen=True, kw_only=True)
class Dropped(RoomEvent):
    kind: ClassVar[str] = "dropped"
    letter: str
    left: int

    @classmethod
    def measured_figures(cls, told, seconds, step_seconds):
        return {"size_bytes": told[-1].left, "letters_lost": len(told)}


@dataclass(frozen=True)
class Letters:
    asked: Mapping[str, object]
    letters: tuple[str, ...]


@dataclass(frozen=True)
class Tightened:
    left: str = ""
    unfinished: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Tighten(Task[Tightened]):
    room: ClassVar[str] = "shorten"
    kind: ClassVar[str] = "tighten"
    result: ClassVar[type] = Tightened
    file: str
    letters: int
    folder: str

    @property
    def run_folder(self):
        return self.folder

    def perform(self, tell, link):
        import torch

        from shoestring.runs.checkpoints.cadence import Cadence
        from shoestring.runs.checkpoints.checkpoints import newest_good
        from shoestring.runs.events.event_log import Events
        from shoestring.runs.folder import Folder
        from shoestring.runs.checkpoints.saver import Saver, Snapshot

        folder = Folder(Path(self.folder))
        events = Events(folder.path)

        def say(event):
            tell(events.add(event))

        saver = Saver(folder.checkpoints, Cadence(steps=1), say)
        kept, _ = newest_good(folder.checkpoints, ("parts",))
        step = kept.step if kept else 0
        model = torch.nn.Module()
        words = Path(self.file).read_text()[: -step or None]
        say(Begun(pid=os.getpid(), steps=self.letters, step=step))
        while step < self.letters:
            step, letter, words = step + 1, words[-1], words[:-1]
            say(Dropped(step=step, letter=letter, left=len(words)))
            say(Stepped(step, float(len(words)), 0.5, 1000, 2000))
            weights = {"text": torch.tensor(list(words.encode()), dtype=torch.uint8)}
            saver.save(lambda: Snapshot(step, weights, {}, {"step": step, "parts": {}, "left_out": []}))
            saver.wait()
            if Path(f"die-{step}").exists():
                Path(f"die-{step}").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        saver.close()
        say(Finished(step))
        return Tightened(words)


@dataclass
class Tightening(Execution):
    session: Session
    file: Path
    letters: int
    folder: str

    def room(self):
        from texts import Length, Texts

        words = self.file.read_text()
        return Texts(words), Length(len(words))

    def read_plan(self, file):
        from texts import LOST, SIZE, Texts

        return read_plan(file, partial(technique_from, catalogue=Texts.catalogue), (SIZE, LOST), type(None))

    def choose(self):
        room, cost = self.room()
        plain = room.confirm(requested_candidate((), cost))
        return best_or_asked(Chooser(room, cost), Budget.parse(size=f"{int(cost.size) - self.letters}B"), plain, None)

    def execute(self, plan):
        task = Tighten(file=str(self.file), letters=self.letters, folder=self.folder)
        return run_worker(task, {}, lock=self.session.held.lock.file)

    def report(self, plan, ended):
        return {"left": ended.left, "by": str(plan)}


def export_text(asked):
    from shoestring.runs.reports.export import Exported, named_weights

    (letters,) = named_weights(asked.checkpoint)["text"].pieces()
    asked.target.write_bytes(bytes(letters))
    return Exported(asked.target, ("without its end",), {"bytes": len(letters)})


def tighten(asked, call):
    file = Path(asked.file).resolve()
    source = file.read_bytes()
    request = Request(job=str(file), source=sha256(source).hexdigest(), room="shorten", asked={"letters": asked.letters})
    with Session(open_run(Path(asked.run), request, source, False, False), page) as session:
        played = session.play(Tightening(session, file, asked.letters, asked.run))
        print(played.report["left"])
    return 0
"""
ENTRIES = """[shoestring.sections]
shortened = texts:section

[shoestring.rooms]
shorten = texts_plugin:SHORTEN
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as pip would install it, and a text of a hundred characters, of which ten are spaces at the end of its lines."""
    modules = {"texts": ROOM, "texts_options": OPTIONS, "texts_plugin": PLUGIN, "texts_page": SHOWN, "texts_run": RUNS}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    told = tmp_path / "texts-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: texts\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "long.txt").write_text("abcd \n" * 9 + "z" * 46)
    return tmp_path


def environment(package: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}


def shoestring(package: Path, *words: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """A command, with the package installed or without it."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "shoestring", *words],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=environment(package) if installed else dict(os.environ),
    )


def test_its_budget_is_met_by_the_same_chooser_and_its_figures_are_shown(package: Path) -> None:
    done = shoestring(package, "shorten", "long.txt", "--size", "95B", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["name"] for one in told["plan"]["techniques"]] == ["Strip"] and told["measured"] == {
        "size_bytes": 91,
        "letters_lost": 9,
    }
    assert told["plan"]["size_bytes"] == 91.0, "confirmed by the real thing; by arithmetic it would be 90"
    shown = shoestring(package, "shorten", "long.txt", "--size", "50B", "--report", "page.html").stdout
    assert shown.split()[:2] == ["predicted", "measured"] and "letters lost" in shown


def test_a_budget_that_it_can_not_meet_is_refused_as_ours_are(package: Path) -> None:
    done = shoestring(package, "shorten", "long.txt", "--size", "5B", "--json")
    assert done.returncode == 3 and "nothing fits 5 B" in done.stderr and "letters lost" in done.stderr
    assert json.loads(done.stdout)["nearest"]["techniques"][-1]["knobs"] == {"to": 25}


def test_its_techniques_are_written_as_ours_are_and_a_mistake_gets_the_same_words(package: Path) -> None:
    forced = json.loads(shoestring(package, "shorten", "long.txt", "--use", "Cut(to=75)", "--json").stdout)
    assert [one["knobs"] for one in forced["plan"]["techniques"]] == [{"to": 75}] and forced["measured"][
        "size_bytes"
    ] == 75
    done = shoestring(package, "shorten", "long.txt", "--use", "Cut(too=75)")
    assert done.returncode == 2 and "Cut has no knob 'too'; it has to" in done.stderr and "Traceback" not in done.stderr


def test_its_commands_are_in_the_help_with_their_flags_and_none_of_ours_is_replaced(package: Path) -> None:
    shown = " ".join(shoestring(package, "--help").stdout.split())
    assert "shorten a text made small enough" in shown and "one of ours by name" not in shown
    assert "--letters N letters to take away" in " ".join(shoestring(package, "tighten", "--help").stdout.split())
    assert "measures it anew" not in shown and "what is missing" in shoestring(package, "doctor", "--help").stdout
    wrong = shoestring(package, "shorten", "long.txt", "--sise", "5B")
    assert wrong.returncode == 2 and "'--sise' is no option of shorten; did you mean --size?" in wrong.stderr
    assert "is no command" in shoestring(package, "shorten", "long.txt", installed=False).stderr


def test_a_room_that_can_not_be_imported_takes_no_command_away(package: Path) -> None:
    (package / "texts_plugin.py").write_text("import nothing_like_it")
    shown = shoestring(package, "--help")
    assert shown.returncode == 0 and "shorten" not in shown.stdout and "train" in shown.stdout
    assert "is no command" in shoestring(package, "shorten", "long.txt").stderr


def test_its_section_stands_on_the_page_and_can_not_be_markup(package: Path) -> None:
    assert shoestring(package, "shorten", "long.txt", "--size", "50B", "--report", "page.html").returncode == 0
    drawn = (package / "page.html").read_text()
    assert "<h2>Shortened by</h2>" in drawn and "Cut()" in drawn and "&lt;b&gt;" in drawn


TEXT = "the quick brown fox"


def tightened(package: Path, letters: int = 4) -> subprocess.CompletedProcess[str]:
    (package / "short.txt").write_text(TEXT)
    return shoestring(package, "tighten", "short.txt", "--letters", str(letters), "--run", "run")


def told(package: Path, installed: bool = True) -> dict[str, Any]:
    """The whole report of the run, as it is exported."""
    (package / "told.json").unlink(missing_ok=True)
    done = shoestring(package, "export", "run", "--to", "json", "--out", "told.json", installed=installed)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((package / "told.json").read_text())
    return found


@pytest.mark.slow
def test_its_run_is_killed_and_goes_on_and_is_reported(package: Path) -> None:
    (package / "die-2").touch()
    died = tightened(package)
    assert died.returncode != 0 and "SIGKILL" in died.stderr and "checkpoint is of step 2" in died.stderr, died.stderr
    story = told(package)
    assert (story["state"], story["room"], story["step"]) == ("failed", "shorten", 2)
    assert story["shorten"] == {"asked": {"letters": 4}, "letters": ["x", "o"]} and "SIGKILL" in story["text"]

    done = tightened(package)
    assert done.returncode == 0 and done.stdout.strip() == TEXT[:-4], done.stderr
    story = told(package)
    assert story["state"] == "finished" and story["shorten"]["letters"] == ["x", "o", "f", " "]
    assert story["measured"]["letters_lost"] == 4 and story["measured"]["size_bytes"] == len(TEXT) - 4
    assert story["predicted"].keys() == {"size_bytes", "letters_lost"} and story["techniques"], (
        "as its chooser planned it"
    )
    drawn = (package / "run" / "report.html").read_text()
    assert (
        "Letters that went" in drawn and "letter-spacing" in drawn and "Shortened 4 letters, the last one  ." in drawn
    )


@pytest.mark.slow
def test_its_run_is_another_s_to_nobody(package: Path) -> None:
    assert tightened(package).returncode == 0
    other = tightened(package, letters=5)
    assert other.returncode == 2 and "--letters changed: 4 before, now 5" in other.stderr, other.stderr


@contextmanager
def watched(package: Path) -> Iterator[str]:
    """The address at which the run is watched."""
    command = [sys.executable, "-P", "-m", "shoestring", "watch", "run", "--json"]
    with subprocess.Popen(command, cwd=package, stdout=subprocess.PIPE, env=environment(package)) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_its_run_is_watched_and_exported(package: Path) -> None:
    assert tightened(package).returncode == 0
    with watched(package) as url:

        def page() -> str:
            with urlopen(url, timeout=HUNG) as answer:
                return str(answer.read().decode())

        until(lambda: "This run is being read" not in page())
        shown = page()
    assert "Letters that went" in shown and "letter-spacing" in shown and "x o f" in shown
    done = shoestring(package, "export", "run", "--to", "safetensors", "--out", "text.safetensors")
    assert done.returncode == 0, done.stderr
    assert bytes(load_file(package / "text.safetensors")["text"]).decode() == TEXT[:-4]
    assert "4 letters are gone for good" in done.stderr
    done = shoestring(package, "export", "run", "--to", "txt", "--json")
    written = json.loads(done.stdout)
    assert (package / written["path"]).read_text() == TEXT[:-4] and "without its end" in done.stderr
    assert (written["path"], written["bytes"], written["notes"]) == ("run/export.txt", 15, ["without its end"])


@pytest.mark.slow
def test_a_run_whose_room_is_not_installed_says_so_and_imports_nothing(package: Path) -> None:
    assert tightened(package).returncode == 0
    story = told(package, installed=False)
    assert "no room 'shorten' is installed" in story["damage"][0] and "install the package" in story["damage"][0]
    assert story["step"] == 4 and "shorten" not in story, "what is common to all runs is there"
