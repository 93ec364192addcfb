"""How long a step of a pipeline takes, predicted and measured, of several plans; writes the second table of README.md.

    python benchmarks/pipeline/steps.py [rounds]

Every plan is trained by `shoestring train --json`, which predicts it first. The machine must be quiet. Figures are medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by steps.py -->\n", "<!-- end of steps.py -->\n"
WIDE = ["--width", "480", "--depth", "12", "--heads", "8"]
CASES: list[tuple[int, str, list[str]]] = [
    (2, "Pipeline(stages=2, pieces=4)", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=8, schedule='gpipe')", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=4, schedule='naive')", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=8, schedule='zero-bubble')", ["--batch", "32"]),
    (2, "Pipeline(stages=2, pieces=4, schedule='interleaved', chunks=2)", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=4, balance=(2, 6))", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=4) + Checkpoint(every=1)", ["--batch", "16"]),
    (2, "Pipeline(stages=2, pieces=8)", ["--batch", "16", *WIDE]),
    (2, "TensorParallel(ways=2)", ["--batch", "16", "--heads", "4"]),
    (4, "Pipeline(stages=2, pieces=4) + DataParallel()", ["--batch", "32"]),
]
STEPS = 12
KEPT = README.with_name("steps.json")


def step(devices: int, plan: str, flags: list[str]) -> tuple[float, float]:
    """Seconds, predicted and measured."""
    uses = [word for one in plan.split(" + ") for word in ("--use", one)]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "shoestring",
                "train",
                "gpt",
                "--devices",
                str(devices),
                *flags,
                *uses,
                "--json",
                "--steps",
                str(STEPS),
                "--run",
                f"{place}/run",
            ],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{plan}: {done.stderr.strip()[-500:]}")
    told = json.loads(done.stdout)
    return told["predicted"]["step_seconds"], told["measured"]["step_seconds"]


def main(rounds: int = 3) -> None:
    """Rows that are done are kept until all are, so that a run which was stopped goes on."""
    kept: dict[str, list[Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for devices, plan, flags in CASES:
        key = f"{devices} {plan} {' '.join(flags)} {rounds}"
        if key not in kept:
            found = [step(devices, plan, flags) for _ in range(rounds)]
            predicted, measured = (median(one) for one in zip(*found, strict=True))
            each = [two / one - 1 for one, two in found]
            row = (
                f"| {devices} | `{plan}` | `{' '.join(flags)}` | {predicted:.3f} s | {measured:.3f} s | {median(each):+.1%} "
                f"({', '.join(f'{one:+.1%}' for one in each)}) |"
            )
            kept[key] = [row, median(each)]
            KEPT.write_text(json.dumps(kept))
            print(row, flush=True)
    offs = [off for _, off in kept.values()]
    rows = [
        "| workers | plan | flags of `gpt` | predicted | measured | off by |",
        "|---|---|---|---|---|---|",
        *(row for row, _ in kept.values()),
        "",
        f"{sum(abs(one) <= 0.15 for one in offs)} of {len(offs)} are within 15 % in the median of {rounds} rounds of {STEPS} steps; "
        f"the worst is off by {max(offs, key=abs):+.1%}.",
        "",
    ]
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + "\n".join(rows) + END + rest.partition(END)[2])
    KEPT.unlink()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
