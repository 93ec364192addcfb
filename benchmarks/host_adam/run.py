"""One Adam update on the host: torch's three, ours in memory and on disk, and DeepSpeed's, in one run; writes the table of README.md.

    python benchmarks/host_adam/run.py [millions of numbers]

Every way has weights and moments of its own, equal at the start, and all see the same gradients, new ones every round. In a round each
has one turn; the order rotates, so that nobody always follows the one that uses the disk.

    bytes of an update   28 a number: weight, gradient and two moments are read, all but the gradient written, 4 bytes each
    ratio                median over the rounds of (for-loop / this one), both of the same round
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shoestring.training.memory.offload.disk_store import DiskStore
from shoestring.training.memory.offload.offload_optimizer import HostOptimizer
from shoestring.training.memory.offload.offloaded_optimizer import SMALL, OffloadedOptimizer

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
WIDTH = 640
LAYER = (
    (WIDTH,),
    (WIDTH,),
    (3 * WIDTH, WIDTH),
    (3 * WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH,),  # norm and attention
    (WIDTH,),
    (WIDTH,),
    (4 * WIDTH, WIDTH),
    (4 * WIDTH,),
    (WIDTH, 4 * WIDTH),
    (WIDTH,),
)  # norm and two linear layers
WARM, ROUNDS = 2, 31
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BYTES = 28  # a number, of an update
ON_DISK = 16  # of these, to and from the disk: two moments, both ways
LOOP, FUSED, OURS, DISK, DEEPSPEED = (
    "torch, for-loop",
    "torch, fused",
    "ours, in host memory",
    "ours, moments on disk",
    "DeepSpeedCPUAdam",
)

Update = Callable[[], object]


def shapes(numbers: float) -> list[tuple[int, ...]]:
    """Those of a transformer with about so many numbers: a tenth in the embedding, the others in layers."""
    a_layer = sum(torch.Size(shape).numel() for shape in LAYER)
    return [(round(0.1 * numbers / WIDTH), WIDTH), *LAYER * max(1, round(0.9 * numbers / a_layer))]


def offloaded(parameters: Sequence[nn.Parameter], store: DiskStore) -> Update:
    """A step that ends when the last moment it wrote is written; in training the next backward would hide that."""
    names = {parameter: str(number) for number, parameter in enumerate(parameters) if parameter.numel() >= SMALL}
    optimizer = OffloadedOptimizer(AdamW(parameters, **SETTINGS, fused=True), store, names, elementwise=True)
    store.open()

    def step() -> None:
        optimizer.begin_step()
        optimizer.step()
        assert optimizer.ring is not None, "large parameters are offloaded"
        for buffer in optimizer.ring.buffers:
            buffer.wait()

    return step


def deepspeed(parameters: Sequence[nn.Parameter]) -> Optimizer | str:
    """Their optimizer, or why there is none. Its C++ is compiled when it is used for the first time, which takes minutes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # ninja lies beside python
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, **SETTINGS)
    except (
        Exception
    ) as error:  # a package and a compiler that are not ours: whatever it is, the others can still be compared
        reason = error.__cause__ or error
        return f"{type(reason).__name__}: {reason}"


def turns(updates: dict[str, Update], draw: Callable[[], None]) -> Iterator[dict[str, float]]:
    """Seconds of each, round by round."""
    names = list(updates)
    for number in range(WARM + ROUNDS):
        draw()
        spent = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begun = time.perf_counter()
            updates[name]()
            spent[name] = time.perf_counter() - begun
        print(number, *(f"{name} {1e3 * spent[name]:.1f} ms;" for name in names), file=sys.stderr, flush=True)
        if number >= WARM:
            yield spent


