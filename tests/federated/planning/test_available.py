"""Techniques from other packages work wherever ours do. The example is the one in docs/own_technique.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoestring
from shoestring.core.errors import Mistake
from shoestring.federated.planning.available import available_techniques
from tests.federated.test_session import JOB
from tests.federated.toys import toy_job
from tests.waiting import HUNG

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "own_technique.md").read_text()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The guide's technique in a module of its own."""
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert code is not None
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "my_package.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    import my_package

    yield my_package
    sys.modules.pop("my_package")


def install(folder: Path) -> None:
    """What pip would write, with the guide's entry point."""
    found = re.search(r"```toml\n\[project.entry-points.\"([\w.]+)\"\]\n(\w+) = \"([\w:]+)\"", GUIDE)
    assert found is not None
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2]} = {found[3]}\n")


def test_an_instance_of_the_guides_class_federates_and_learns_in_any_number_of_processes(package: Any) -> None:
    use = [package.MajorityVote(rate=0.03), "DropOut(rate=0.1)"]
    found = [shoestring.federate(toy_job(), rounds=12, per_round=6, processes=count, use=use) for count in (1, 2)]
    assert found[0].losses[-1] < 0.8 * found[0].losses[0]
    assert found[0].report["weights_sha256"] == found[1].report["weights_sha256"]
    assert [one["name"] for one in found[0].report["techniques"]] == ["DropOut", "MajorityVote"]


def test_a_run_goes_on_with_the_callers_technique_and_imports_nothing_that_its_folder_names(
    package: Any, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    asked: dict[str, Any] = {"rounds": 3, "per_round": 4, "processes": 1, "run": tmp_path / "run"}

    def stop(event: Any) -> None:
        if event.kind == "round" and event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shoestring.federate(tmp_path / "job.py", use=[package.MajorityVote(0.03)], tell=stop, **asked)
    with pytest.raises(Mistake, match="MajorityVote"):  # the folder names it, and nobody here has it
        shoestring.federate(tmp_path / "job.py", **asked)
    again = shoestring.federate(tmp_path / "job.py", use=[package.MajorityVote(0.03)], **asked)
    whole = shoestring.federate(
        tmp_path / "job.py", use=[package.MajorityVote(0.03)], **asked | {"run": tmp_path / "whole"}
    )
    assert again.report["weights_sha256"] == whole.report["weights_sha256"]


def test_an_installed_package_brings_it_to_the_command_line_and_to_the_planner(package: Any, tmp_path: Path) -> None:
    install(tmp_path / "site")
    assert package.MajorityVote in available_techniques().kinds
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shoestring",
            "federate",
            "job.py",
            "--rounds",
            "2",
            "--per-round",
            "4",
            "--json",
            "--use",
            "MajorityVote(rate=0.02)",
            "--run",
            "run",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    assert [one["name"] for one in json.loads(done.stdout)["techniques"]] == ["MajorityVote"]


def test_what_is_no_technique_or_has_the_name_of_another_is_refused(package: Any) -> None:
    class TopK(package.MajorityVote):  # type: ignore[name-defined,misc]
        pass

    with pytest.raises(Mistake, match="has the same name as"):
        available_techniques([TopK()])
    with pytest.raises(Mistake, match="no FederatedTechnique"):
        available_techniques([object()])  # type: ignore[list-item]
