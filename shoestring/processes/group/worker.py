"""A worker of a group: one of several processes that do a task together. It talks to its launcher over a socket in a
folder.

It sends a heartbeat twice a second, so that a hanging process is noticed. The fork server starts it
(fork_server_main.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shoestring.core.errors import Mistake
from shoestring.core.running.signals import listen
from shoestring.processes.group.channel import PEER_LOST, Sender
from shoestring.processes.group.round import GroupRound, read_round
from shoestring.processes.launch import fingerprint
from shoestring.processes.messages import Answer, PeerLostMessage, WorkerJoined
from shoestring.processes.streams import prepare_streams
from shoestring.processes.task import GroupSeat, JobTask, Task
from shoestring.processes.worker import last_message, perform_task

if TYPE_CHECKING:
    from shoestring.core.workers.link import Link

PAUSE = 0.02


def main(private: Path) -> NoReturn:
    """Do the group's task; `private` is the folder in which the launcher wrote it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task, formed = read_round(private)
    prepare_streams()
    os.dup2(
        2 if rank == 0 else os.open(os.devnull, os.O_WRONLY), 1
    )  # only one worker prints, and never into the launcher's output
    if rank:
        listen(
            lambda number, frame: None
        )  # until training begins: afterwards worker 0 is asked to stop, and tells the others
    sender = Sender(private / "socket", rank)

    def work() -> Any:
        try:
            check_same(task, formed)
            link = join_group(task, formed, rank, world)
            sender.send(WorkerJoined())
            return perform_task(task, sender.send, link)
        except Exception as error:
            from shoestring.core.workers.link import DeadlinePassed

            if says_peer_lost(error):  # this worker has no error of its own: its launcher forms the group again
                sender.send(
                    PeerLostMessage(
                        (str(error).strip() or type(error).__name__).splitlines()[0], isinstance(error, DeadlinePassed)
                    )
                )
                leave(PEER_LOST)
            raise

    last = last_message(task, work)
    if isinstance(last, Answer):
        sender.send(last)
        leave(0)
    sender.send(replace(last, text=f"worker {rank} of {world}: {last.text}"))
    leave(1)


def leave(code: int) -> NoReturn:
    """Exit at once: a process group's threads may never end by themselves, and tidying up after torch takes longer than
    starting it."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_same(task: Task[Any], formed: GroupRound) -> None:
    """Refuse to train unless job and environment are those of worker 0."""
    if not isinstance(task, JobTask):
        return
    for name, own in fingerprint(task.file).items():
        expected = formed.fingerprint[name]
        if own != expected:
            what = (
                f"the job file {task.file} is not the one"
                if name == "job file"
                else f"{name} here is {own}, not the {expected}"
            )
            raise Mistake(f"{what} that the run was begun with: all workers need the same")


def join_group(task: Task[Any], formed: GroupRound, rank: int, world: int) -> Link:
    """The link to the others, once all are there."""
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    store = PrefixStore(
        f"round/{formed.number}/workers",
        TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=formed.join_seconds),
        ),
    )
    store.set(f"here/{rank}", "")
    wait_for_all(store, world, formed.join_seconds)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"] if formed.device is None else formed.device))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=formed.deadline),
    )
    return task.join(GroupSeat(rank, world, formed.near, formed.deadline))


def wait_for_all(store: Any, world: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    for other in range(world):
        while not store.check([f"here/{other}"]):
            if time.monotonic() > until:
                raise Mistake(
                    f"worker {other} of {world} did not join within {seconds:.0f} s: its machine may be too busy, or can't be "
                    f"reached; look there for what holds it up"
                )
            time.sleep(PAUSE)


def says_peer_lost(error: BaseException | None) -> bool:
    """Whether an error says that another worker can't be reached any more."""
    from torch import distributed

    from shoestring.core.workers.link import PeerLost

    while error is not None:
        if isinstance(error, (PeerLost, distributed.DistError)) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
