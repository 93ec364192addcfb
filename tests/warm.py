"""A Python that is warm: it looks like `sys.executable`, and what it starts is forked from a process that has imported torch already.

A cold interpreter with torch costs three to four seconds of a core, and one `shoestring train` starts several. `python()` is a small
program to be used in place of `sys.executable` by tests that assert bits, messages, exit codes or JSON:

    test -> python() -m shoestring train ...  --socket-->  server (torch imported)  --fork-->  minder  --fork-->  the command
                                                                                                the command's workers: the same way

It hands its arguments, folder, environment and open files over, passes signals on, and ends as the command ended. Killed, it takes the
command with it. Within the command `sys.executable` is that program too, so workers are forked likewise. A program after `-c` is run warm
if its first line is `# warm`. Other uses (other modules, a preloaded library, limits of its own) run in the ordinary interpreter.

Not for tests of a process's bytes or of what is imported when: there a process must be real. Settings of malloc have no effect here.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

FORK_SERVER = "shoestring.processes.group.fork_server_main"
MODEL_PROCESS = "shoestring.serving.replicas.model_process"
MODULES = (
    "shoestring",
    "shoestring.processes.worker",
    FORK_SERVER,
    MODEL_PROCESS,
    "tests.training.pipeline.trying",
)  # what is started warm
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # passed on
KINDS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
)  # limits that make a process cold

# The program. It imports little, so it is there in some 20 ms; 32 bytes of a message's length come first.
PROGRAM = r"""#!{real} -IS
import array, json, os, resource, signal, socket, sys
words = sys.argv[1:]
limits = [resource.getrlimit(kind) for kind in {kinds!r}]
warm = words[:1] == ["-m"] and words[1] in {modules!r} or words[:1] == ["-c"] and words[1].startswith("# warm\n")
if not warm or "LD_PRELOAD" in os.environ or limits != {limits!r}:
    os.execv({real!r}, [{real!r}, *words])
files = [0, 1, 2]
for name in os.listdir("/proc/self/fd"):
    try:
        if int(name) > 2 and os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:
        pass
line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
line.connect({address!r})
ignored = [number for number in {signals!r} if signal.getsignal(number) == signal.SIG_IGN]
for number in {signals!r}:
    signal.signal(number, lambda number, frame: line.sendall(bytes([number])))
task = json.dumps(dict(words=words, folder=os.getcwd(), environment=dict(os.environ), files=files, ignored=ignored,
                       group=os.getpgrp() == os.getpid())).encode()
socket.send_fds(line, [f"{{len(task):32d}}".encode()], files)
line.sendall(task)
for file in files[3:]:
    os.close(file)
answer = line.recv(8)
code = int(answer) if answer else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """The path of the warm Python of this test process; its server starts with the first use and ends with us."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    address, program = str(folder / "socket"), folder / "python"
    program.write_text(
        PROGRAM.format(
            real=sys.executable,
            modules=MODULES,
            address=address,
            signals=tuple(map(int, SIGNALS)),
            kinds=KINDS,
            limits=[resource.getrlimit(kind) for kind in KINDS],
        )
    )
    program.chmod(0o700)
    root = str(Path(__file__).parents[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", address, str(program)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None, "the pipe was asked for"
    server.stdout.readline()  # it listens

    def end() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return str(program)


def serve(address: str, program: str) -> None:
    """Fork a minder for every command, until our parent is gone."""
    from shoestring.processes.group.fork_server_main import prepare

    prepare("training")
    import tests.training.pipeline.trying  # noqa: F401
    from tests.machine import believe_what_is_kept

    believe_what_is_kept()

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders are not waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                return
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                mind(line, program)
            line.close()


def mind(line: socket.socket, program: str) -> NoReturn:
    """Start a command, pass signals on to it, and tell how it ended. Where nobody listens any more, kill it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(line, 32, 64)
    task = b""
    while len(task) < int(head):
        task += line.recv(int(head) - len(task))
    child = os.fork()
    if child == 0:
        line.close()
        command(json.loads(task), list(files), program)
    for file in files:
        os.close(file)
    for file in (0, 1, 2):
        os.close(file)
    ended = os.pidfd_open(child)
    while True:
        ready = select.select([ended, line], [], [])[0]
        if ended in ready:
            break
        numbers = line.recv(16)
        for number in numbers or (signal.SIGKILL,):
            os.kill(child, number)
        if not numbers:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        line.sendall(str(code).encode())
    finally:
        os._exit(0)


def command(task: dict[str, Any], given: list[int], program: str) -> NoReturn:
    """Be a process that was started with these words, files and variables."""
    os.setsid() if task["group"] else None
    spare = 1 + max((*given, *task["files"]))
    high = array.array("i")
    for file in given:  # out of the way of the numbers that they are to have
        os.dup2(file, spare)
        high.append(spare)
        os.close(file)
        spare += 1
    for file, number in zip(high, task["files"], strict=True):
        os.dup2(file, number, inheritable=number <= 2)
        os.close(file)
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.executable = program
    sys.path[0] = task["folder"]
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in task["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    threads = task["environment"].get("OMP_NUM_THREADS")
    if threads:
        import torch

        torch.set_num_threads(int(threads))
    code = 1
    try:
        run(*task["words"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(kind: str, what: str, *words: str) -> None:
    """Be `python -m what ...` or `python -c what ...`."""
    if kind == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *words], types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
        return
    sys.argv = [what, *words]
    if what in (FORK_SERVER, MODEL_PROCESS):  # it ends with its launcher, which for it is the minder
        sys.argv[2] = str(os.getppid())
    runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
