"""The largest model that trains in 2 GiB of address space, plainly and by `shoestring train`; writes the tables and plot of README.md.

    python benchmarks/ten_times/run.py [plain] [same] [large] [llama] [gpt2] [overlap] [budgets]     (all of them by default)

Every process runs under a hard limit of its address space (RLIMIT_AS), which counts all memory but the kernel's page cache; the state on
disk passes by direct I/O, so that the page cache does not help either. Needs about 60 GB of free disk for the model of two billion weights.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from shoestring.core.units import bytes_text, seconds_text
from shoestring.data.feed import Feed

HERE = Path(__file__).parent
KEPT = HERE / "measured.json"
LIMIT = 2 << 30
PAUSE = 20.0
BUDGETS = tuple(int(gib * (1 << 30)) for gib in (1.0, 1.25, 1.5, 2.0, 3.0, 4.0))
LARGE = {"width": 1536, "depth": 71, "heads": 12, "batch": 1, "steps": 3, "rate": 1e-6}
SAME = {"width": 1024, "depth": 32, "heads": 8, "batch": 1, "steps": 3, "rate": 3e-6}
PLAIN = """
import sys, torch
from itertools import islice
from shoestring.core.running import random_state
from shoestring.data.feed import Feed
from shoestring.jobs.gpt import job
from shoestring.runs.checkpoints.digest import weights_sha256
flags = eval(sys.argv[1])
made = job(**flags)
random_state.seed(made.seed); model = made.model(); random_state.seed(made.seed)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=flags.get("rate", 1e-3), betas=(0.9, 0.98), fused=True)
for batch in islice(Feed(made), made.steps):
    optimizer.zero_grad()
    made.loss(model(batch[0]), batch).backward()
    optimizer.step()
if "sha" in sys.argv: print(weights_sha256(model.state_dict()))
"""


def limited(size: int | None, words: list[str]) -> list[str]:
    """A command under a hard limit of its address space."""
    return words if size is None else ["sh", "-c", f'ulimit -v {size >> 10}; exec "$@"', "sh", *words]


def parameters(width: int, depth: int, **_: Any) -> int:
    """Weights of the gpt job: embeddings of bytes and places, layers, last norm, head."""
    return (256 + 128) * width + depth * (12 * width * width + 13 * width) + 2 * width + 257 * width


def plain(flags: dict[str, Any], size: int | None, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        limited(size, [sys.executable, "-c", PLAIN, repr(flags), *more]), capture_output=True, text=True, check=False
    )


def largest_plain(size: int) -> tuple[int, int]:
    """Weights of the largest model that trains plainly under a limit, and of the smallest that does not; layers of width 512."""
    fits, fails = 0, 4
    while fails < 400 and plain(narrow(fails), size).returncode == 0:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if plain(narrow(middle), size).returncode == 0 else (fits, middle)
    return parameters(512, fits), parameters(512, fails)


def narrow(depth: int) -> dict[str, Any]:
    return {"width": 512, "depth": depth, "heads": 8, "batch": 1, "steps": 2}


def command(job: str, flags: dict[str, Any], verb: str = "train", *more: str) -> list[str]:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "shoestring", verb, job, *words, *more, "--json"]


def ours(job: str, flags: dict[str, Any], size: int | None, folder: Path) -> dict[str, Any]:
    begun = time.time()
    child = subprocess.run(
        limited(size, command(job, flags, "train", "--run", str(folder), "--save-every", "1")),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise SystemExit(f"{job} under {size}: exit code {child.returncode}\n{child.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(child.stdout)
    return {key: report[key] for key in ("losses", "predicted", "measured", "techniques", "weights_sha256")} | {
        "seconds": time.time() - begun,
        "disk": (folder / "stream.bin").stat().st_size,
    }


def killed_and_resumed(job: str, folder: Path) -> dict[str, Any]:
    """Train under the limit, kill the worker in the step after the second is saved, give the same command again."""
    path = str(HERE / f"{job}.py")
    child = subprocess.Popen(
        limited(LIMIT, command(path, {}, "train", "--run", str(folder), "--save-every", "1")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    events = folder / "events.jsonl"
    while child.poll() is None and not (events.exists() and events.read_text().count('"saved"') == 2):
        time.sleep(0.2)
    time.sleep(2)
    found = [json.loads(line) for line in events.read_text().splitlines()]
    with suppress(ProcessLookupError):
        os.kill(next(event["pid"] for event in reversed(found) if event["event"] == "begun"), signal.SIGKILL)
    child.wait()
    after = ours(path, {}, LIMIT, folder)
    begins = [json.loads(line)["step"] for line in events.read_text().splitlines() if '"begun"' in line]
    return after | {"resumed_at": begins[-1], "weights": weights_of(path)}


def weights_of(path: str) -> int:
    import torch

    from shoestring.jobfile import load_job

    with torch.device("meta"):
        return sum(weight.numel() for weight in load_job(Path(path), {}).model().parameters())


def overlap() -> dict[str, Any]:
    """Seconds of a streamed step, of its compute alone (nothing moves) and of its traffic alone (nothing is computed)."""
    from itertools import islice

    from shoestring.core.running import random_state
    from shoestring.jobs.gpt import job
    from shoestring.training.evidence.rehearse import build_run
    from shoestring.training.loop import steps
    from shoestring.training.memory.offload.offload_model import OffloadModel
    from shoestring.training.memory.optimizers.fused import FusedOptimizer

    made = job(**SAME)
    random_state.seed(0)
    run = build_run(made, (FusedOptimizer(), OffloadModel()), made.model(), Path(tempfile.mkdtemp(dir=".")))
    part: Any = run.state["stream"]

    def timed(count: int) -> float:
        """Seconds of a step in a row of them; the last one's writes are waited for."""
        batches = list(islice(Feed(made), count))
        begun = time.perf_counter()
        for _ in steps(run, batches):
            pass
        part.store.settle()
        return (time.perf_counter() - begun) / count

    timed(2)
    moved = part.bytes_moved
    timed(1)
    moved = part.bytes_moved - moved
    rounds = []
    for _ in range(5):
        streamed = timed(3)
        part.store.imagined = True
        compute = timed(3)
        part.store.imagined = False
        rounds.append((streamed, compute, traffic_alone(part)))
    streamed, compute, traffic = (median(column) for column in zip(*rounds, strict=True))
    shutil.rmtree(part.store.path.parent)
    return {
        "step": streamed,
        "compute": compute,
        "traffic": traffic,
        "bytes": moved,
        "times": [one[0] / max(one[1:]) for one in rounds],
    }


