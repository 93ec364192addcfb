"""Early exits, a cascade and adaptive computation time: latency against quality, on Fashion-MNIST and on parity.

    OMP_NUM_THREADS=1 python benchmarks/compress/exits.py [--quick | --steps 200 | --table] [--folder FOLDER]

Trains (fixed seed, one thread, some minutes), calibrates thresholds on 8,000 training images that were held out, and answers the 10,000
test images in batches of 32: with the model without exits and with those that leave, turn by turn, batch by batch. Results go to
exits.json, the curve to exits.png, the tables to docs/exits.md (--table: from what is in exits.json). Trained weights are not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from shoestring import Job, train
from shoestring.compression.exits import (
    AdaptiveRecurrent,
    Cascade,
    ExitEvidence,
    Pondered,
    calibrate,
    exit_job,
    gather_evidence,
    operate,
    ponder_job,
    seconds_by_part,
)
from shoestring.core.running import random_state

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "exits.md"
BEGIN, END = "<!-- results: what stands here is written by benchmarks/compress/exits.py -->", "<!-- end of results -->"
sys.path.insert(0, str(HERE.parent / "federated"))
from fashion import FOLDER, fashion  # noqa: E402

AFTER = (1, 2, 4)
LIMITS = (0.0, 0.0025, 0.005, 0.01, 0.02)  # of accuracy
BATCH = 32
BITS, WIDTH, MOST, TAU = 8, 12, 10, 0.06  # of parity


class Residual(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.work = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.work(x))


def large(width: int = 24) -> nn.Module:
    """Seven residual blocks, two of them on 14 x 14 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width),
        Residual(width, width),
        Residual(width, 2 * width, 2),
        *(Residual(2 * width, 2 * width) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def small(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 10),
    )


def image_job(make: Any, data: Any) -> Job:
    return Job(
        model=make,
        data=lambda: data,
        batch=128,
        epochs=2,
        seed=0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.02),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1),
    )


def trained(job: Job, steps: int | None = None) -> tuple[Any, float]:
    """The model after the job, and the seconds it took."""
    random_state.seed(job.seed)
    model, begin = job.model(), perf_counter()
    for _ in train(job, (), model, steps=steps):
        pass
    return model.eval(), perf_counter() - begin


