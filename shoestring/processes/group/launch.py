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
from shoestring.core.files import temporary_folder
from shoestring.processes.group.fork_server import ForkServer
from shoestring.processes.group.rendezvous import Closed, Rendezvous, interface
from shoestring.processes.group.supervisor import LOOK, StoppedUnsaved, Supervisor
from shoestring.processes.messages import Closing
from shoestring.processes.signals import stopping_gently
from shoestring.processes.streams import standard_files
from shoestring.processes.task import R, Task
from shoestring.runs.event import Event, Failed
from shoestring.runs.events import note

PATIENCE = 30.0  # seconds without a heartbeat after which a worker counts as stuck
RESTARTS = 10  # times that a group is formed again


def run_group(
    task: Task[R],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None] = lambda event: None,
    lock: int | None = None,
    devices: int = 2,
    nodes: Rendezvous | None = None,
    patience: float = PATIENCE,
    restarts: int = RESTARTS,
    expected: Mapping[str, str] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> R:
    """Do a task in a group of `devices` workers here, and as many on each other machine of a rendezvous.

    The events of worker 0 go to `on_event`, its result comes back; of training, with how often the group was formed again. The workers
    hold the `lock` they are given. What ends the group is raised once, whoever met it. `expected` is the fingerprint that node 0 gave.
    `on_stop` is called when the group has been asked to stop. `clock` tells for how long a worker was silent.
    """
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise Mistake(
            f"--devices {devices}: this machine has {torch.cuda.device_count()} GPUs, and every worker needs one of its own"
        )
    rendezvous = nodes or Rendezvous()
    rendezvous.patience = patience
    with silent_agent(), standard_files(), temporary_folder() as private:
        supervisor = Supervisor(private, task, on_event, rendezvous, patience, restarts, expected, clock)
        server = ForkServer(group_environment(rendezvous, devices) | dict(environment), private, lock, task.room)
        spec = WorkerSpec(
            "worker",
            devices,
            rendezvous,
            monitor_interval=LOOK,
            max_restarts=sys.maxsize,
            entrypoint="shoestring.processes.group.worker",
        )
        return cast(R, supervised(supervisor, Agent(spec, supervisor, server), on_stop))


def supervised(supervisor: Supervisor, agent: Agent, on_stop: Callable[[], None]) -> Any:
    """Let the agent run the group until it is over; gives the result, and lets the other machines know how it ended."""
    closing = Closing(failure="node 0 ended")
    rendezvous = supervisor.rendezvous
    try:
        with stopping_gently(supervisor, supervisor.asked, on_stop) if supervisor.task.run_folder else nullcontext():
            agent.run()
        result = supervisor.result()
        closing = supervisor.task.closing(result)
        return result
    except Closed as error:  # node 0 said so, and this is another machine
        closing = error.closing
        if closing.failure:
            raise Mistake(closing.failure) from None
        return supervisor.task.stopped(closing.stopped)
    except StoppedUnsaved:
        closing = Closing(stopped=supervisor.saved)
        return supervisor.stopped()
    except (Mistake, Crashed) as error:
        closing = Closing(failure=str(error))
        if supervisor.folder is not None and rendezvous.leads:
            note(supervisor.folder, Failed(str(error)))
        raise
    finally:
        rendezvous.close(closing)
        supervisor.receiver.close()


def threads(devices: int) -> dict[str, str]:
    """The variable that gives each of so many workers here its share of the threads that one alone would have.

    That is torch's count, which heeds the user's own limit. Beside GPUs threads only feed them, and are not shared out.
    """
    return {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // devices))}


def group_environment(rendezvous: Rendezvous, devices: int) -> dict[str, str]:
    """Variables of every worker here: threads for its share of the cores, and the network interface that leads to the other machines.

    Gloo would ask for the machine's name, which often leads nowhere. Whether there are GPUs is to be asked without touching them.
    """
    found = interface(rendezvous.nodes.host, rendezvous.port)
    link = {"GLOO_SOCKET_IFNAME": found} if found else {}
    return threads(devices) | link | {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@contextmanager
def silent_agent() -> Iterator[None]:
    """While inside, torch's agent logs nothing: that is for people who develop it."""
    log, nowhere = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before, log.propagate = log.propagate, False
    log.addHandler(nowhere)
    try:
        yield
    finally:
        log.propagate = before
        log.removeHandler(nowhere)


class Agent(SimpleElasticAgent):
    """Torch's agent for workers that a fork server makes and a supervisor looks after."""

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
        if not rendezvous.leads:  # node 0 says when it is over
            rendezvous.check_closed()
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(codes))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """At once: a group that lost a worker has nothing to save."""
        self.server.end(worker.id for worker in worker_group.workers if worker.id is not None)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 1) -> None:
        self.server.close()

    def _exit_barrier(self) -> None:
        """Node 0 says that it is over, and nobody else has to."""

    def _construct_event(self, *values: Any, **more: Any) -> AgentEvent:
        """Torch's own asks the network for this machine's name every time, for a log that nobody reads."""
        return AgentEvent("worker", EventSource.AGENT)
