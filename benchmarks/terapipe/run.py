"""Slices of one long sequence through two stages, against GPipe with the same stages, in one run; writes the tables of README.md.

    python benchmarks/terapipe/run.py [rounds] [tokens] [width] [depth]

Two processes of one thread train a `gpt` on a batch of one sample. In a round each contender has one turn of some steps, all in the same
two processes; a ratio is the median over the rounds of two turns of the same round. The machine must be quiet.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from paper import paper_lines

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
STEPS, WARM = 4, 1
ONE, GPIPE, BEST = "one process, one thread", "GPipe: 2 stages, 1 piece", "SequencePipeline by the program, 2 stages"
EQUAL = (2, 4, 8, 16)
USUAL = (3, 2048, 256, 8)  # rounds, tokens, width, depth


def main() -> None:
    rounds, tokens, width, depth = [*map(int, sys.argv[1:]), *USUAL[len(sys.argv) - 1 :]]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        "worker",
        *map(str, (rounds, tokens, width, depth)),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=3600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(done.stderr[-4000:] or "the workers said nothing")
    found = json.loads(lines[0].removeprefix("RESULT "))
    rows = measured_lines(found, tokens, width, depth)
    print("\n".join(rows))
    README.write_text(written(README.read_text(), rows, paper_lines()))


def measured_lines(found: dict[str, Any], tokens: int, width: int, depth: int) -> list[str]:
    turns, predicted = found["turns"], found["predicted"]
    rows = [
        "| | slices | a step | speed of GPipe | predicted from t(length, context) | loss after all turns |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in turns.items():
        ratio = median(other / own for own, other in zip(seconds, turns[GPIPE], strict=True))
        said = f"{predicted[GPIPE] / predicted[name]:.2f}" if name in predicted else ""
        rows.append(
            f"| {name} | {found['slices'].get(name, '')} | {median(seconds):.3f} s | {ratio:.2f} | {said} | "
            f"{found['losses'][name]:.5f} |"
        )
    rows += [
        "",
        f"{len(turns[GPIPE])} rounds of {STEPS} steps, batch 1, {tokens} tokens, width {width}, {depth} layers; "
        f"torch {found['torch']}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        f"load before: {found['load']:.2f}.",
    ]
    return rows


def written(text: str, *parts: list[str]) -> str:
    """The README with what stands between its marks written anew, one part after the other."""
    for part in parts:
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        text = before + BEGIN.replace("<!--", "<!-\0") + "\n".join(part) + "\n" + END.replace("<!--", "<!-\0") + after
    return text.replace("<!-\0", "<!--")


def worker(rounds: int, tokens: int, width: int, depth: int) -> None:
    """One of the two processes; the first one tells what was found."""
    load = os.getloadavg()[0]
    import torch
    from torch import distributed as dist

    from shoestring.training.links.shared_memory_link import join_link

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=1200))
    rank = dist.get_rank()
    link = join_link(rank, 2)
    contest = Contest(link, tokens, width, depth)
    names = list(contest.plans)
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            turns[name].append(contest.turn(name))
    if rank == 0:
        told = {
            "turns": turns,
            "predicted": contest.predicted,
            "slices": contest.slices,
            "losses": contest.losses,
            "torch": torch.__version__,
            "load": load,
        }
        print("RESULT " + json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)


class Contest:
    """What each contender is, and its training so far."""

    def __init__(self, link: Any, tokens: int, width: int, depth: int) -> None:
        from shoestring.jobs.gpt import job
        from shoestring.training.memory.optimizers.fused import FusedOptimizer
        from shoestring.training.pipeline.pipeline import Pipeline
        from shoestring.training.sequence.sequence_pipeline import SequencePipeline
        from shoestring.training.sequence.slice_times import measure_slices, usual_pairs
        from shoestring.training.sequence.slices import best_slices, fit_times, latency

        self.link = link
        self.job = job(width=width, depth=depth, heads=width // 64, context=tokens, batch=1)
        plain = self.made(())
        fit = fit_times(
            link.objects(measure_slices(plain, next(self.batches()), usual_pairs(tokens)) if not link.rank else {})[0]
        )
        stage = lambda length, context: fit(length, context) / 2  # noqa: E731
        lengths = best_slices(stage, tokens, 2, 32).lengths
        staged = (Pipeline(2, 1, "gpipe"), FusedOptimizer())
        cuts = {f"SequencePipeline, {count} equal slices, 2 stages": SequencePipeline(count) for count in EQUAL}
        cuts[BEST] = SequencePipeline(len(lengths), ",".join(map(str, lengths)))
        self.plans: dict[str, tuple[Any, ...]] = {
            ONE: (FusedOptimizer(),),
            GPIPE: staged,
            **{name: (cut, *staged) for name, cut in cuts.items()},
        }
        self.slices = {
            name: ", ".join(map(str, cut.cut(tokens))) if name == BEST else str(cut.count) for name, cut in cuts.items()
        }
        self.predicted = {
            ONE: fit(tokens, 0),
            GPIPE: latency((tokens,), stage, 2),
            **{name: latency(cut.cut(tokens), stage, 2) for name, cut in cuts.items()},
        }
        self.runs: dict[str, tuple[Any, Iterator[Any]]] = {}
        self.losses: dict[str, float] = {}

    def batches(self) -> Iterator[Any]:
        return iter(self.job.data())

    def made(self, techniques: tuple[Any, ...]) -> Any:
        from dataclasses import replace

        import torch

        from shoestring.core.workers.mesh import on_one_axis
        from shoestring.training.evidence.rehearse import build_run
        from shoestring.training.group_technique import mesh_sizes, uniting
        from shoestring.training.links.process_mesh import joined_mesh

        staged = bool(uniting(techniques))
        mesh = joined_mesh(self.link, mesh_sizes(techniques, 2)) if staged else on_one_axis()
        torch.manual_seed(0)
        return build_run(replace(self.job, mesh=mesh), techniques, self.job.model())

    def turn(self, name: str) -> float:
        """Median seconds of a step; the one process's steps are the first worker's, while the second waits."""
        from shoestring.training.loop import steps

        if name == ONE and self.link.rank:
            return 0.0
        if name not in self.runs:
            self.runs[name] = self.made(self.plans[name]), self.batches()
        run, data = self.runs[name]
        times = []
        for _ in range(STEPS):
            batch = list(islice(data, 1))
            begun = time.perf_counter()
            for loss in steps(run, batch):
                self.losses[name] = float(loss)
            times.append(time.perf_counter() - begun)
        return median(times[WARM:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:6]))
    else:
        main()
