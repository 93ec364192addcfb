"""A round: the time from forming a group of workers until one of them ends. What a launcher tells its workers about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.files.codec import from_json, to_json
from shoestring.processes.task import Task, read_task, task_text
from shoestring.runs.request import Request

NAME = "round.json"  # the file in the group's private folder


@dataclass(frozen=True)
class GroupRound:
    number: int  # number of rounds before it
    fingerprint: Mapping[str, str]  # must be the same for every worker: launch.fingerprint of the job file
    join_seconds: float  # time for all workers to find each other
    deadline: float  # longest wait for other workers, in seconds
    near: bool  # all workers are on this machine and share memory
    device: int | None = None  # the GPU of this machine's worker, if somebody else assigned it


def write_round(folder: Path, task: Task[Any], of: GroupRound) -> None:
    (folder / NAME).write_text(json.dumps({"task": task_text(task), "round": to_json(of)}), encoding="utf-8")


def read_round(folder: Path) -> tuple[Task[Any], GroupRound]:
    data = json.loads((folder / NAME).read_bytes())
    return read_task(data["task"]), from_json(GroupRound, data["round"])


@dataclass(frozen=True)
class Invitation:
    """Node 0's message to the other machines: the task, and what every worker must have."""

    task: str  # as written by `task_text`
    request: Request
    fingerprint: Mapping[str, str]