def traffic_alone(part: Any) -> float:
    """Seconds to move what a step moves: weights for the forward; weights and moments there and back for the backward."""
    store, ring, buffers = part.store, part.offloaded.ring, part.unit_buffers
    begun = time.perf_counter()
    units, number = list(part.units.values()), 0
    for unit in units:
        store.read(unit.name, buffers[number % len(buffers)])
        number += 1
    for unit in reversed(units):
        weights = buffers[number % len(buffers)]
        number += 1
        store.read(unit.name, weights)
        for parameter in unit.members.values():
            for chunk in part.offloaded.chunks.get(parameter, ()):
                buffer = ring.begin(chunk.region, read=True)
                store.write(chunk.region, buffer)
        store.write(unit.name, weights)
    store.settle()
    for unit in units:  # what is in the buffers is not what the run thinks it is
        if unit.buffer is not None:
            part.evict(unit)
    part.order.clear()
    ring.last, ring.coming = ("", None), {}
    return time.perf_counter() - begun


def budgets() -> dict[str, Any]:
    """By limit: the largest plain model, and the widest of two billion weights that `shoestring plan` fits."""
    found = {}
    for size in BUDGETS:
        fits = ""
        for width in (1536, 1280, 1024, 768):
            flags = {"width": width, "depth": -(-2_000_000_000 // (12 * width * width)), "heads": 8, "batch": 1}
            child = subprocess.run(
                limited(size, command("gpt", flags, "plan")), capture_output=True, text=True, check=False
            )
            if child.returncode == 0 and "OffloadModel" in child.stdout:
                fits = json.dumps(flags)
                break
        found[str(size)] = {
            "plain": largest_plain(size)[0],
            "ours": parameters(**json.loads(fits)) if fits else 0,
            "flags": fits,
        }
    return found


def main(parts: list[str]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for part in parts or ["plain", "same", "large", "llama", "gpt2", "overlap", "budgets"]:
        os.sync()
        time.sleep(PAUSE)  # the disk is still busy with what the part before wrote and removed
        folder = Path(tempfile.mkdtemp(dir="."))
        try:
            kept[part] = measured(part, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        KEPT.write_text(json.dumps(kept, indent=1))
        print(part, kept[part], flush=True)
    written(kept)


def measured(part: str, folder: Path) -> Any:
    if part == "plain":
        return largest_plain(LIMIT)
    if part == "large":
        return ours(str(HERE / "again.py"), LARGE, LIMIT, folder / "run")
    if part == "same":
        return ours("gpt", SAME, LIMIT, folder / "run") | {"plain_sha256": plain(SAME, None, "sha").stdout.strip()}
    if part in ("llama", "gpt2"):
        return killed_and_resumed(part, folder / part)
    if part == "overlap":  # in a process like the one that trains
        from shoestring.training.memory.allocator import following

        code = f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import run; print(json.dumps(run.overlap()))"
        child = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | following().environment, stdout=subprocess.PIPE, check=True
        )
        return json.loads(child.stdout)
    return budgets()


def line(name: str, count: int, one: dict[str, Any], more: str) -> str:
    predicted, found = one["predicted"], one["measured"]
    return (
        f"| {name} | {count / 1e6:,.0f} M | {' -> '.join(f'{loss:.3f}' for loss in one['losses'])} | "
        f"{bytes_text(predicted['process_bytes'])} / {bytes_text(found['process_bytes'])} | "
        f"{predicted['peak_bytes'] - found['peak_bytes']:+,} bytes | "
        f"{predicted['traffic_bytes'] - found.get('traffic_bytes', 0):+,.0f} bytes of {bytes_text(found.get('traffic_bytes', 0))} | "
        f"{seconds_text(predicted['step_seconds'])} / {seconds_text(found['step_seconds'])} | {more} |"
    )


def drawn(budgets: dict[str, Any]) -> None:
    """The plot of the largest model against the limit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for side, name in (("ours", "shoestring train, planned"), ("plain", "plain PyTorch, trained")):
        points = [(int(size) / (1 << 30), one[side] / 1e6) for size, one in budgets.items() if one[side]]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(
        xlabel="limit of address space, GiB",
        ylabel="million weights",
        yscale="log",
        title="Largest model against the limit",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "largest.png", dpi=110)


def written(kept: dict[str, Any]) -> None:
    """The tables between the marks of README.md."""
    rows = [f"Measured on {kept['machine']}, all under RLIMIT_AS of {bytes_text(LIMIT)} unless said.", ""]
    if "plain" in kept:
        fits, fails = kept["plain"]
        rows += [
            f"Plain PyTorch (fused AdamW, float32) trains {fits / 1e6:.1f} M weights; {fails / 1e6:.1f} M die.",
            "",
        ]
    rows += [
        "| model | weights | loss | process, predicted / measured | tensors off by | disk traffic of a step off by | "
        "a step, predicted / measured | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if "large" in kept:
        count = parameters(**{name: LARGE[name] for name in ("width", "depth")})
        ratio = f"{count / kept['plain'][0]:.0f} times plain" if "plain" in kept else ""
        rows += [line("gpt, one text again and again", count, kept["large"], ratio)]
    if "same" in kept:
        equal = kept["same"]["weights_sha256"] == kept["same"]["plain_sha256"]
        rows += [
            line(
                "gpt",
                parameters(**{name: SAME[name] for name in ("width", "depth")}),
                kept["same"],
                "the same bits as plain without the limit" if equal else "**other bits than plain**",
            )
        ]
    for job, one in ((job, kept[job]) for job in ("llama", "gpt2") if job in kept):
        rows += [
            line(
                f"transformers' {job}",
                one["weights"],
                one,
                f"killed, resumed after step {one['resumed_at']}" + one.get("remark", ""),
            )
        ]
    if "overlap" in kept:
        one = kept["overlap"]
        count = parameters(**{name: SAME[name] for name in ("width", "depth")})
        rows += [
            "",
            f"A streamed step of {count / 1e6:.0f} M weights takes {seconds_text(one['step'])}, {median(one['times']):.2f} times "
            f"({min(one['times']):.2f} to {max(one['times']):.2f} in {len(one['times'])} rounds) the larger of its compute alone "
            f"({seconds_text(one['compute'])}) and its traffic alone ({seconds_text(one['traffic'])} for "
            f"{bytes_text(one['bytes'])}).",
        ]
    if "budgets" in kept:
        drawn(kept["budgets"])
        rows += [
            "",
            "Largest model against the limit of address space. Plain PyTorch: bisected, trained two steps. Ours: the widest of "
            "two billion weights that a plan was found for; trained at 2 GiB only. More layers need no more memory, so its "
            "bound is the disk: 24 bytes a weight.",
            "",
            "| limit | plain | ours | width of ours |",
            "|---|---|---|---|",
        ]
        rows += [
            f"| {bytes_text(int(size))} | {one['plain'] / 1e6:,.0f} M | {one['ours'] / 1e6:,.0f} M | "
            f"{json.loads(one['flags'])['width'] if one['flags'] else 'none was found'} |"
            for size, one in kept["budgets"].items()
        ]
        rows += ["", "![largest model against the limit](largest.png)"]
    before, _, rest = (HERE / "README.md").read_text().partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->")[2]
    (HERE / "README.md").write_text(f"{before}<!-- table -->\n" + "\n".join(rows) + f"\n<!-- end -->{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
