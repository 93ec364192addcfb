"""A model in two stages against one process, ours and other people's, in one run; writes the tables of README.md.

    python benchmarks/pipeline/run.py [rounds] [small]

In a round each has one turn: it trains the gpt job for some steps in processes of its own, one thread each. A ratio is the median over the
rounds of two turns of the same round, a turn being its median step without the first ones. The machine must be quiet. `small` only shows
that everything runs: what it writes means nothing, so it writes nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from worker import Settings, as_text

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
ONE, APART, OURS = "one process", "two that do not talk, each with all of the job", "ours, 1f1b"
FEW = "one process, the batch in as many pieces"
CONTENDERS = {  # kind, workers, schedules of ours
    ONE: ("plain", 1, ()),
    APART: ("apart", 2, ()),
    OURS: ("ours", 2, (("1f1b", 1),)),
    "ours, gpipe": ("ours", 2, (("gpipe", 1),)),
    "ours, zero-bubble": ("ours", 2, (("zero-bubble", 1),)),
    "torch.distributed.pipelining, ScheduleGPipe": ("torch-gpipe", 2, ()),
    "torch.distributed.pipelining, Schedule1F1B": ("torch-1f1b", 2, ()),
    "torchgpipe": ("torchgpipe", 1, ()),
    FEW: ("in pieces", 1, ()),
}
SMALL_PIECES = (ONE, FEW, APART, OURS, "torch.distributed.pipelining, Schedule1F1B")  # who is tried with those too
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))


def turn(kind: str, workers: int, settings: Settings) -> Any:
    """What the first worker measured; a text says why there is nothing."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = str(Path(__file__).with_name("worker.py"))
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, worker, kind, str(rank), str(workers), f"{folder}/store", as_text(settings)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(workers)
        ]
        try:
            told = [process.communicate(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
    lines = [line for line in told[0][0].splitlines() if line.startswith("RESULT ")]
    if not lines:
        return (told[0][1].strip().splitlines() or ["no output"])[-1][:150]
    return json.loads(lines[0].removeprefix("RESULT "))


def planned_cut(settings: Settings) -> int:
    """Blocks of the first stage, as the planner cuts the job for two workers."""
    from shoestring.core.costs.hardware import Hardware
    from shoestring.jobs.gpt import job
    from shoestring.training.pipeline.pipeline import Pipeline
    from shoestring.training.planning.planner import Planner

    ledger = Planner(
        job(settings.width, settings.depth, 5, settings.context, settings.batch), Hardware(), inexact=True, devices=2
    ).ledger()
    found = [one for one in Pipeline.choices(ledger) if one.stages == 2 and one.chunks == 1 and one.balance]
    return found[0].balance[0] if found else settings.depth // 2


def main() -> None:
    small = "small" in sys.argv
    rounds = next((int(word) for word in sys.argv[1:] if word.isdigit()), 3)
    base = Settings(width=80, depth=4, context=32, batch=8, pieces=4, steps=3, warm=1, cut=2) if small else Settings()
    base = replace(base, cut=planned_cut(base))
    found = compared(base, tuple(CONTENDERS), rounds)
    short = replace(base, context=base.context * 3 // 4, batch=base.batch // 2)
    little = compared(short, SMALL_PIECES, rounds)
    equal = replace(base, width=64 if small else 384, depth=4, cut=2, artificial=True, schedules=SCHEDULES)
    idle = {"equal stages": turn("ours", 2, equal), "gpt": turn("ours", 2, replace(base, schedules=SCHEDULES))}
    cuts = turn("ours", 2, replace(base, cuts=tuple(range(1, base.depth))))
    print(idle, cuts, sep="\n")
    text = tables(base, found, idle, cuts) + smaller(short, little)
    print(text)
    if not small:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(before + BEGIN + text + END + rest.partition(END)[2])


def compared(base: Settings, names: tuple[str, ...], rounds: int) -> dict[str, list[Any]]:
    """Of each, the seconds of a step in every round, or why there are none."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            kind, workers, schedules = CONTENDERS[name]
            told = turn(kind, workers, replace(base, schedules=schedules))
            found[name].append(told[0]["seconds"] if isinstance(told, list) else told)
            print(name, found[name][-1], flush=True)
    return found


def speeds(base: Settings, found: dict[str, list[Any]]) -> list[str]:
    rows = ["| | processes | a step | speed of one process |", "|---|---|---|---|"]
    for name, turns in found.items():
        failed = next((one for one in turns if isinstance(one, str)), "")
        if failed:
            rows.append(f"| {name} | {CONTENDERS[name][1]} | {failed} | |")
            continue
        times = " (together 2 jobs)" if name == APART else ""
        rows.append(f"| {name} | {CONTENDERS[name][1]} | {median(turns):.3f} s{times} | {speed(found, name):.2f} |")
    asked = 0.95 * base.pieces / (base.pieces + 1) * speed(found, APART)
    return [
        *rows,
        "",
        f"Asked: at least 0.95 x {base.pieces}/{base.pieces + 1} x {speed(found, APART):.2f} = {asked:.2f} times one "
        f"process. Reached with 1f1b: {speed(found, OURS):.2f}.",
        "",
    ]


def smaller(base: Settings, found: dict[str, list[Any]]) -> str:
    return "\n".join(
        [
            "",
            f"**Smaller pieces**, {base.batch // base.pieces} samples of {base.context} tokens. Here a batch in pieces is slower than "
            f"a batch at once, whoever computes it: every piece adds its gradients to those of all weights.",
            "",
            *speeds(base, found),
        ]
    )


def tables(base: Settings, found: dict[str, list[Any]], idle: dict[str, Any], cuts: Any) -> str:
    rows = speeds(base, found)
    rows += ["| idle share | schedule | formula | measured | a step |", "|---|---|---|---|---|"]
    for what, told in idle.items():
        rows += (
            [
                f"| {what} | {one['schedule']} | {one['formula']:.1%} | {one['idle']:.1%} ({100 * (one['idle'] - one['formula']):+.1f}) "
                f"| {one['seconds']:.3f} s |"
                for one in told
            ]
            if isinstance(told, list)
            else [f"| {what} | {told} | | | |"]
        )
    rows += ["", "| cut of gpt | a step |", "|---|---|"]
    if isinstance(cuts, list):
        rows += [
            f"| {one['balance'][0]} + {one['balance'][1]}{', the planner' + chr(39) + 's' if one['balance'][0] == base.cut else ''} | "
            f"{one['seconds']:.3f} s |"
            for one in cuts
        ]
    packages = ", ".join(f"{name} {known(name)}" for name in ("torch", "torchgpipe"))
    rows += [
        "",
        f"{len(found[ONE])} rounds of {base.steps} steps of {base.batch} samples of {base.context} tokens in {base.pieces} "
        f"pieces, width {base.width}, {base.depth} blocks; {packages}; {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, one thread a process.",
        "",
    ]
    return "\n".join(rows)


def speed(found: dict[str, list[Any]], name: str) -> float:
    """How many times that of one process; of two that do not talk, both together."""
    jobs = 2 if name == APART else 1
    return median(jobs * one / other for one, other in zip(found[ONE], found[name], strict=True))


def known(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
