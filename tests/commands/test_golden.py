"""What a program reads of our commands with --json stays: every key that was there is there, of the same kind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.golden import HERE, VERSIONS, answers, lost
from tests.waiting import HUNG

USE = ["--use", "Accumulate(pieces=2)"]
OPEN = {
    "dtypes",
    "environment",
    "links",
    "missing",
    "runners_up",
    "more_memory",
    "refused",
}  # what is in them depends on the machine
# Zeros that `verify` had of runs without traffic, when what was measured was counted in two ways.
GONE = {
    ("verify", "version-1"): {
        f".{side}.{name} is gone" for side in ("measured", "plain_measured") for name in ("traffic_bytes", "sent_bytes")
    }
}
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "job.py", "--run", "finished", *USE, "--save-every", "6", "--keep", "1"],
    "plan": ["plan", "job.py", "--memory", "2GiB", "--save", "saved.json"],
    "plan for a small budget": ["plan", "job.py", "--memory", "1MiB"],
    "replayed plan": ["plan", "job.py", "--plan", "saved.json"],
    "verify": ["verify", "job.py", *USE, "--check-steps", "2"],
    "train by a group": ["train", "job.py", "--run", "group", "--devices", "2", "--use", "DataParallel()"],
    "export safetensors": ["export", "finished", "--to", "safetensors"],
    "export csv": ["export", "finished", "--to", "csv"],
    "exported json": ["export", "finished", "--to", "json"],
    "doctor": ["doctor"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every command says today, one after the other in one folder."""
    place = tmp_path_factory.mktemp("golden")
    shutil.copy(HERE / "job.py", place)
    found = {}
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "shoestring", *words, "--json"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=HUNG)
        assert done.returncode == (3 if name == "plan for a small budget" else 0), (name, done.stderr)
        found[name] = json.loads(done.stdout)
    found["exported json"] = json.loads((place / "finished" / "export.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_an_answer_is_still_there(name: str, version: str, said: dict[str, Any]) -> None:
    before = {key: value for key, value in answers(version)[name].items() if key not in OPEN}
    assert set(lost(before, said[name])) == GONE.get((name, version), set())


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_weights_are_those_that_earlier_versions_trained(version: str, said: dict[str, Any]) -> None:
    assert said["train"]["weights_sha256"] == (HERE / version / "weights_sha256").read_text().strip()


@pytest.mark.slow
def test_every_worker_of_a_group_has_its_own_figures_and_they_are_right(said: dict[str, Any]) -> None:
    found = said["train by a group"]["workers"]
    assert [one["rank"] for one in found] == [0, 1] and all(one["predicted"] == one["measured"] for one in found)
