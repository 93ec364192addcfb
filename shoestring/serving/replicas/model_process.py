"""The model process: it loads a model once and forks replicas, which share its weights. It computes nothing itself.

    front    -> {"load": "module:function", "arguments": {...}}          first, once
             <- {"loaded": facts} or {"failed": text}
    front    -> {"fork": number} with one end of a socket pair           at any time
             <- {"ended": pid, "code": code}                             when a replica ended

One JSON message is one packet of the control socket. The process ends with the front; its replicas too (replica.py), and outlive this
process, so that requests are answered while another one loads.

The function comes from our own front over a private socket, and is what its caller passed (`ModelSpec.load`): no file says it.
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
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from shoestring.core.errors import reason_text
from shoestring.core.running.signals import STOP
from shoestring.processes.group.fork_server_main import die_with, reap, set_process_name
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.replicas.facts import EngineFacts, facts_of

MOST_MESSAGE = 1 << 17  # bytes of a control message


def main() -> None:
    control, front, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    die_with(front)
    set_process_name("serve model")
    for number in STOP:  # the front decides when to end; a service manager signals everybody
        signal.signal(number, signal.SIG_IGN)
    engine = loaded_engine(control)
    gc.collect()
    gc.freeze()  # replicas do not look through what is there now, and so do not write to it
    fork_replicas(control, alive, engine)


def loaded_engine(control: socket.socket) -> ServingEngine:
    import torch

    torch.set_num_threads(1)  # a forked process can't use its parent's threads
    before = resident()
    try:
        asked = json.loads(control.recv(MOST_MESSAGE) or b"null")
        if asked is None:
            os._exit(0)
        engine: ServingEngine = function_named(asked["load"])(**asked["arguments"])
        facts: EngineFacts = facts_of(engine, max(resident() - before, 0))
    except Exception as error:
        traceback.print_exc()
        tell(control, {"failed": reason_text(error)})
        os._exit(1)
    tell(control, {"loaded": facts.to_json()})
    return engine


def function_named(name: str) -> Callable[..., ServingEngine]:
    module, _, qualified = name.partition(":")
    found: Any = import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def resident() -> int:
    """Bytes of this process in memory, shared ones included."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tell(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode()[:MOST_MESSAGE])
    except ConnectionError:  # the front is gone
        os._exit(0)


def fork_replicas(control: socket.socket, alive: int, engine: ServingEngine) -> NoReturn:
    """Fork a replica whenever the front asks for one, and say which ended."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken)
    while True:
        ready = select.select([control.fileno(), waking], [], [])[0]
        if control.fileno() in ready:
            data, files, _, _ = socket.recv_fds(control, MOST_MESSAGE, 1)
            if not data:
                os._exit(0)
            line = socket.socket(fileno=files[0])
            if os.fork() == 0:
                become_replica(line, alive, engine, [control.detach(), waking, woken], json.loads(data)["fork"])
            line.close()  # ours: the front hears of a replica's end because nobody else has its line
        if waking in ready:
            os.read(waking, 1 << 12)
        for pid, code in reap():
            tell(control, {"ended": pid, "code": code})


def become_replica(line: socket.socket, alive: int, engine: ServingEngine, others: list[int], number: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file in others:
        os.close(file)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 0)  # the parent's wish to die with its parent is not inherited; this says so
    set_process_name(f"serve replica {number}")
    from shoestring.serving.replicas.replica import be_replica

    try:
        be_replica(line, alive, engine)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
