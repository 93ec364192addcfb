"""What a group is given is what it was planned with: threads, and workers on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoestring.core.command_line.command import Call
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.processes.group.launch import group_environment, threads
from shoestring.processes.group.rendezvous import Rendezvous
from shoestring.processes.nodes import Nodes
from shoestring.runs.folder import Folder
from shoestring.runs.request import Request
from shoestring.training.commands import run_plan
from shoestring.training.execution import job_planning
from shoestring.training.options import WorkerOptions
from shoestring.training.planning.plan import training_plan


@pytest.mark.parametrize(("count", "devices", "each"), [(6, 2, "3"), (6, 4, "1"), (1, 3, "1"), (8, 1, "8")])
def test_threads_of_a_worker_are_the_same_when_planning_and_when_training(
    count: int, devices: int, each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)  # as the user limits them
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))  # of cores there are more
    assert threads(devices) == {"OMP_NUM_THREADS": each}
    assert group_environment(Rendezvous(Nodes("127.0.0.1", 0, 0, 1)), devices)["OMP_NUM_THREADS"] == each
    names = [f"{max(devices, 2)} {where}" for where in ("near", "far")]
    machine = Hardware(
        cores=count,
        links=dict.fromkeys(names, (1e-09, 0.0001, 0.0)),
        sums={name: {"library": [(1e-9, 1e-4, 0)], "ring": [(1e-9, 1e-4, 0)]} for name in names},
    )
    planned = job_planning.in_group(machine, 2 * devices, devices)
    assert planned.environment["OMP_NUM_THREADS"] == each and planned.cores == int(each)


def test_planning_again_after_memory_ran_out_knows_how_many_workers_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def plan(*given: Any, **named: Any) -> Any:
        asked.update(named)
        raise Mistake("enough")

    monkeypatch.setattr(job_planning, "plan_job", plan)
    workers = WorkerOptions(devices=3, nodes="10.0.0.1:29400,0/4").team({})
    call = Call("train", json=True)
    held = SimpleNamespace(folder=Folder(tmp_path), request=Request(job="job.py", memory=2**30))
    said = run_plan.after_memory_ran_out(
        call, workers, None, held, training_plan(process_bytes=2**29), "memory ran out"
    )  # type: ignore[arg-type]
    assert (asked["devices"], asked["here"]) == (12, 3) and "led to nothing: enough" in said
