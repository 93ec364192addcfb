"""Four ways to sparse weights, as in "The State of Sparsity": Fashion-MNIST, an MLP, the same steps for all, three seeds.

    python benchmarks/compress/sparsity.py [--quick] [--processes 2]

What was measured is kept in sparsity.json and not measured again: delete it to begin anew. From it come the table that is printed, the
plot sparsity.png and whether the paper's conclusion holds here: magnitudes are as good as or better than L0 gates and variational dropout,
and random masks are far worse. The rates of the gates and the gain of the steering, which are the techniques' defaults, were chosen for
this task (seed 0, shares 0.9 and 0.98), in favour of L0 and variational dropout; nothing was tuned for magnitudes.

Gale, Elsen, Hooker 2019, The State of Sparsity in Deep Neural Networks, arXiv 1902.09574.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shoestring
from shoestring import Job
from shoestring.training.sparse.l0 import L0
from shoestring.training.sparse.magnitude_prune import MagnitudePrune
from shoestring.training.sparse.random_prune import RandomPrune
from shoestring.training.sparse.variational_dropout import VariationalDropout
from shoestring.training.technique import TrainingTechnique

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "federated"))
from fashion import FOLDER, fashion, mlp  # type: ignore[import-not-found]  # noqa: E402

KEPT, PLOT = HERE / "sparsity.json", HERE / "sparsity.png"
SHARES = (0.5, 0.8, 0.9, 0.95, 0.98)
METHODS: dict[str, Callable[[float], TrainingTechnique]] = {  # what a line is called -> its technique for a share
    "magnitude": lambda share: MagnitudePrune(share=share),
    "magnitude, each layer": lambda share: MagnitudePrune(share=share, scope="layer"),
    "random": lambda share: RandomPrune(share=share),
    "l0": lambda share: L0(share=share),
    "variational": lambda share: VariationalDropout(share=share),
}
COMPLEX = ("l0", "variational")
SEEDS, STEPS, BATCH, WIDTH, RATE = (0, 1, 2), 1200, 100, 100, 1e-3
FAR = 3.0  # standard errors of a difference from which on it is called one


def job(seed: int, steps: int) -> Job:
    images, classes = fashion(FOLDER, "train").tensors

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(images), generator=draws).split(BATCH):
                yield images[chosen], classes[chosen]

    return Job(
        model=lambda: mlp(WIDTH),
        data=batches,
        steps=steps,
        seed=seed,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=RATE),
        schedule=lambda optimizer, steps: LambdaLR(optimizer, lambda step: min(1.0, (1 - step / steps) / 0.3)),
    )


def trained(made: Job, techniques: tuple[TrainingTechnique, ...] = ()) -> nn.Module:
    torch.manual_seed(made.seed)
    model = made.model()
    for _ in shoestring.train(made, techniques, model):
        pass
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    images, classes = fashion(FOLDER, "t10k").tensors
    return float((model.eval()(images).argmax(1) == classes).float().mean())


def measured(name: str, share: float, seed: int, steps: int) -> dict[str, Any]:
    """One training."""
    torch.set_num_threads(1)
    told = {"method": name, "share": share, "seed": seed, "steps": steps}
    if name == "dense":
        return {**told, "accuracy": accuracy(trained(job(seed, steps)))}
    model = trained(job(seed, steps), (METHODS[name](share),))
    zeros = {
        layer: float((weight == 0).float().mean()) for layer, weight in model.named_parameters() if weight.dim() > 1
    }
    whole = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    gone = sum(int((weight == 0).sum()) for weight in model.parameters() if weight.dim() > 1)
    return {**told, "accuracy": accuracy(model), "zeros": gone / whole, "layers": zeros}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def accuracies(results: list[dict[str, Any]], name: str, share: float) -> list[float]:
    return [
        one["accuracy"]
        for one in sorted(results, key=lambda one: one["seed"])
        if (one["method"], one["share"]) == (name, share)
    ]


def lines(results: list[dict[str, Any]]) -> dict[str, dict[float, tuple[float, float]]]:
    """Of each method, by share: accuracy and its standard error."""
    names = [name for name in METHODS if any(one["method"] == name for one in results)]
    shares = sorted({one["share"] for one in results if one["share"]})
    return {
        name: {
            share: mean_and_error(accuracies(results, name, share))
            for share in shares
            if accuracies(results, name, share)
        }
        for name in names
    }


def table(results: list[dict[str, Any]]) -> str:
    """Accuracy in percent with its standard error, by method and share of zeros, as Markdown."""
    found = lines(results)
    shares = sorted({share for line in found.values() for share in line})
    dense, error = mean_and_error(accuracies(results, "dense", 0.0))
    rows = [f"| method | {' | '.join(f'{share:.0%} zeros' for share in shares)} |", "|---|" + "---|" * len(shares)]
    for name, line in found.items():
        cells = [
            f"{100 * line[share][0]:.2f} ± {100 * line[share][1]:.2f}" if share in line else "-" for share in shares
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    seeds, steps = {one["seed"] for one in results}, {one["steps"] for one in results}
    return "\n".join(rows) + (
        f"\n\nTest accuracy in % with its standard error over {len(seeds)} seeds; without zeros {100 * dense:.2f} ± "
        f"{100 * error:.2f}. {', '.join(map(str, sorted(steps)))} steps of {BATCH} images each."
    )


def differences(results: list[dict[str, Any]], name: str, other: str) -> dict[float, tuple[float, float]]:
    """By share: points of accuracy that one method has more than another with the same seeds, and the standard error."""
    shares = sorted({one["share"] for one in results if one["share"]})
    pairs = {
        share: zip(accuracies(results, name, share), accuracies(results, other, share), strict=True) for share in shares
    }
    return {share: mean_and_error([100 * (mine - theirs) for mine, theirs in found]) for share, found in pairs.items()}


def conclusion(results: list[dict[str, Any]]) -> str:
    """Whether the paper's conclusion holds, of magnitudes of all weights together and, as the schedule's authors have it, of each layer."""
    said = []
    for name in ("magnitude", "magnitude, each layer"):
        rows, held = [], True
        for other in (*COMPLEX, "random"):
            found = differences(results, name, other)
            better = [share for share, (gain, error) in found.items() if gain > FAR * error]
            worse = [share for share, (gain, error) in found.items() if gain < -FAR * error]
            held &= len(better) == len(found) if other == "random" else not worse
            rows.append(
                f"- minus {other}: {'; '.join(f'{share:.0%} {gain:+.2f} ± {error:.2f}' for share, (gain, error) in found.items())} "
                f"(better at {len(better)} of {len(found)} shares, worse at {len(worse)})"
            )
        said += [f"{name}: the paper's conclusion {'holds' if held else 'does NOT hold'} here", *rows]
    return "\n".join([*said, f"In points of accuracy; better and worse are {FAR:g} standard errors and more."])


def plot(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for (name, line), marker in zip(lines(results).items(), "os^Dv", strict=False):
        shares = sorted(line)
        axes.errorbar(
            range(len(shares)),
            [100 * line[share][0] for share in shares],
            [100 * line[share][1] for share in shares],
            label=name,
            marker=marker,
            capsize=3,
        )
    axes.axhline(
        100 * mean_and_error(accuracies(results, "dense", 0.0))[0], color="grey", linestyle="--", label="no zeros"
    )
    axes.set_xticks(range(len(SHARES)), [f"{share:.0%}" for share in SHARES])
    axes.set_xlabel("weights that are zero")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"Fashion-MNIST, MLP 784-{WIDTH}-{WIDTH}-10, the same steps for all, standard errors of {len(SEEDS)} seeds",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def wanted(quick: bool) -> list[tuple[str, float, int, int]]:
    seeds, shares, steps = ((0, 1), (0.8,), 60) if quick else (SEEDS, SHARES, STEPS)
    sparse = [(name, share, seed, steps) for seed in seeds for share in shares for name in METHODS]
    return [("dense", 0.0, seed, steps) for seed in seeds] + sparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs: nothing is kept")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results: list[dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() and not given.quick else []
    done = {(one["method"], one["share"], one["seed"], one["steps"]) for one in results}
    with ProcessPoolExecutor(given.processes) as pool:
        for one in (
            pool.map(measured, *zip(*(key for key in wanted(given.quick) if key not in done), strict=True))
            if set(wanted(given.quick)) - done
            else ()
        ):
            results.append(one)
            print(one["method"], one["share"], one["seed"], one["accuracy"], file=sys.stderr, flush=True)
            if not given.quick:
                KEPT.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results), conclusion(results), sep="\n\n")
    if not given.quick:
        plot(results, PLOT)


if __name__ == "__main__":
    main()
