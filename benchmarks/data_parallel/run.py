"""Two workers of one thread against one, ours and other people's, in one run; writes the table of README.md.

    python benchmarks/data_parallel/run.py [rounds]

In a round each has one turn: it trains the gpt job for some steps in processes of its own. A ratio is the median over the rounds of two
turns of the same round, a turn being its median step without the first ones. The machine must be quiet.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
STEPS, WARM = 24, 6
ONE, OURS = "ours, one worker", "ours, DataParallel"
CONTENDERS = {
    ONE: ("ours", 1, ("FusedOptimizer()",)),
    OURS: ("ours", 2, ("FusedOptimizer()", "DataParallel()")),
    "torch, one process": ("plain", 1, ()),
    "torch, two that do not talk": ("plain", 2, ()),
    "torch DDP, by hand": ("ddp", 2, ()),
    "Accelerate": ("accelerate", 2, ()),
    "DeepSpeed ZeRO 2": ("deepspeed", 2, ()),
    "ours, Shard(stage=2)": ("ours", 2, ("FusedOptimizer()", "Shard(stage=2)")),
    "ours, Shard(stage=3)": ("ours", 2, ("FusedOptimizer()", "Shard(stage=3)")),
}


def turn(kind: str, workers: int, techniques: tuple[str, ...]) -> dict[str, Any]:
    """Seconds a step, and for ours what was predicted; or why there is nothing."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            words = [part for one in techniques for part in ("--use", one)]
            command = [
                sys.executable,
                "-m",
                "shoestring",
                "train",
                "gpt",
                "--steps",
                str(STEPS),
                "--devices",
                str(workers),
                *words,
                "--run",
                f"{folder}/run",
                "--save-every",
                "1h",
                "--json",
            ]
        else:
            script = [str(Path(__file__).with_name("peers.py")), kind, str(STEPS)]
            command = (
                [sys.executable, *script]
                if workers == 1
                else [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(workers),
                    *script,
                ]
            )
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
        if kind == "ours" and done.returncode == 0:
            report = json.loads(done.stdout)
            events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
            times = [event["seconds"] for event in events if event["event"] == "step"]
            return {"seconds": median(times[WARM:]), "report": report}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:150]}
    return {"seconds": median(json.loads(lines[0].removeprefix("RESULT "))["seconds"][WARM:])}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if not any("failed" in one for one in found[name]):
                found[name].append(turn(*CONTENDERS[name]))
                print(name, found[name][-1].get("seconds", found[name][-1].get("failed")), flush=True)
    README.write_text(written(README.read_text(), found))


def ratio(found: dict[str, list[dict[str, Any]]], one: str, other: str) -> float:
    """How many times the speed of `other` that of `one` is."""
    return median(b["seconds"] / a["seconds"] for a, b in zip(found[one], found[other], strict=True))


def written(text: str, found: dict[str, list[dict[str, Any]]]) -> str:
    rows = ["| | workers | a step | speed of one worker of ours | of torch DDP |", "|---|---|---|---|---|"]
    for name, turns in found.items():
        if any("failed" in one for one in turns):
            rows.append(f"| {name} | {CONTENDERS[name][1]} | {turns[-1].get('failed')} | | |")
            continue
        step = median(one["seconds"] for one in turns)
        rows.append(
            f"| {name} | {CONTENDERS[name][1]} | {step:.3f} s | {ratio(found, name, ONE):.2f} | "
            f"{ratio(found, name, 'torch DDP, by hand'):.2f} |"
        )
    rows += [
        "",
        "| ours | a step, predicted | measured | bytes sent, predicted | measured | process, predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, turns in found.items():
        if CONTENDERS[name][0] == "ours" and CONTENDERS[name][1] > 1 and "report" in turns[-1]:
            for one in turns:
                plan, seen = one["report"]["predicted"], one["report"]["measured"]
                rows.append(
                    f"| {name} | {plan['step_seconds']:.3f} s | {seen['step_seconds']:.3f} s "
                    f"({plan['step_seconds'] / seen['step_seconds'] - 1:+.1%}) | {plan['sent_bytes']:,.0f} | "
                    f"{seen['sent_bytes']:,} | {plan['process_bytes'] / 2**20:.0f} MiB | {seen['process_bytes'] / 2**20:.0f} MiB "
                    f"({plan['process_bytes'] / seen['process_bytes'] - 1:+.1%}) |"
                )
    packages = ", ".join(f"{name} {known(name)}" for name in ("torch", "accelerate", "deepspeed"))
    rows += [
        "",
        f"{len(found[ONE])} rounds of {STEPS} steps; {packages}; {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, one thread a worker.",
    ]
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n".join(rows) + "\n" + END + rest.partition(END)[2]


def known(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
