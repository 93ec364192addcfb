"""What was written before, frozen: answers of every command in JSON, and run folders. `python -m tests.golden.make` writes them anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import HUNG

HERE = Path(__file__).parent
VERSIONS = ("version-3",)
USE = ["--use", "Accumulate(pieces=2)"]
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


def said_in(place: Path) -> dict[str, Any]:
    """What every command says with --json, one after the other in a folder that has the job."""
    found = {}
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "shoestring", *words, "--json"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=HUNG)
        assert done.returncode == (3 if name == "plan for a small budget" else 0), (name, done.stderr)
        found[name] = json.loads(done.stdout)
    found["exported json"] = json.loads((place / "finished" / "export.json").read_text())
    return found


def answers(version: str) -> dict[str, Any]:
    """What commands printed with --json, by command."""
    found: dict[str, Any] = json.loads((HERE / version / "answers.json").read_text())
    return found


def lost(before: Any, now: Any, where: str = "") -> list[str]:
    """What of an answer is not there any more, or of another kind; what is new is fine. Which parts stand in a peak depends on the plan.

    >>> lost({"a": 1, "b": {"c": "x"}}, {"a": 2.5, "b": {"c": None}, "d": 3})
    ['.b.c was str and is NoneType']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{where}.{name} is gone" for name in before if name not in now and not where.endswith(".parts")]
        return gone + [
            one for name in before if name in now for one in lost(before[name], now[name], f"{where}.{name}")
        ]
    if isinstance(before, list) and isinstance(now, list):
        return lost(before[0], now[0], f"{where}[0]") if before and now else []
    number = (int, float)
    alike = type(before) is type(now) or (type(before) in number and type(now) in number)
    return [] if alike or before is None else [f"{where} was {type(before).__name__} and is {type(now).__name__}"]
