"""Every plan of a list predicted and then measured in a fresh process, for five problems; writes the table of README.md.

    python benchmarks/planner/run.py [problem ...] [--resume]      (resume: keep what measured.json has of other problems)

For each problem: predicted against measured (tensors, process, seconds), the plan that the planner chooses for a budget
against the best measured one that fits, and what plain PyTorch, uniform sqrt(N) checkpointing and `accelerate
estimate-memory` say. The machine's speed drifts by ten percent and more from one second to the next, so steps are timed in turns in
one process (turns.py) and compared relative to the plain one; the chosen plan and the best one are run again in turns.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from turns import techniques

from shoestring.core.errors import OverBudget
from shoestring.core.technique import technique_json
from shoestring.core.units import bytes_text, seconds_text
from shoestring.jobfile import load_job
from shoestring.measure.probe import known_hardware
from shoestring.processes.launch import run_worker
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.execution.verification import worker_environment
from shoestring.training.planning.plan import TrainingPlan, technique_in, training_plan
from shoestring.training.planning.planner import Planner

HERE = Path(__file__).parent
PLANS = [
    "",
    "FusedOptimizer()",
    "Checkpoint(groups=-1)",
    "Accumulate(pieces=2)+FusedOptimizer()",
    "StepInBackward()+FusedOptimizer()",
]
ALLOCATORS = ["", "Allocator(kind='huge')"]
STEPS = 8
TURNS = 2
ROUNDS = 20


def measured(planner: Planner, plan: TrainingPlan) -> dict[str, Any]:
    task = TrainTask(**planner.rehearsals.about_job(plan.techniques), steps=STEPS)
    return dict(run_worker(task, worker_environment(plan.techniques)).measured)


def accelerate_estimate(planner: Planner) -> int:
    """What `accelerate estimate-memory` says for training with Adam: four times the float32 weights."""
    from accelerate.utils import calculate_maximum_sizes

    whole, _ = calculate_maximum_sizes(planner.job.model())
    return int(4 * whole)


def problem_rows(name: str) -> dict[str, Any]:
    job = load_job(HERE / "problems.py", {"problem": name, "steps": STEPS})
    planner = Planner(job, known_hardware(), run_worker)
    ledger = planner.ledger()
    rows = []
    for text in PLANS:
        for allocator in ALLOCATORS:
            chosen = techniques("+".join(filter(None, (text, allocator))))
            plan = planner.figures_of(ledger, chosen)
            rows.append(
                {
                    "plan": str(plan),
                    "predicted": plan.as_json(),
                    "measured": measured(planner, plan),
                    "allocator": allocator,
                    "techniques": [technique_json(one) for one in plan.techniques],
                }
            )
            print(name, plan, file=sys.stderr, flush=True)
    in_turns(name, rows)
    sizes = sorted(row["measured"]["process_bytes"] for row in rows)
    choices = []
    for budget in (int(sizes[len(sizes) // 2] * 1.05),):  # clear of the sizes: a plan keeps a margin of 2 %
        try:
            plan = planner.outcome_of(ledger, budget).chosen
        except OverBudget as error:
            choices.append({"budget": budget, "error": str(error)})
            continue
        fitting = [row for row in rows if row["measured"]["process_bytes"] <= budget]
        best = min(fitting, key=lambda row: row["measured"]["step_seconds"])
        same = str(plan) == best["plan"]
        pair = (
            (plan,)
            if same
            else (plan, training_plan(tuple(technique_in(one["name"], one["knobs"]) for one in best["techniques"])))
        )
        turns = [[measured(planner, one) for one in pair] for _ in range(1 if same else TURNS)]
        found = [
            {
                "step_seconds": min(one["step_seconds"] for one in some),
                "process_bytes": max(one["process_bytes"] for one in some),
            }
            for some in zip(*turns, strict=True)
        ]
        mine, its = found[0], found[-1]
        choices.append(
            {"budget": budget, "chosen": str(plan), "measured": mine, "best": best["plan"], "best_measured": its}
        )
        print(name, choices[-1], file=sys.stderr, flush=True)
    return {"problem": name, "rows": rows, "choices": choices, "accelerate": accelerate_estimate(planner)}


def off(row: dict[str, Any], key: str) -> float:
    return float(row["predicted"][key] / row["measured"][key] - 1)


def in_turns(name: str, rows: list[dict[str, Any]]) -> None:
    """Write into every row the seconds of its step and of the plain one under the same allocator, timed in turns."""
    for allocator in ALLOCATORS:
        some = [row for row in rows if row["allocator"] == allocator]
        words = [sys.executable, str(HERE / "turns.py"), name, str(ROUNDS), *PLANS]
        environment = os.environ | worker_environment(techniques(allocator))
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        seconds = json.loads(done.stdout)
        for row, own in zip(some, seconds, strict=True):
            row["turns"] = {
                "own": own,
                "plain": seconds[0],
                "predicted": row["predicted"]["step_seconds"] / some[0]["predicted"]["step_seconds"],
            }
            print(name, row["plan"], f"{relative(row):+.1%}", file=sys.stderr, flush=True)


def relative(row: dict[str, Any]) -> float:
    """How far the predicted step is off, both it and the measured one relative to a plain step timed beside it."""
    return float(row["turns"]["predicted"] / (row["turns"]["own"] / row["turns"]["plain"]) - 1)


def written(results: list[dict[str, Any]]) -> str:
    rows = [row for result in results for row in result["rows"]]
    lines = [
        "# The planner against what was measured",
        "",
        "Written by `python benchmarks/planner/run.py`; every row is a fresh process. "
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
        "| figure | median off by | worst over | worst under |",
        "|---|---|---|---|",
    ]
    figures = [
        (name, [off(row, key) for row in rows])
        for key, name in (
            ("peak_bytes", "tensors"),
            ("process_bytes", "process"),
            ("step_seconds", "a step, by the clock"),
        )
    ]
    figures.append(
        (
            "a step, relative to a plain one run beside it",
            [
                relative(row)
                for row in rows
                if row["plan"] not in ("plain", str(training_plan(techniques(ALLOCATORS[1]))))
            ],
        )
    )
    for name, offs in figures:
        lines.append(f"| {name} | {median(map(abs, offs)):.1%} | {max(offs):+.1%} | {min(offs):+.1%} |")
    lines += [
        "",
        f"Predicted tensor peak equal to the byte in {sum(off(row, 'peak_bytes') == 0 for row in rows)} of {len(rows)} rows.",
        "",
        "## Choices",
        "",
        "| problem | budget | chosen | a step | process | best of the list that fits | a step | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for one in result["choices"]:
            if "error" in one:
                lines.append(f"| {result['problem']} | {bytes_text(one['budget'])} | {one['error']} | | | | | |")
                continue
            mine, best = one["measured"], one["best_measured"]
            lines.append(
                f"| {result['problem']} | {bytes_text(one['budget'])} | {one['chosen']} | {seconds_text(mine['step_seconds'])} | "
                f"{bytes_text(mine['process_bytes'])} | {one['best']} | {seconds_text(best['step_seconds'])} | "
                f"{mine['step_seconds'] / best['step_seconds']:.2f} |"
            )
    lines += [
        "",
        "## Beside others",
        "",
        "Process of plain PyTorch, of uniform sqrt(N) checkpointing, and of `accelerate "
        "estimate-memory`, which counts weights, gradients and Adam only.",
        "",
        "| problem | plain PyTorch | sqrt(N) checkpoints | accelerate's estimate | our prediction for plain |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        plain, root = (
            next(row for row in result["rows"] if row["plan"] == name) for name in ("plain", "Checkpoint(groups=-1)")
        )
        lines.append(
            f"| {result['problem']} | {bytes_text(plain['measured']['process_bytes'])} | "
            f"{bytes_text(root['measured']['process_bytes'])} | {bytes_text(result['accelerate'])} | "
            f"{bytes_text(plain['predicted']['process_bytes'])} |"
        )
    lines += [
        "",
        "## All rows",
        "",
        "| problem | plan | tensors off | process | process off | a step | off by the clock | off relative to plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {result['problem']} | {row['plan']} | {row['predicted']['peak_bytes'] - row['measured']['peak_bytes']:+,} B | "
        f"{bytes_text(row['measured']['process_bytes'])} | {off(row, 'process_bytes'):+.1%} | "
        f"{seconds_text(row['measured']['step_seconds'])} | {off(row, 'step_seconds'):+.1%} | "
        f"{relative(row):+.1%} |"
        for result in results
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    kept = HERE / "measured.json"
    names = [word for word in words if word != "--resume"] or ["gpt2", "bert", "llama", "vit", "wide"]
    results = (
        [one for one in json.loads(kept.read_text()) if one["problem"] not in names] if "--resume" in words else []
    )
    for name in names:
        results.append(problem_rows(name))
        kept.write_text(json.dumps(results, indent=1))
        (HERE / "README.md").write_text(written(results))
    print(written(results))


if __name__ == "__main__":
    main(sys.argv[1:])
