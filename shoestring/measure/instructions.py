"""Which dtypes this processor can compute in, and the cap on oneDNN's instructions that makes it possible.

Some CPUs advertise instructions that they can't run (AMX, in some virtual machines): a process that multiplies matrices
in bf16 or int8 then dies of SIGILL. Only trying tells, and only a process that may die can try:

    a process of ours       Every dtype is tried in a fresh child, without and with caps, and the results are cached. Workers are
                            started with the cap in their environment.
    the caller's process    oneDNN reads the cap once, when it first inspects the processor: at the first matrix product of any
                            dtype. Before that, setting the variable helps, although torch is imported; afterwards nothing does. A
                            fork of the process finds out which is the case: its oneDNN is initialised if the parent's is.

Nothing here imports torch before it is needed.

Contract: Whoever computes in 16 bits asks here first, in a process of ours or in the caller's: some CPUs raise SIGILL
on bf16 that they report as supported (tests/measure/test_instructions.py).
"""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.measure.cache import cache_folder, read_cached, write_cached

VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAPS = ("AVX512_CORE_FP16", "AVX2")  # caps in the order in which they are tried if something fails without
TRIALS = {
    "fp32": "a = torch.randn(64, 64); (a @ a).sum().item()",
    "bf16": "a = torch.randn(64, 64).bfloat16().requires_grad_(); (a @ a).sum().backward(); torch.nn.functional.conv2d("
    "torch.randn(2, 16, 8, 8).bfloat16().requires_grad_(), torch.randn(16, 16, 3, 3).bfloat16()).sum().backward()",
    "fp16": "a = torch.randn(64, 64).half().requires_grad_(); (a @ a).sum().backward(); torch.nn.functional.conv2d("
    "torch.randn(2, 16, 8, 8).half().requires_grad_(), torch.randn(16, 16, 3, 3).half()).sum().backward()",
    "int8": "a = torch.randint(-9, 9, (64, 64), dtype=torch.int8); torch._int_mm(a, a).sum().item()",
}
IMPORT = "import torch"
NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"  # an expected crash leaves no core dump
PATIENCE = 120.0  # seconds for a fresh process, which imports torch
FORKED = 30.0  # seconds for a fork, in which torch is imported

SET: dict[str, str] = {}  # variables that this process set in its own environment

Outcome = dict[str, str]  # dtype -> "" if it works, else what happened


@dataclass(frozen=True)
class Outcomes:
    """The cached results."""

    machine: str  # from `machine_key`
    outcomes: dict[str, Outcome]  # by cap


def doubtful() -> bool:
    """Whether the processor advertises instructions that it may not be able to run."""
    return any(flag.startswith("amx") for flag in flags())


