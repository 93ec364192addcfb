"""Seconds of a step under several plans, in turns in one process: a slow moment of the machine meets all of them.

    python benchmarks/planner/turns.py PROBLEM ROUNDS PLAN [PLAN ...]

Each PLAN is written like Checkpoint(groups=-1)+FusedOptimizer(); an empty one is plain. Prints a JSON list of medians.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

from shoestring.core.running import random_state
from shoestring.core.technique import parse_technique
from shoestring.data.feed import Feed
from shoestring.jobfile import load_job
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.technique import TrainingTechnique as Technique


def techniques(text: str) -> tuple[Technique, ...]:
    return tuple(parse_technique(one, CATALOGUE) for one in text.split("+") if one)


def main(problem: str, rounds: int, plans: list[str]) -> None:
    job = load_job(Path(__file__).parent / "problems.py", {"problem": problem})
    trainings = []
    for plan in plans:
        random_state.seed(0)
        trainings.append(steps(build_run(job, techniques(plan), job.model()), Feed(job)))
    spent: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds + 2):
        for training, times in zip(trainings, spent, strict=True):
            begun = time.perf_counter()
            float(next(training))
            if turn > 1:
                times.append(time.perf_counter() - begun)
    print(json.dumps([median(times) for times in spent]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
