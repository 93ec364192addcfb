"""A group of workers that train one job: started, watched, and restarted when one of them dies. This is the launcher's
side.

Torch's elastic agent assigns ranks, and restarts all workers when one fails. We add: workers are forked from a process
that has imported torch; an ended worker is noticed within a tenth of a second, and a hanging one when its heartbeats
stop; the other workers, who have nothing to save, are killed at once; an error that would happen again is reported once
and ends the group; and users read sentences instead of logs.

    worker 0  step step step          begun step step
    worker 1  step step x        ->   begun step step
    worker 2  step step step          begun step step
    launcher            died, all killed, restarted from the last checkpoint
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event as AgentEvent
from torch.distributed.elastic.events.api import EventSource

from shoestring.core.errors import Crashed, Mistake
from shoestring.core.files.files import temporary_folder
from shoestring.processes.group.fork_server import ForkServer
from shoestring.processes.group.rendezvous import Closed, Rendezvous
from shoestring.processes.group.store import interface
from shoestring.processes.group.supervisor import LOOK, StoppedUnsaved, Supervisor
from shoestring.processes.messages import Closing
from shoestring.processes.nodes import Team
from shoestring.processes.signals import stopping_gently
from shoestring.processes.streams import standard_files
from shoestring.processes.task import R, Task
from shoestring.runs.events.event import Event, Failed
from shoestring.runs.events.event_log import note


def run_group(
    task: Task[R],
    environment: Mapping[str, str],
    workers: Team,
    on_event: Callable[[Event], None] = lambda event: None,
    lock: int | None = None,
    rendezvous: Rendezvous | None = None,
    expected: Mapping[str, str] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> R:
    """Do a task in a group of workers here, and as many on each other machine of a rendezvous.

    Worker 0's events go to `on_event`, and its result is returned; a training's with the number of restarts. Workers
    hold the `lock` they are given. An error that ends the group is raised once, whichever worker met it. `expected`:
    the fingerprint given by node 0. `on_stop`: called when the group was asked to stop. `clock`: used to tell how long
    a worker was silent.
    """
    devices, rendezvous = workers.devices, rendezvous or Rendezvous()
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise Mistake(
            f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs, and every worker needs one of its own"
        )
    rendezvous.patience = workers.patience
    with silent_agent(), standard_files(), temporary_folder() as private:
        supervisor = Supervisor(private, task, on_event, rendezvous, workers, expected, clock)
        server = ForkServer(group_environment(rendezvous, devices) | dict(environment), private, lock, task.room)
        spec = WorkerSpec(
            "worker",
            devices,
            rendezvous,
            monitor_interval=LOOK,
            max_restarts=sys.maxsize,
            entrypoint="shoestring.processes.group.worker",
        )
        return cast(R, run_supervised(supervisor, Agent(spec, supervisor, server), on_stop))


def run_supervised(supervisor: Supervisor, agent: Agent, on_stop: Callable[[], None]) -> Any:
    """Let the agent run the group to its end; returns the result, and tells the other machines how it ended."""
    closing = Closing(failure="node 0 ended")
    rendezvous = supervisor.rendezvous
    try:
        with stopping_gently(supervisor, supervisor.asked, on_stop) if supervisor.task.run_folder else nullcontext():
            agent.run()
        result = supervisor.result()
        closing = supervisor.task.closing(result)
        return result
    except Closed as error:  # this is another machine, and node 0 ended the group
        closing = error.closing
        if closing.failure:
            raise Mistake(closing.failure) from None
        return supervisor.task.stop_result(closing.stopped)
    except StoppedUnsaved:
        closing = Closing(stopped=supervisor.saved)
        return supervisor.stop_result()
    except (Mistake, Crashed) as error:
        closing = Closing(failure=str(error))
        if supervisor.folder is not None and rendezvous.leads:
            note(supervisor.folder, Failed(str(error)))
        raise
    finally:
        rendezvous.close(closing)
        supervisor.receiver.close()


def threads(devices: int) -> dict[str, str]:
    """The environment variable that divides this machine's threads among its workers.

    The total is torch's own count, which respects the user's limit. Beside GPUs, threads only feed them and are not
    divided.
    """
    return {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // devices))}


def group_environment(rendezvous: Rendezvous, devices: int) -> dict[str, str]:
    """Environment of every worker here: its number of threads, and the network interface that leads to the other
    machines.

    Gloo would resolve the machine's name, which often fails. Whether there are GPUs must be asked without initialising
    them.
    """
    found = interface(rendezvous.nodes.host, rendezvous.port)
    link = {"GLOO_SOCKET_IFNAME": found} if found else {}
    return threads(devices) | link | {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@contextmanager
def silent_agent() -> Iterator[None]:
    """While inside, torch's agent logs nothing."""
    log, nowhere = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, log.propagate = log.propagate, False
    log.addHandler(nowhere)
    try:
        yield
    finally:
        log.propagate = before
        log.removeHandler(nowhere)


class Agent(SimpleElasticAgent):
    """Torch's elastic agent, with workers from a fork server and a supervisor that watches them."""

    def __init__(self, spec: WorkerSpec, supervisor: Supervisor, server: ForkServer) -> None:
        super().__init__(spec)
        self.supervisor, self.server = supervisor, server

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        self.supervisor.begin_round([worker.global_rank for worker in workers], workers[0].world_size)
        return {
            worker.local_rank: self.server.fork(
                {
                    "RANK": str(worker.global_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "LOCAL_RANK": str(worker.local_rank),
                    "MASTER_ADDR": str(worker_group.master_addr),
                    "MASTER_PORT": str(worker_group.master_port),
                }
            )
            for worker in workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.server.listen()
        codes = {worker.global_rank: self.server.code(worker.id) for worker in worker_group.workers}
        deaths = self.supervisor.missing(codes)
        finished, rendezvous = self.supervisor.finished(codes), self.supervisor.rendezvous
        if deaths is None and None in codes.values():
            self.supervisor.make_room()
            return RunResult(WorkerState.HEALTHY)
        if deaths is not None:
            self._stop_workers(worker_group)
            if not finished:
                self.supervisor.judge(deaths)
                return RunResult(WorkerState.FAILED)
        if rendezvous.paused:
            return RunResult(WorkerState.UNHEALTHY)
        if not rendezvous.leads:  # node 0 decides when it is over
            rendezvous.check_closed()
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(codes))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """At once: a group that lost a worker has nothing to save."""
        self.server.end(worker.id for worker in worker_group.workers if worker.id is not None)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 1) -> None:
        self.server.close()

    def _exit_barrier(self) -> None:
        """Only node 0 announces the end."""

    def _construct_event(self, *values: Any, **more: Any) -> AgentEvent:
        """Torch's version resolves this machine's name each time, for a log that nobody reads."""
        return AgentEvent("worker", EventSource.AGENT)
