"""A million declared clients beside a thousand: the time until the first round begins, and the memory of the process.

    python benchmarks/federated/million.py

Run as a job file (`shoestring federate benchmarks/federated/million.py --devices 1000000`) it is the job that is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoestring import Job, Local, Numbered

HERE = Path(__file__).parent


def records(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(20, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def job(devices: int = 1000) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        data=lambda: records(0),
        clients=lambda: Numbered(devices, records),
        local=Local(batch=10, lr=0.1),
    )


def measured(devices: int) -> dict[str, Any]:
    """From the start of a cold process."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "shoestring",
                "federate",
                __file__,
                "--devices",
                str(devices),
                "--per-round",
                "50",
                "--rounds",
                "5",
                "--run",
                f"{folder}/run",
                "--json",
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    first = {
        kind: next(one["time"] for one in events if one["event"] == kind) - begun for kind in ("planning", "begun")
    }
    return {
        "devices": devices,
        "imports": first["planning"],
        "start": first["begun"],
        "bytes": json.loads(done.stdout)["measured"]["process_bytes"],
    }


if __name__ == "__main__":
    from tables import inserted, machine

    measured(1000)  # what is cold on disk is warm for both
    rows = [measured(devices) for devices in (1000, 1_000_000)]
    few, many = rows
    lines = [
        "",
        "| clients | until planning begins (imports) | until the first round begins | largest process |",
        "|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['devices']:,} | {row['imports']:.2f} s | {row['start']:.2f} s | {row['bytes'] / 1e6:.0f} MB |"
        for row in rows
    ]
    lines += [
        "",
        f"A million clients take {many['start'] - few['start']:+.2f} s and {(many['bytes'] - few['bytes']) / 1e6:+.1f} MB. "
        f"Measured on {machine()}.",
        "",
    ]
    inserted(HERE / "README.md", "million", "python benchmarks/federated/million.py", "\n".join(lines))
    print(json.dumps(rows))
