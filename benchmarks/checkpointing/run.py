"""What saving and watching cost a run: ours, Lightning Fabric's and plain torch.save, in one run; writes the table of README.md.

    python benchmarks/checkpointing/run.py [steps between saves]

One model trains all the time. After every so many steps the next way of saving gets its turn, and what it costs is how long
training stood still, plus how much longer the steps until the next turn took than those after a turn in which nothing was saved.
Then the same run with `shoestring watch` and a listening browser tab, and without, in turns.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from shoestring.core.running import random_state
from shoestring.core.units import bytes_text, seconds_text
from shoestring.data.feed import Feed
from shoestring.jobfile import job_path, load_job
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.saver import Saver
from shoestring.runs.events.event import Stepped
from shoestring.runs.events.event_log import Events
from shoestring.runs.folder import Folder, Lock
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.execution.snapshot import snapshot_of
from shoestring.training.loop import steps
from shoestring.training.memory.optimizers.fused import FusedOptimizer

HERE = Path(__file__).parent
ROUNDS = 6
OFTEN = Cadence().seconds


def main(between: int = 10) -> None:
    job = load_job(job_path("gpt"), {})
    random_state.seed(0)
    run, feed = build_run(job, (FusedOptimizer(),), job.model()), Feed(job)
    training = steps(run, feed)
    folder = Path(tempfile.mkdtemp(dir="."))
    events = Events(folder)

    def trained(count: int) -> list[float]:
        """Seconds of so many steps, each written to the events."""
        spent = []
        for _ in range(count):
            begun = time.perf_counter()
            loss = float(next(training))
            spent.append(time.perf_counter() - begun)
            events.add(Stepped(feed.taken, loss, spent[-1], 0, 0))
        return spent

    trained(5)
    saver = Saver(folder / "ours", Cadence(), lambda event: None)
    size = sum(t.numel() * t.element_size() for t in run.model.parameters()) * 3
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    whole = {"model": run.model, "optimizer": run.optimizer}
    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "shoestring": lambda: saver.save(lambda: snapshot_of(run, feed, feed.taken, None)),
        "torch.save": lambda: torch.save(
            {name: part.state_dict() for name, part in whole.items()}, folder / "plain.pt"
        ),
        "Lightning Fabric": lambda: fabric.save(folder / "fabric.pt", dict(whole)),
    }
    stood: dict[str, list[float]] = defaultdict(list)
    after: dict[str, list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        for name, save in ways.items():
            begun = time.perf_counter()
            save()
            stood[name].append(time.perf_counter() - begun)
            after[name].append(sum(trained(between)))
            saver.wait()
            print(turn, name, f"{stood[name][-1]:.3f} s", file=sys.stderr, flush=True)
    saver.close()
    alone, watched = watching(folder, trained, between)
    (HERE / "README.md").write_text(written(stood, after, between, size, alone, watched))
    print((HERE / "README.md").read_text())
    shutil.rmtree(folder)


def watching(folder: Path, trained: Callable[[int], list[float]], count: int) -> tuple[list[float], list[float]]:
    """Seconds of steps without and with somebody watching, in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    lock = Lock(folder)
    Folder(folder).write("run.json", {"job": "gpt", "flags": {}, "memory": None})
    for _ in range(ROUNDS):
        found[0].extend(trained(count))
        with watcher(folder):
            trained(2)
            found[1].extend(trained(count))
    lock.release()
    return found


@contextmanager
def watcher(folder: Path) -> Iterator[None]:
    """`shoestring watch` on a folder and a tab that listens."""
    server = subprocess.Popen(
        [sys.executable, "-m", "shoestring", "watch", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None, "the pipe was asked for"
    url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
    tab = urllib.request.urlopen(url + "events", timeout=60)
    listener = threading.Thread(target=lambda: [None for _ in tab], daemon=True)
    listener.start()
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def written(
    stood: dict[str, list[float]],
    after: dict[str, list[float]],
    between: int,
    size: int,
    alone: list[float],
    watched: list[float],
) -> str:
    calm = median(after["nothing"])
    lines = [
        "# What saving and watching cost",
        "",
        f"Written by `python benchmarks/checkpointing/run.py`: the `gpt` job with {bytes_text(size)} of weights and moments, steps of "
        f"{seconds_text(calm / between)}, {ROUNDS} saves a way in turns, {between} steps after each. {platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
        "| way | training stood still | the steps after took longer by | together, of a step | of the time, one save a minute |",
        "|---|---|---|---|---|",
    ]
    for name, pauses in stood.items():
        still = median(pauses)
        slower = median(after[name]) - calm
        lines.append(
            f"| {name} | {seconds_text(still)} | {slower * 1e3:+.0f} ms | {(still + slower) / (calm / between):.0%} | "
            f"{(still + slower) / OFTEN:.2%} |"
        )
    spread = (max(after["nothing"]) - min(after["nothing"])) / 2
    lines += [
        "",
        f"Where nothing was saved, {between} steps took {seconds_text(calm)} ± {spread * 1e3:.0f} ms: differences in "
        f"the second column below that are noise. Ours hashes every byte and syncs the disk, in the background; the others "
        f"do neither.",
        "",
        f"A step took {seconds_text(median(alone))} alone and {seconds_text(median(watched))} while `shoestring watch` showed it to "
        f"a tab: {median(watched) / median(alone) - 1:+.2%} (medians of {len(alone)} steps each, in turns).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
