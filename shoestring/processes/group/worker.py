"""A worker of a group: one of several processes that do a task together. It speaks to its launcher over a socket in a folder.

It beats twice a second, so that a process that stands still is missed. It is forked from the stem (stem.py).
"""
from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from shoestring.core.errors import Mistake
from shoestring.processes.group.channel import CASUALTY, Voice
from shoestring.processes.launch import fingerprint
from shoestring.processes.worker import TASKS, last_word

PAUSE = 0.02


def main(place: Path) -> NoReturn:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = json.loads((place / "task.json").read_text())
    os.dup2(2 if rank == 0 else os.open(os.devnull, os.O_WRONLY), 1)   # one worker prints, and never into the launcher's output
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)   # worker 0 is asked to stop, and tells the others
    voice = Voice(place / "socket", rank)

    def work() -> dict[str, Any]:
        try:
            check_same(task)
            link = joined(task, rank, world)
            voice.send({"event": "joined"})
            return TASKS[task["task"]](task, voice.send, link)
        except Exception as error:
            if lost(error):
                fall(error, voice)
            raise

    last = last_word(task, work)
    if last["event"] == "result":
        voice.send(last)
        leave(0)
    voice.send(last | {"text": f"worker {rank} of {world}: {last['text']}"})
    leave(1)


def leave(code: int) -> NoReturn:
    """End at once: a process group's threads may never end by themselves, and tidying up after torch takes longer than starting it."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_same(task: Mapping[str, Any]) -> None:
    """Refuse to train something else than worker 0 does."""
    for name, own in fingerprint(task["file"]).items():
        expected = task["fingerprint"][name]
        if own != expected:
            what = f"the job file {task['file']} is not the one" if name == "job file" else f"{name} here is {own}, not the {expected}"
            raise Mistake(f"{what} that the run was begun with: all workers need the same")


def joined(task: Mapping[str, Any], rank: int, world: int) -> Any:
    """The link to the others, when all are there."""
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    from shoestring.parallel import shared_memory_link as near

    store = PrefixStore(f"round/{task['round']}/workers", TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=task["join"])))
    store.set(f"here/{rank}", "")
    wait_for_all(store, world, task["join"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"] if task["device"] is None else task["device"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world,
                                   timeout=timedelta(seconds=task["deadline"]))
    return near.joined(rank, world, task["near"], task["deadline"])


def wait_for_all(store: Any, world: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    for other in range(world):
        while not store.check([f"here/{other}"]):
            if time.monotonic() > until:
                raise Mistake(f"worker {other} of {world} did not join within {seconds:.0f} s: its machine may be too busy, or can't be "
                              f"reached; look there for what holds it up")
            time.sleep(PAUSE)


def fall(error: Exception, voice: Voice) -> NoReturn:
    """A worker that lost another one has nothing to say of its own: it ends, and its launcher forms the group again."""
    voice.send({"event": "lost", "text": (str(error).strip() or type(error).__name__).splitlines()[0]})
    leave(CASUALTY)


def lost(error: BaseException | None) -> bool:
    """Whether an error says that another worker can't be reached any more."""
    from torch import distributed

    from shoestring.core.link import PeerLost

    while error is not None:
        if isinstance(error, (PeerLost, distributed.DistError)) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