def main(millions: float = 50) -> None:
    load = os.getloadavg()[0]
    draw = torch.Generator().manual_seed(0)
    start = [0.02 * torch.randn(shape, generator=draw) for shape in shapes(1e6 * millions)]
    gradients = [torch.empty_like(one) for one in start]
    weights: dict[str, list[nn.Parameter]] = {}

    def own(name: str) -> list[nn.Parameter]:
        weights[name] = [nn.Parameter(one.clone()) for one in start]
        for parameter, gradient in zip(weights[name], gradients, strict=True):
            parameter.grad = gradient
        return weights[name]

    def redrawn() -> None:
        for gradient in gradients:
            gradient.normal_(generator=draw)

    store = DiskStore(None, torch.empty(0))
    updates: dict[str, Update] = {
        LOOP: AdamW(own(LOOP), **SETTINGS, foreach=False, fused=False).step,
        "torch, foreach": AdamW(own("torch, foreach"), **SETTINGS, foreach=True).step,
        FUSED: AdamW(own(FUSED), **SETTINGS, fused=True).step,
        OURS: HostOptimizer(AdamW(own(OURS), **SETTINGS, fused=True)).step_in_blocks,  # as beside a GPU
        DISK: offloaded(own(DISK), store),
    }
    theirs = deepspeed(own(DEEPSPEED))
    if isinstance(theirs, Optimizer):
        updates[DEEPSPEED] = theirs.step
    rounds = list(turns(updates, redrawn))
    spent = {name: [one[name] for one in rounds] for name in updates}
    store.close()
    for name in (OURS, DISK):
        assert all(map(torch.equal, weights[name], weights[FUSED])), f"{name}: the weights are not those of {FUSED}"
    off = {name: furthest(weights[name], weights[FUSED]) for name in updates}
    lines = [
        f"{sum(one.numel() for one in start) / 1e6:.1f} million float32 numbers in {len(start)} tensors of a transformer of width {WIDTH}, "
        f"{ROUNDS} rounds after {WARM} to get warm. {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        f"{', deepspeed ' + version() if DEEPSPEED in updates else ''}; load average before the run {load:.1f}.",
        "",
        *busy(load),
        *table(spent, off, sum(one.numel() for one in start), theirs if isinstance(theirs, str) else ""),
        "",
        *verdict(spent, sum(one.numel() for one in start), store.direct),
    ]
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2])
    print("\n".join(lines))


def furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in zip(some, others, strict=True))


def version() -> str:
    from importlib.metadata import version

    return version("deepspeed")


def busy(load: float) -> list[str]:
    """A warning where others had more than a quarter of the machine."""
    if load <= (os.cpu_count() or 1) / 4:
        return []
    return [f"**The machine was busy with other work (load average {load:.1f}): these times say little.**", ""]


def ratios(spent: dict[str, list[float]], name: str, to: str = LOOP) -> list[float]:
    """How many times faster than another one, round by round."""
    return [theirs / ours for theirs, ours in zip(spent[to], spent[name], strict=True)]


def table(spent: dict[str, list[float]], off: dict[str, float], numbers: int, missing: str) -> list[str]:
    lines = [
        "| update | milliseconds | GB/s | times the for-loop's speed | lowest and highest round | weights off torch's fused by |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in spent.items():
        times = ratios(spent, name)
        lines.append(
            f"| {name} | {1e3 * median(seconds):.1f} | {BYTES * numbers / median(seconds) / 1e9:.1f} | {median(times):.2f} | "
            f"{min(times):.2f} to {max(times):.2f} | {f'{off[name]:.1e}' if off[name] else 'nothing, bit for bit'} |"
        )
    if missing:
        lines.append(
            f"| {DEEPSPEED} | could not be used here: {' '.join(missing.split())[:200].replace('|', '/')} | | | | |"
        )
    return lines


def verdict(spent: dict[str, list[float]], numbers: int, direct: bool) -> list[str]:
    """Each half of the target, met or missed."""
    found = []
    for name in (OURS, DISK):
        loop = median(ratios(spent, name))
        text = f"{name[0].upper()}{name[1:]}: {loop:.2f} times the for-loop ({'met' if loop >= 4 else 'missed'})"
        if DEEPSPEED in spent:
            other = median(ratios(spent, name, DEEPSPEED))
            text += f", {other:.2f} times DeepSpeed's ({'met' if other >= 1 else 'missed'})"
        found += [text + ".", ""]
    moved = ON_DISK * numbers / median(spent[DISK]) / 1e9
    way = "by direct I/O" if direct else "through the page cache: there is no direct I/O here"
    return [*found, f"To and from the disk {moved:.2f} GB/s, {way}."]


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
