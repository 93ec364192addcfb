"""shoestring doctor: inspects this machine and measures it anew."""

from __future__ import annotations

import sys

from shoestring.core.command_line.exit_codes import DONE
from shoestring.core.errors import Mistake
from shoestring.show.output import say, screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call
    from shoestring.core.costs.hardware import Hardware
    from shoestring.training.options import DoctorCommand


def run(asked: DoctorCommand, call: Call) -> int:
    import json
    from dataclasses import asdict
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Mistake("torch is not installed: pip install torch, in the build for your CPU or GPU")
    from shoestring.measure.probe import cached_hardware, combine_measurements, remember
    from shoestring.processes.launch import run_worker
    from shoestring.show.terminal import table
    from shoestring.training.execution.tasks import DoctorTask

    say(call, "measuring this machine …")
    found = combine_measurements(cached_hardware(), run_worker(DoctorTask(), {}))
    remember(found)
    if call.json:
        print(json.dumps(asdict(found) | {"missing": missing()}))
    else:
        print(
            table(
                [["what", "found"], *rows(found), *(["missing", text] for text in missing())], screen=screen(sys.stdout)
            )
        )
    return DONE


def missing() -> list[str]:
    """Optional packages that are missing, and what they are needed for."""
    from shoestring.core.command_line.extras import EXTRAS
    from shoestring.training.memory.allocator import LIBRARIES, library

    libraries = [
        f"{one}: Debian's lib{one}2 or lib{one}2.0 gives the allocator another choice"
        for one in LIBRARIES
        if not library(one)
    ]
    return libraries + [extra.refusal for extra in EXTRAS.values() if extra.refusal]


def rows(found: Hardware) -> list[list[str]]:
    """The findings as rows of a table."""
    import time

    from shoestring.core.units import bytes_text
    from shoestring.measure.probe import QUIET

    again = "; the machine was busy, so it will be measured again when it is quieter" if found.busy > QUIET else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.when))
    variables = ", ".join(f"{one}={value}" for one, value in found.environment.items())
    return [
        ["device", f"{found.device}: {found.name}, {found.cores} threads"],
        ["memory", bytes_text(found.memory)],
        ["torch", found.torch],
        ["matrix products", f"{found.flops / 1e9:.0f} GFLOP/s in float32"],
        ["disk", f"{bytes_text(found.disk)}/s, written and read back"],
        ["disk, direct", f"{bytes_text(found.direct)}/s past the page cache" if found.direct else "no direct I/O here"],
        [
            "fresh memory",
            f"{found.fault * 2**30:.2f} s per GiB in small pages, {found.huge_fault * 2**30:.2f} in huge ones",
        ],
        *([f"dtype {one}", what or "works"] for one, what in found.dtypes.items()),
        [
            "measured",
            f"{when}, the best of {found.tries} tries; others had {found.busy:.0%} of the cores in the quietest{again}",
        ],
        *([["workers start with", variables]] if variables else []),
    ]
