"""A run knows the local modules it was made of: one that changed is refused, by its name, wherever and whenever the job imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoestring import Mistake
from shoestring.core.user_code.blame import ROOT
from shoestring.jobfile import load_job, resolved_arguments
from shoestring.runs.events.event import Stepped, Warned
from shoestring.runs.events.event_log import note, read
from shoestring.runs.folder import Folder
from shoestring.runs.modules import imported_modules, kept_modules, modules_on_path, note_modules
from shoestring.runs.request import request_for
from shoestring.runs.resume import OpenedRun, Resolved, open_run

FILES = {
    "job.py": """
import importlib.util
from torch import nn
from shoestring import Job
from mod_settings import RATE
from mod_parts import layers
importlib.import_module("mod_" + "dynamic")
at = importlib.util.spec_from_file_location("mod_by_path", __file__.replace("job.py", "mod_by_path.py"))
by_path = importlib.util.module_from_spec(at)
at.loader.exec_module(by_path)

def model():
    from mod_lazy import WIDTH
    return nn.Linear(WIDTH, 2)

def loss(output, batch):
    import mod_late
    return output.sum() * mod_late.SCALE

def job(width: int = 8, rate: float = RATE) -> Job:
    return Job(model=model, data=[], loss=loss)
""",
    "mod_settings.py": "RATE = 0.1\n",
    "mod_parts/__init__.py": "",
    "mod_parts/layers.py": "from .inner import DEPTH\n",
    "mod_parts/inner.py": "DEPTH = 2\n",
    "mod_dynamic.py": "A = 1\n",
    "mod_lazy.py": "WIDTH = 4\n",
    "mod_late.py": "SCALE = 1\n",
    "mod_by_path.py": "B = 1\n",
}
AT_ONCE = {
    "mod_settings.py",
    "mod_parts/__init__.py",
    "mod_parts/layers.py",
    "mod_parts/inner.py",
    "mod_dynamic.py",
    "mod_by_path.py",
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A job with modules; every load imports them anew, as another process does."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("mod_")]:
        del sys.modules[name]


def ours(modules: dict[str, str] | None) -> set[str]:
    return {name for name in modules or {} if name.startswith("mod_")}


def begun(place: Path, adopt: bool = False, **flags: Any) -> OpenedRun:
    def resolve(given: Any) -> Resolved:
        forget()
        return Resolved(resolved_arguments(load_job(place / "job.py", dict(given))), imported_modules())

    asked = request_for(place / "job.py", flags, None, None, False, None)
    held = open_run(place / "run", asked, (place / "job.py").read_bytes(), False, adopt, {}, resolve)
    held.lock.release()
    return held


def begun_with_a_step(place: Path) -> Folder:
    folder = begun(place).folder
    note(folder.path, Stepped(1, 0.5, 0.1, 1, 1))
    return folder


def test_what_a_job_imports_is_known_by_its_place_on_the_path(place: Path) -> None:
    assert ours(kept_modules(begun(place).folder)) == AT_ONCE


def test_what_functions_import_is_noted_when_they_have_run(place: Path) -> None:
    folder = begun_with_a_step(place)
    job = load_job(place / "job.py", {})
    job.model()
    note_modules(folder, place, True, print)
    assert ours(kept_modules(folder)) == {*AT_ONCE, "mod_lazy.py"}
    job.loss(job.model().weight, None)
    note_modules(folder, place, True, print)
    assert ours(kept_modules(folder)) == {*AT_ONCE, "mod_lazy.py", "mod_late.py"}


@pytest.mark.parametrize("name", sorted({*AT_ONCE, "mod_late.py"}))
def test_a_module_that_changed_is_refused_by_its_name_and_can_be_adopted(name: str, place: Path) -> None:
    folder = begun_with_a_step(place)
    load_job(place / "job.py", {}).loss(__import__("torch").ones(1), None)  # so that mod_late is noted
    note_modules(folder, place, True, print)
    with (place / name).open("a") as file:
        file.write("# changed\n")
    with pytest.raises(
        Mistake, match=f"the module {name}, which the job imports, is not as it was when the run was begun.*--adopt"
    ):
        begun(place)
    begun(place, adopt=True)
    begun(place)  # the run is one of these modules now


def test_an_argument_whose_default_comes_from_elsewhere_is_told_with_both_values(place: Path) -> None:
    begun_with_a_step(place)
    (place / "mod_settings.py").write_text(
        "RATE = 0.20\n"
    )  # longer: Python takes one of the same second and length for the old one
    with pytest.raises(Mistake, match=r"mod_settings\.py"):
        begun(place)
    held = begun(place, adopt=True)
    assert held.request.arguments["rate"] == 0.2
    assert "the argument rate of the job changed: 0.1 before, now 0.2" in str(records(place))


def records(place: Path) -> list[Any]:
    return read(place / "run").events


def test_a_run_goes_on_with_the_same_values_however_they_were_given(place: Path) -> None:
    assert dict(begun(place).request.arguments) == {"width": 8, "rate": 0.1, "steps": 100, "seed": 0}
    note(place / "run", Stepped(1, 0.5, 0.1, 1, 1))
    assert not begun(place, rate=0.1, width=8, steps=100).changed
    with pytest.raises(Mistake, match=r"--rate changed: 0\.1 before, now 0\.3"):
        begun(place, rate=0.3)


def test_a_module_that_is_new_or_gone_is_told(place: Path) -> None:
    folder = begun_with_a_step(place)
    told: list[str] = []
    (place / "mod_new.py").write_text("")
    __import__("mod_new")
    (place / "mod_dynamic.py").unlink()
    del sys.modules["mod_dynamic"]
    note_modules(folder, place, True, told.append, begins=True)
    assert any("imports mod_new.py now" in one for one in told)
    assert any("mod_dynamic.py, which the run was begun with" in one for one in told)


def test_a_script_is_told_and_not_refused(place: Path) -> None:
    folder, told = begun_with_a_step(place), list[str]()
    (place / "mod_dynamic.py").write_text("A = 2\n")
    note_modules(folder, place, False, told.append, begins=True)
    assert told == [
        "the module mod_dynamic.py, which the job imports, is not as it was when the run was begun: the run goes on with it as "
        "it is now"
    ]


def test_names_that_lead_elsewhere_are_not_looked_for(place: Path) -> None:
    (place.parent / "secret.py").write_text("")
    assert modules_on_path(["../secret.py", str(place / "mod_lazy.py"), "job.txt", "mod_lazy.py"], place).keys() == {
        "mod_lazy.py"
    }


def test_a_run_of_a_version_that_did_not_note_them_goes_on(place: Path) -> None:
    folder = begun_with_a_step(place)
    (folder.path / "modules.json").unlink()
    assert not begun(place).changed and not [one for one in records(place) if isinstance(one, Warned)]


RUN = """
import sys
import shoestring
for step in shoestring.train(sys.argv[1], run=sys.argv[2], adopt=len(sys.argv) > 3):
    if step.number == 1:
        break
"""


@pytest.mark.slow
def test_a_script_that_goes_on_with_a_job_file_is_refused_a_module_that_this_imports(place: Path) -> None:
    def script(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "script.py", "job.py", "a", *more]
        return subprocess.run(
            command, cwd=place, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT.parent)}
        )

    (place / "script.py").write_text(RUN)
    (place / "job.py").write_text(FILES["job.py"].replace("data=[]", "data=[__import__('torch').ones(2, 4)]"))
    assert (first := script()).returncode == 0, first.stderr
    (place / "mod_parts" / "inner.py").write_text("DEPTH = 3\n")
    assert "the module mod_parts/inner.py, which the job imports, is not as it was" in script().stderr
    (place / "mod_late.py").write_text("SCALE = 2\n")  # a function imports it: the script is told
    adopted = script("adopt")
    assert adopted.returncode == 0 and "UserWarning: the module mod_late.py" in adopted.stderr, adopted.stderr
