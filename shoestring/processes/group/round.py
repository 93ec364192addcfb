"""A round: from the moment when a group of workers is formed until one of them ends. What a launcher tells its workers of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.codec import from_json, to_json
from shoestring.processes.task import Task, read_task, written_task
from shoestring.runs.request import Request

NAME = "round.json"  # in the group's private folder


@dataclass(frozen=True)
class GroupRound:
    number: int  # how many were before
    fingerprint: Mapping[str, str]  # what every worker must have: launch.fingerprint of the job file
    join_seconds: float  # in which all workers must have found each other
    deadline: float  # seconds that a wait for other workers may take
    near: bool  # all workers are on this machine, and share memory
    device: int | None = None  # the GPU of this machine's worker, where somebody else gave it one


def write_round(folder: Path, task: Task[Any], of: GroupRound) -> None:
    (folder / NAME).write_text(json.dumps({"task": written_task(task), "round": to_json(of)}), encoding="utf-8")


def read_round(folder: Path) -> tuple[Task[Any], GroupRound]:
    data = json.loads((folder / NAME).read_bytes())
    return read_task(data["task"]), from_json(GroupRound, data["round"])


@dataclass(frozen=True)
class Invitation:
    """What node 0 gives the other machines: what to do, what was asked for, and what every worker must have."""

    task: str  # as `written_task` writes it
    request: Request
    fingerprint: Mapping[str, str]