def batches(data: Any, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    images, labels = data[:]
    return list(zip(images.split(size), labels.split(size), strict=True))


@torch.no_grad()
def turn_by_turn(plain: nn.Module, early: Any, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Accuracy and seconds of both on the same batches, in turns; shares of rows by exit."""
    seconds: dict[str, list[float]] = {"plain": [], "early": []}
    right, exits = {"plain": 0, "early": 0}, []
    for number, (images, labels) in enumerate(data):
        for name in ("plain", "early") if number % 2 else ("early", "plain"):
            begin = perf_counter()
            output = plain(images) if name == "plain" else early.answer(images)
            seconds[name].append(perf_counter() - begin)
            if name == "early":
                exits.append(output.exits)
                output = output.output
            right[name] += int((output.argmax(1) == labels).sum())
    rows = sum(len(labels) for _, labels in data)
    shares = torch.bincount(torch.cat(exits), minlength=len(early.thresholds) + 1) / rows
    quantiles = {name: statistics.quantiles(times, n=100) for name, times in seconds.items()}
    return {
        "rows": rows,
        "plain_accuracy": right["plain"] / rows,
        "quality": right["early"] / rows,
        "loss": (right["plain"] - right["early"]) / rows,
        "shares": shares.tolist(),
        "speedup": sum(seconds["plain"]) / sum(seconds["early"]),
        **{f"{name}_ms_p{at}": 1e3 * quantiles[name][at - 1] for name in seconds for at in (50, 99)},
    }


def curve(model: Any, plain: nn.Module, held_out: Any, test: Any, rounds: int) -> list[dict[str, Any]]:
    """Of every limit: what was predicted from held-out rows, and what came out on test rows."""
    data, labels = batches(test), lambda batch: batch[1]
    costs = seconds_by_part(model, data[0], rounds)
    evidence: ExitEvidence = gather_evidence(model, batches(held_out, 256), costs, labels)
    found = []
    for limit, delta in (*((limit, None) for limit in LIMITS), (0.005, 0.1)):
        chosen = calibrate(evidence, limit, delta)
        model.thresholds.copy_(torch.tensor(chosen.point.thresholds))
        found.append(
            {
                "limit": limit,
                "delta": delta,
                "bound": chosen.bound,
                "predicted": asdict(chosen.point),
                "measured": turn_by_turn(plain, model, data),
            }
        )
    unseen = gather_evidence(model, batches(test, 256), costs, labels)
    for one in found:  # the same thresholds on test rows, by arithmetic: what the real passage must agree with
        one["by_arithmetic"] = asdict(operate(unseen, one["predicted"]["thresholds"]))
    return found


class Parity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ponder, self.answer = AdaptiveRecurrent(BITS, WIDTH, "rnn", max_steps=MOST, bias=-1.0), nn.Linear(WIDTH, 1)

    def forward(self, bits: Tensor) -> Pondered:
        return self.ponder(bits[:, None]).map(lambda states: self.answer(states[:, 0])[:, 0])


def parity_rows(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors with a random number of +-1, then zeros; whether the number of +1 is odd; how many are not zero (Graves 2016, 3.1)."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, BITS + 1, (rows,), generator=random)
    bits = torch.randint(0, 2, (rows, BITS), generator=random) * 2.0 - 1
    bits = bits * (torch.arange(BITS) < lengths[:, None])
    return bits, ((bits == 1).sum(1) % 2).float(), lengths


def parity(steps: int) -> dict[str, Any]:
    """Steps that pondering networks take, by the length of what they are to count; of three seeds."""
    bits, odd, _ = parity_rows(128 * 400, 1)
    test_bits, test_odd, lengths = parity_rows(4000, 2)
    found: dict[str, Any] = {"tau": TAU, "training_steps": steps, "lengths": list(range(1, BITS + 1)), "networks": []}
    for seed in range(3):
        plain = Job(
            model=Parity,
            data=lambda: TensorDataset(bits, odd),
            batch=128,
            steps=steps,
            seed=seed,
            clip=1.0,
            loss=lambda output, batch: nn.functional.binary_cross_entropy_with_logits(output, batch[1]),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        )
        model, _ = trained(ponder_job(plain, TAU))
        with torch.no_grad():
            output = model(test_bits)
        right, taken = ((output.value > 0) == (test_odd > 0)).float(), output.steps[:, 0].float()
        found["networks"].append(
            {
                "accuracy": float(right.mean()),
                "correlation": float(torch.corrcoef(torch.stack((lengths.float(), taken)))[0, 1]),
                "steps": [float(taken[lengths == one].mean()) for one in found["lengths"]],
                "cell_calls": int(taken.sum()),
                "cell_calls_masked": int(taken.max()) * len(taken),
            }
        )
    return found


def measured(folder: str, quick: bool, steps: int | None) -> dict[str, Any]:
    whole, test = fashion(folder, "train"), fashion(folder, "t10k")
    order = torch.randperm(60000, generator=torch.Generator().manual_seed(0))
    training, held_out = Subset(whole, order[:52000].tolist()), whole[order[52000:]]
    if quick:
        test = TensorDataset(*test[:640])
    data = {"held_out": TensorDataset(*held_out), "test": test, "rounds": 3 if quick else 30}
    with_exits, exit_seconds = trained(exit_job(image_job(large, training), AFTER), steps)
    alone, alone_seconds = trained(image_job(large, training), steps)
    little, little_seconds = trained(image_job(small, training), steps)
    early = with_exits.early()
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "after": AFTER,
        "blocks": len(early.names),
        "training_steps": steps or "2 epochs",
        "load_average": os.getloadavg(),
        "training_seconds": {"with exits": exit_seconds, "without": alone_seconds, "small": little_seconds},
        "exits": curve(early, early.model, **data),
        "cascade": curve(Cascade([little, alone]).eval(), alone, **data),
        "parity": parity(50 if quick else 1500),
    }


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"


def table(results: dict[str, Any]) -> str:
    lines, length = [], str(results["training_steps"]).removesuffix(" epochs")
    length += " epochs" if length != str(results["training_steps"]) else " steps"
    for kind, title in (
        ("exits", f"early exits after blocks {', '.join(map(str, results['after']))} of {results['blocks']}"),
        ("cascade", "cascade of a small and the large model"),
    ):
        plain = results[kind][0]["measured"]
        lines += [
            f"Fashion-MNIST, {title}, trained {length}; without: accuracy {plain['plain_accuracy']:.4f}, "
            f"{plain['plain_ms_p50']:.2f} ms a batch of {results['batch']} (p50)\n",
            "| allowed loss (points) | loss predicted | loss on test | rows by exit predicted | on test | speed-up predicted | "
            "measured | p50 ms | p99 ms |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for one in results[kind]:
            told, seen = one["predicted"], one["measured"]
            limit = f"{100 * one['limit']:.2f}" + (f", with probability {1 - one['delta']:.0%}" if one["delta"] else "")
            shares = [" / ".join(f"{share:.0%}" for share in which["shares"]) for which in (told, seen)]
            lines.append(
                f"| {limit} | {100 * told['loss']:+.2f} | {100 * seen['loss']:+.2f} | {shares[0]} | {shares[1]} | "
                f"{told['speedup']:.2f} | {seen['speedup']:.2f} | {seen['early_ms_p50']:.2f} | {seen['early_ms_p99']:.2f} |"
            )
        lines.append("")
    found = results["parity"]
    lines += [
        f"Steps by adaptive computation time for the parity of 1 to {BITS} bits, {found['training_steps']} training steps, "
        f"tau {found['tau']}\n",
        f"| network | accuracy | {' | '.join(f'{one} bits' for one in found['lengths'])} | correlation with bits | "
        f"calls of the cell, of masked |",
        "|---" * (len(found["lengths"]) + 4) + "|",
    ]
    for seed, one in enumerate(found["networks"]):
        lines.append(
            f"| seed {seed} | {one['accuracy']:.3f} | {' | '.join(f'{value:.2f}' for value in one['steps'])} | "
            f"{one['correlation']:.2f} | {one['cell_calls'] / one['cell_calls_masked']:.0%} |"
        )
    lines += ["", f"Measured on {results['machine']}, one thread, load average {results['load_average'][0]:.1f}."]
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for kind, mark in (("exits", "o-"), ("cascade", "s-")):
        seen = sorted(
            (one["measured"] for one in results[kind] if not one["delta"]), key=lambda one: one["early_ms_p50"]
        )
        left.plot([one["early_ms_p50"] for one in seen], [100 * one["quality"] for one in seen], mark, label=kind)
        left.plot(
            seen[0]["plain_ms_p50"],
            100 * seen[0]["plain_accuracy"],
            mark[0],
            color="black",
            fillstyle="none",
            label=f"without ({kind})",
        )
    left.set(xlabel=f"ms a batch of {results['batch']}, p50", ylabel="accuracy on test, %", title="Fashion-MNIST")
    left.legend(fontsize=8)
    for seed, one in enumerate(results["parity"]["networks"]):
        right.plot(results["parity"]["lengths"], one["steps"], "o-", label=f"seed {seed}")
    right.legend(fontsize=8)
    right.set(xlabel="bits", ylabel="steps, mean", title="parity by adaptive computation time", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--quick", action="store_true", help="a try: a few steps, nothing is kept")
    asked.add_argument("--folder", default=FOLDER)
    asked.add_argument("--steps", type=int, help="of each training on images (default: two epochs)")
    asked.add_argument("--table", action="store_true", help="measure nothing; plot and tables from exits.json")
    given = asked.parse_args()
    torch.set_num_threads(1)
    kept = HERE / "exits.json"
    results = (
        json.loads(kept.read_text())
        if given.table
        else measured(given.folder, given.quick, 5 if given.quick else given.steps)
    )
    print(table(results))
    if not given.quick:
        kept.write_text(json.dumps(results, indent=1) + "\n")
        plot(results, HERE / "exits.png")
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
