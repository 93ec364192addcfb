"""A group of workers that train one job together: started, watched, and formed again when one of them dies. The launcher's side.

Torch's elastic agent starts the processes and restarts them all when one ends badly. What is ours: a worker is missed within a tenth
of a second, or when its heartbeats stop; the others, who have nothing to save, are killed at once instead of asked; an error that
would come again is told once and ends the group; and a person reads sentences instead of logs.

    worker 0  step step step          begun step step
    worker 1  step step x        ->   begun step step
    worker 2  step step step          begun step step
    launcher            died, all killed, formed again from the last checkpoint
"""
from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from shoestring.core.errors import Mistake
from shoestring.crew import LOOK, Crew, Processes, Stopped
from shoestring.launch import Crashed, politely
from shoestring.meeting import Closed, Meeting, interface
from shoestring.runs.events import note

PATIENCE = 30.0    # seconds without a heartbeat after which a worker counts as stuck
RESTARTS = 10      # times that a group is formed again


def run_group(task: Mapping[str, Any], environment: Mapping[str, str], on_event: Callable[[dict[str, Any]], None] = lambda event: None,
              lock: int | None = None, devices: int = 2, nodes: Meeting | None = None, patience: float = PATIENCE,
              restarts: int = RESTARTS) -> dict[str, Any]:
    """Do a task in a group of `devices` workers here, and as many on each other machine of a meeting.

    The events of worker 0 go to `on_event`, its result comes back with `world`, `restarts` and `recovery_seconds`. The workers hold the
    `lock` they are given. What ends the group is raised once, whoever met it.
    """
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise Mistake(f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs, and every worker needs one of its own")
    meeting = nodes or Meeting()
    meeting.patience = patience
    silenced()
    with tempfile.TemporaryDirectory(prefix="shoestring-") as place:
        crew = Crew(Path(place), dict(task), on_event, lock, meeting, patience, restarts)
        placed = torch.cuda.is_available() or meeting.nodes.device is not None   # by somebody who has seen to threads too
        threads = {} if placed else {"OMP_NUM_THREADS": str(max(1, cores() // devices))}
        given = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | threads | linked(meeting) | dict(environment)
        spec = WorkerSpec(
            "worker", devices, meeting, monitor_interval=LOOK, max_restarts=sys.maxsize,
            entrypoint="env",   # becomes the worker; torch's agent has no other way to give it an environment
            args=(*(f"{name}={value}" for name, value in given.items()), sys.executable, "-m", "shoestring.member", place))
        word: dict[str, Any] = {"event": "mistake", "text": "node 0 ended"}
        try:
            with politely(crew, crew.asked) if "folder" in task else nullcontext():
                Agent(spec, crew).run()
            result = crew.outcome()
            word = {"event": "stopped", "step": result["stopped"]} if "stopped" in result else {"event": "finished"}
            return result
        except Closed as error:
            word = error.word
            return followed(word)
        except Stopped:
            word = {"event": "stopped", "step": crew.saved}
            return crew.stopped()
        except (Mistake, Crashed) as error:
            word = {"event": "mistake", "text": str(error)}
            if "folder" in task and meeting.leads:
                note(Path(task["folder"]), "failed", text=str(error))
            raise
        finally:
            meeting.close(word)
            crew.ears.close()


def followed(word: Mapping[str, Any]) -> dict[str, Any]:
    """How it ended for a machine that does not lead."""
    if word.get("event") == "mistake":
        raise Mistake(str(word["text"]))
    return {"event": "result", "followed": True} | ({"stopped": word["step"]} if word.get("event") == "stopped" else {})


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def linked(meeting: Meeting) -> dict[str, str]:
    """Which network interface gloo uses; it would ask the machine's name, which often leads nowhere."""
    found = interface(meeting.nodes.host, meeting.port)
    return {"GLOO_SOCKET_IFNAME": found} if found else {}


def silenced() -> None:
    """What torch's agent logs is for people who develop it."""
    log = logging.getLogger("torch.distributed.elastic")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())


class Agent(LocalElasticAgent):
    """Torch's agent for the workers of a crew."""

    def __init__(self, spec: WorkerSpec, crew: Crew) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(crew.place / "logs")), exit_barrier_timeout=crew.patience)
        self.crew = crew

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        self.crew.starts([worker.global_rank for worker in workers], workers[0].world_size)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.getsignal(number) for number in numbers}
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)   # which puts its own handlers in place of ours
            return pids
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers: Any = getattr(self._pcontext, "subprocess_handlers")   # noqa: B009 (known to a subclass only)
        processes = {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
        deaths = self.crew.missing(processes)
        done, meeting = self.crew.finished(processes), self.crew.meeting
        if deaths is not None:
            end(processes)
            if not done:
                self.crew.judge(deaths)
        elif any(process.poll() is None for process in processes.values()):
            self.crew.make_room()
            return RunResult(state=WorkerState.HEALTHY)
        elif not meeting.leads and not meeting.paused:   # node 0 has the last word
            meeting.check_closed()
            return RunResult(state=WorkerState.HEALTHY)
        found = super()._monitor_workers(worker_group)   # now that all are gone, so that it has nothing to wait for
        if meeting.paused:
            return RunResult(state=WorkerState.UNHEALTHY)
        return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(processes)) if done and meeting.leads else found

    def _exit_barrier(self) -> None:
        """Node 0 says that it is over, and nobody else has to."""

    def _construct_event(self, *values: Any, **more: Any) -> Event:
        """Torch's own asks the network for this machine's name every time, for a log that nobody reads."""
        return Event("worker", EventSource.AGENT)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 1) -> None:
        super()._shutdown(signal.SIGKILL, 1)


def end(processes: Processes) -> None:
    """Kill workers, with all they started."""
    for process in processes.values():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes.values():
        with suppress(TimeoutExpired):
            process.wait(5)
