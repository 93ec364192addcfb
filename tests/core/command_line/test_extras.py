"""Every missing optional package is named, with the command that installs it, wherever it is first needed."""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from shoestring.commands import main
from shoestring.commands.main import run
from shoestring.core.command_line.extras import EXTRAS, Extra, MissingExtra, install_hint, require
from shoestring.core.errors import Mistake
from shoestring.jobfile import load_job
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.commands.doctor import missing

ROOT = Path(__file__).parents[3]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_what_is_absent_is_named_with_its_command_and_doctor_lists_it(
    extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra.modules[0], None)
    with pytest.raises(MissingExtra, match=f"{extra.modules[0]}, which is not installed; run: pip install") as told:
        require(extra.name)
    assert str(told.value) in missing()


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_an_extra_is_declared_and_part_of_all(extra: Extra) -> None:
    assert extra.name in DECLARED and extra.name in DECLARED["all"][0]


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("dp_accounting", ["federate", "digits", "--epsilon", "8", "--delta", "1e-3"], "shoestring[private]"),
        ("sklearn", ["train", "digits", "--steps", "1"], "shoestring[sklearn]"),
        ("sklearn", ["federate", "digits", "--rounds", "1"], "shoestring[sklearn]"),
        ("tensorboard", ["train", "gpt", "--tensorboard"], "shoestring[tensorboard]"),
        ("onnxruntime", ["compress", "gpt", "--size", "1MB", "--to", "onnx"], "shoestring[onnx]"),
    ],
)
def test_a_command_that_needs_it_says_so(
    module: str,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert said in capsys.readouterr().err


NEEDS = """
from torch import nn
from shoestring import Job
{file}
def model() -> nn.Module:
    {model}
    return nn.Linear(8, 2)

def job() -> Job:
    {job}
    return Job(model=model, data=list)
"""


@pytest.mark.parametrize("place", ["file", "job", "model"])
def test_a_job_that_imports_an_absent_package_names_it_its_line_and_its_command(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    lines = {one: "import transformers.models" if one == place else "" for one in ("file", "job", "model")}
    (tmp_path / "needs.py").write_text(NEEDS.format(**lines), encoding="utf-8")
    where = NEEDS[: NEEDS.index(f"{{{place}}}")].count("\n") + 1
    with pytest.raises(
        Mistake, match=rf"transformers.*needs.py line {where}.*run: pip install .shoestring.transformers"
    ):
        fresh_model(load_job(tmp_path / "needs.py", {}))


def test_any_failure_of_a_job_file_or_its_model_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NEEDS.format(file="", job="", model="nn.Linear('wide', 2)"), encoding="utf-8")
    with pytest.raises(Mistake, match=r"could not be made: TypeError.*job.py line 6"):
        fresh_model(load_job(tmp_path / "job.py", {}))
    (tmp_path / "job.py").write_text(NEEDS.format(file="", job="1 / 0", model=""), encoding="utf-8")
    with pytest.raises(Mistake, match=r"raised ZeroDivisionError: division by zero \(job.py line 10\)"):
        load_job(tmp_path / "job.py", {})


def test_a_job_file_that_ends_the_process_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NEEDS.format(file="import sys; sys.exit(2)", job="", model=""), encoding="utf-8")
    with pytest.raises(Mistake, match=r"raised SystemExit: 2 \(job.py line 4\)"):
        load_job(tmp_path / "job.py", {})


def imported(file: Path) -> set[str]:
    """Top-level names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_every_package_that_a_benchmark_imports_is_installed_by_an_extra() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    own = {file.stem for file in files} | {"shoestring", "torch", "numpy", "rich"} | set(sys.stdlib_module_names)
    declared = {normal(one) for names in ("bench", "peers", "all", *EXTRAS) for one in requirements(DECLARED[names])}
    owners = {"faiss": ["faiss-cpu"], **packages_distributions()}  # the tests do not install what only benchmarks need
    missing = {
        name
        for file in files
        for name in imported(file) - own
        if not declared & {normal(one) for one in (*owners.get(name, ()), name)}
    }
    assert not missing, f"imported in benchmarks/ and in no extra of pyproject.toml: {sorted(missing)}"


def requirements(written: list[str]) -> set[str]:
    """Names of the packages in a list of requirements."""
    return {one.partition("[")[0].partition(">")[0].partition("=")[0].strip() for one in written}


def test_a_package_that_is_there_and_can_not_be_imported_is_told_with_what_repairs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not: ModuleNotFoundError, of a name that the user has never heard of."""
    (tmp_path / "dp_accounting").mkdir()
    (tmp_path / "dp_accounting" / "__init__.py").write_text("import absolutely_gone\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as told:
        importlib.import_module("dp_accounting")
    hint = "; dp_accounting is installed and can't be imported: reinstall it with what it needs: pip install --force-r"
    assert install_hint(told.value).startswith(hint)
    assert install_hint(ImportError("raised by a function of peft", name="peft")) == ""
    monkeypatch.setattr(main, "parse_and_run", lambda words: importlib.import_module("dp_accounting"))
    assert run(["doctor"]) == 2 and "No module named 'absolutely_gone'; dp_accounting is" in capsys.readouterr().err
