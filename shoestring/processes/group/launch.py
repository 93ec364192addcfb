"""A group of workers that train one job together: started, watched, and formed again when one of them dies. The launcher's side.

Torch's elastic agent gives out ranks, and restarts all workers when one ends badly. What is ours: workers are forked from a process that
has torch imported; one that ends is missed within a tenth of a second, one that stands still when its heartbeats stop; the others, who have
nothing to save, are killed at once instead of asked; an error that would come again is told once and ends the group; and a person reads
sentences instead of logs.

    worker 0  step step step          begun step step
    worker 1  step step x        ->   begun step step
    worker 2  step step step          begun step step
    launcher            died, all killed, formed again from the last checkpoint
"""
from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.events.api import Event, EventSource

from shoestring.core.errors import Mistake
from shoestring.core.files import temporary_folder
from shoestring.processes.group.fork_server import Stem
from shoestring.processes.group.rendezvous import Closed, Meeting, interface
from shoestring.processes.group.supervisor import LOOK, Crew, Stopped
from shoestring.processes.launch import Crashed, politely
from shoestring.runs.events import note

PATIENCE = 30.0    # seconds without a heartbeat after which a worker counts as stuck
RESTARTS = 10      # times that a group is formed again


def run_group(task: Mapping[str, Any], environment: Mapping[str, str], on_event: Callable[[dict[str, Any]], None] = lambda event: None,
              lock: int | None = None, devices: int = 2, nodes: Meeting | None = None, patience: float = PATIENCE,
              restarts: int = RESTARTS, on_stop: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do a task in a group of `devices` workers here, and as many on each other machine of a meeting.

    The events of worker 0 go to `on_event`, its result comes back with `world`, `restarts` and `recovery_seconds`. The workers hold the
    `lock` they are given. What ends the group is raised once, whoever met it.
    """
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise Mistake(f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs, and every worker needs one of its own")
    meeting = nodes or Meeting()
    meeting.patience = patience
    silenced()
    with temporary_folder() as place:
        crew = Crew(place, dict(task), on_event, meeting, patience, restarts)
        stem = Stem(surroundings(meeting, devices) | dict(environment), place, lock)
        spec = WorkerSpec("worker", devices, meeting, monitor_interval=LOOK, max_restarts=sys.maxsize,
                          entrypoint="shoestring.processes.group.worker")
        word: dict[str, Any] = {"event": "mistake", "text": "node 0 ended"}
        try:
            with politely(crew, crew.asked, on_stop) if "folder" in task else nullcontext():
                Agent(spec, crew, stem).run()
            result = crew.outcome()
            word = {"event": "stopped", "step": result["stopped"]} if "stopped" in result else {"event": "finished"}
            word = {"event": "mistake", "text": result["unsaved"]} if "unsaved" in result else word
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


def threads(devices: int) -> dict[str, str]:
    """The variable that gives each of so many workers here its share of the threads that one alone would have.

    That is torch's count, which heeds the user's own limit. Beside GPUs threads only feed them, and are not shared out.
    """
    return {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // devices))}


def surroundings(meeting: Meeting, devices: int) -> dict[str, str]:
    """Variables of every worker here: threads for its share of the cores, and the interface that leads to the other machines.

    Gloo would ask for the machine's name, which often leads nowhere. Whether there are GPUs is to be asked without touching them.
    """
    found = interface(meeting.nodes.host, meeting.port)
    link = {"GLOO_SOCKET_IFNAME": found} if found else {}
    return threads(devices) | link | {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def silenced() -> None:
    """What torch's agent logs is for people who develop it."""
    log = logging.getLogger("torch.distributed.elastic")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())


class Agent(SimpleElasticAgent):
    """Torch's agent for the workers of a crew, which grow from a stem."""

    def __init__(self, spec: WorkerSpec, crew: Crew, stem: Stem) -> None:
        super().__init__(spec)
        self.crew, self.stem = crew, stem

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        self.crew.starts([worker.global_rank for worker in workers], workers[0].world_size)
        return {worker.local_rank: self.stem.fork({
            "RANK": str(worker.global_rank), "WORLD_SIZE": str(worker.world_size), "LOCAL_RANK": str(worker.local_rank),
            "MASTER_ADDR": str(worker_group.master_addr), "MASTER_PORT": str(worker_group.master_port)}) for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.stem.listen()
        codes = {worker.global_rank: self.stem.code(worker.id) for worker in worker_group.workers}
        deaths = self.crew.missing(codes)
        done, meeting = self.crew.finished(codes), self.crew.meeting
        if deaths is None and None in codes.values():
            self.crew.make_room()
            return RunResult(WorkerState.HEALTHY)
        if deaths is not None:
            self._stop_workers(worker_group)
            if not done:
                self.crew.judge(deaths)
                return RunResult(WorkerState.FAILED)
        if meeting.paused:
            return RunResult(WorkerState.UNHEALTHY)
        if not meeting.leads:   # node 0 has the last word
            meeting.check_closed()
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(codes))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """At once: a group that lost a worker has nothing to save."""
        self.stem.end(worker.id for worker in worker_group.workers if worker.id is not None)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 1) -> None:
        self.stem.close()

    def _exit_barrier(self) -> None:
        """Node 0 says that it is over, and nobody else has to."""

    def _construct_event(self, *values: Any, **more: Any) -> Event:
        """Torch's own asks the network for this machine's name every time, for a log that nobody reads."""
        return Event("worker", EventSource.AGENT)