def flags() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    return tuple(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def try_dtypes(dtypes: tuple[str, ...], cap: str) -> Outcome:
    """The results of computing in these dtypes in fresh processes, under a cap ("": none)."""
    outcome: Outcome = {}
    while left := [dtype for dtype in dtypes if dtype not in outcome]:
        code = "\n".join([NO_CORE, IMPORT, *(f"{TRIALS[dtype]}\nprint({dtype!r}, flush=True)" for dtype in left)])
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | (
            {VARIABLE: cap} if cap else {}
        )
        try:
            child = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                check=False,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return outcome | dict.fromkeys(left, f"it was not done after {PATIENCE:.0f} s")
        done = child.stdout.split()
        outcome |= dict.fromkeys(done, "")
        if len(done) < len(left):  # the process died of the next one
            outcome[left[len(done)]] = ending(child.returncode, child.stderr)
    return outcome


def ending(code: int, said: str = "") -> str:
    if code < 0:
        return f"the process died with {signal.Signals(-code).name}"
    return said.strip().splitlines()[-1] if said.strip() else f"exit code {code}"


def working_dtypes() -> tuple[Outcome, dict[str, str]]:
    """The result for each dtype, and the environment for it: the first cap under which most dtypes work."""
    asked = (
        "" if VARIABLE in SET else os.environ.get(VARIABLE, "")
    )  # a cap set by the user: respected as long as everything works under it
    path, key = outcomes_file(), machine_key()
    kept = read_cached(path, Outcomes)
    known = (
        {cap: one for cap, one in kept.outcomes.items() if one.keys() == TRIALS.keys()}
        if kept and kept.machine == key
        else {}
    )
    fresh = False
    found: dict[str, Outcome] = {}
    for cap in dict.fromkeys((asked, *CAPS)):
        if cap not in known:
            known[cap], fresh = try_dtypes(tuple(TRIALS), cap), True
        found[cap] = known[cap]
        if not any(known[cap].values()):
            break
    if fresh:
        write_cached(path, Outcomes(key, known))
    best = min(found, key=lambda cap: sum(map(bool, found[cap].values())))  # the first of equals
    return found[best], {} if best == asked else {VARIABLE: best}


def outcomes_file() -> Path:
    return cache_folder() / f"dtypes-{platform.node()}-{torch_version()}.json"


def torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def machine_key() -> str:
    """Identifies the processor. Two with the same name and flags can differ in what they can run, so a new boot is
    tried again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return sha256(" ".join((boot, platform.machine(), *flags())).encode()).hexdigest()


def cap() -> dict[str, str]:
    """Environment that a process needs on this machine before its first matrix product; mostly empty."""
    return working_dtypes()[1] if doubtful() else {}


def cap_this_process() -> None:
    """Set the cap in this process, which helps if it has not multiplied matrices yet, and for its child processes."""
    SET.update(cap())
    os.environ.update(SET)


@cache
def deadly(dtype: str) -> str:
    """Why products in a dtype would crash this process; empty if they would not. Sets a cap on instructions if that
    still helps."""
    if not doubtful():
        return ""
    if how := working_dtypes()[0][dtype]:
        return f"{dtype} products do not work on this machine, under no cap on instructions ({how}; shoestring doctor tells)"
    cap_this_process()
    how = try_in_fork(dtype)
    return how and too_late(dtype, how)


def require(dtype: str) -> None:
    """Refuse to compute in a dtype that would crash this process."""
    if why := deadly(dtype):
        raise Mistake(why)


def too_late(dtype: str, how: str) -> str:
    return (
        f"{dtype} can't be computed in this process ({how} when a copy of it tried): the processor advertises instructions that it "
        f"can't run, and this process has multiplied matrices before torch could be kept from them. Start Python with "
        f"{VARIABLE}={os.environ.get(VARIABLE, CAPS[0])} in its environment, or train in a worker process: write a job file and give "
        f"it to shoestring train"
    )


def try_in_fork(dtype: str) -> str:
    """How a fork of this process died when it computed in a dtype; empty if it lived."""
    import torch

    from shoestring.core.private import without_modes

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # other threads may be running: the child uses nothing that needs them
        child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            exec(NO_CORE)
            torch.set_num_threads(1)  # the parent's threads do not exist here
            with without_modes():  # a rehearsal may be active
                multiply_in(dtype)
            code = 0
        finally:
            os._exit(code)  # an exception is no crash: the real computation will raise it too
    until = time.monotonic() + FORKED
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return ending(code) if code < 0 else ""
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"nothing was done in {FORKED:.0f} s"


def multiply_in(dtype: str) -> None:
    """Matrix products in a dtype, without autograd, whose threads a fork may not have."""
    import torch

    from shoestring.core.private import int8_product

    if dtype == "int8":
        bytes_ = torch.randint(-9, 9, (64, 64), dtype=torch.int8)
        int8_product(bytes_, bytes_)
        return
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with torch.no_grad():
        left = torch.randn(64, 64).to(kind)
        torch.nn.functional.linear(left @ left, left)
        torch.nn.functional.conv2d(torch.randn(2, 16, 8, 8).to(kind), torch.randn(16, 16, 3, 3).to(kind))
