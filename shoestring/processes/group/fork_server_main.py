"""The fork server's process: imports what workers need, and forks one whenever its launcher asks.

It does nothing else, so workers inherit only its memory: no threads, no process group, no GPU.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from shoestring.core.rooms import room_named
from shoestring.processes.group import worker


def main() -> None:
    line, launcher, private = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    die_with(launcher)
    prepare(sys.argv[4])
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken)
    server, half = os.getpid(), b""

    def tell(pid: int, code: int | None) -> None:
        line.sendall(json.dumps([pid, code]).encode() + b"\n")

    while True:
        ready = select.select([line.fileno(), waking], [], [])[0]
        if line.fileno() in ready:
            data = line.recv(1 << 16)
            if not data:
                os._exit(0)  # the workers end with it
            *lines, half = (half + data).split(b"\n")
            for environment in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for file in (line.detach(), waking, woken):
                        os.close(file)
                    become_worker(environment, private, server)
                tell(pid, None)
        if waking in ready:
            os.read(waking, 1 << 16)
        for pid, code in reap():
            tell(pid, code)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def prepare(room: str) -> None:
    for name in room_named(room).preloaded:
        import_module(name)
    gc.collect()
    gc.freeze()  # the garbage collector ignores what exists now, so shared pages are not written to


def reap() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def become_worker(environment: dict[str, str], private: Path, server: int) -> NoReturn:
    """In a fork: become a worker with these variables; never returns."""
    die_with(server)
    os.setsid()
    set_process_name(f"shoestring {environment['RANK']}")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    try:
        worker.main(private)
    except SystemExit:  # raised by the job itself
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def set_process_name(name: str) -> None:
    """Set the process name shown by `ps` and `top`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME


if __name__ == "__main__":
    main()
