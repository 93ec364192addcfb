"""The size of the whole process, predicted and measured: random plans over ten models, each in a fresh process.

    python benchmarks/process/run.py [plans a model] [problem ...] [--resume]

Plans are drawn from all allowed combinations without 16-bit precision (23 times slower than float32 on the machine this was
written on), a kind of plan (the set of its techniques) first and its knobs then. For two random budgets a model the planner
chooses, and what it chose must stay inside. Writes measured.json and README.md beside itself; with --resume, problems
that are in measured.json are kept, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import json
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shoestring.core.errors import OverBudget
from shoestring.core.exactness import Exactness
from shoestring.core.units import bytes_text
from shoestring.jobfile import load_job
from shoestring.measure.probe import known_hardware
from shoestring.planning.room import families
from shoestring.processes.launch import run_worker
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.execution.verification import worker_environment
from shoestring.training.planning.plan import Plan
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.predict import Combination
from shoestring.training.room import combinations

HERE = Path(__file__).parent
PROBLEMS = ("gpt2", "bert", "llama", "vit", "wide", "t5", "resnet", "whisper", "mixtral", "recurrent")
STEPS = 8
BUDGETS = 2


def drawn(found: Sequence[Combination], count: int, draw: random.Random) -> list[Combination]:
    """Random candidates: a kind of plan, then one of that kind; no kind twice while there are others."""
    kinds = defaultdict(list)
    for one in found:
        kinds[families(one.techniques)].append(one)
    names = sorted(kinds, key=sorted)
    draw.shuffle(names)
    return [draw.choice(kinds[names[k % len(names)]]) for k in range(count)]


def measured(planner: Planner, plan: Plan) -> int:
    task = TrainTask(**planner.rehearsals.about_job(plan.techniques), steps=STEPS)
    return int(run_worker(task, worker_environment(plan.techniques)).measured["process_bytes"])


def problem_rows(name: str, count: int) -> dict[str, Any]:
    draw = random.Random(name)
    job = load_job(HERE.parent / "planner" / "problems.py", {"problem": name, "steps": STEPS})
    planner = Planner(job, known_hardware(), run_worker)
    ledger = planner.ledger()
    found = list(combinations(ledger, CATALOGUE, Exactness.DISTRIBUTION))
    rows = []
    for one in drawn(found, count, draw):
        plan = planner.predictor.plan(one)
        rows.append(
            {
                "plan": str(plan),
                "predicted": plan.predicted["process_bytes"],
                "measured": measured(planner, plan),
                "how": plan.basis,
                "tensors": plan.predicted["peak_bytes"],
            }
        )
        print(name, plan, f"{rows[-1]['predicted'] / rows[-1]['measured'] - 1:+.1%}", file=sys.stderr, flush=True)
    sizes = sorted(row["measured"] for row in rows)
    choices = []
    for _ in range(BUDGETS):
        budget = int(draw.uniform(sizes[0], sizes[-1]))
        try:
            plan = planner.outcome_of(ledger, budget).chosen
        except OverBudget as error:
            choices.append({"budget": budget, "refused": str(error)})
            continue
        choices.append(
            {
                "budget": budget,
                "plan": str(plan),
                "predicted": plan.predicted["process_bytes"],
                "measured": measured(planner, plan),
            }
        )
        print(name, choices[-1], file=sys.stderr, flush=True)
    return {"rows": rows, "choices": choices}


def written(results: dict[str, Any]) -> str:
    rows = [
        row | {"problem": name, "off": row["predicted"] / row["measured"] - 1}
        for name, result in results.items()
        for row in result["rows"]
    ]
    choices = [one | {"problem": name} for name, result in results.items() for one in result["choices"]]
    ran = [one for one in choices if "plan" in one]
    over = [one for one in ran if one["measured"] > one["budget"]]
    lines = [
        "# The size of the process, predicted and measured",
        "",
        f"Written by `python benchmarks/process/run.py`: {len(rows)} random plans over {len(results)} models, {STEPS} steps each in a "
        f"fresh process. {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
        "| plans | number | median off by | most over | most under | off by more than 6 % | under by more than 2 % |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = [
        ("all", rows),
        ("predicted from the anchor step", [row for row in rows if "trial" not in row["how"]]),
        ("predicted from a trial of a few steps", [row for row in rows if "trial" in row["how"]]),
    ]
    for title, some in kinds:
        offs = [row["off"] for row in some]
        if offs:
            lines.append(
                f"| {title} | {len(offs)} | {median(map(abs, offs)):.1%} | {max(offs):+.1%} | {min(offs):+.1%} | "
                f"{sum(abs(off) > 0.06 for off in offs)} | {sum(off < -0.02 for off in offs)} |"
            )
    lines += [
        "",
        f"{len(ran)} runs that the planner chose for random budgets: {len(over)} over their budget"
        f"{', by ' + ', '.join(bytes_text(one['measured'] - one['budget']) for one in over) if over else ''}; "
        f"{len(choices) - len(ran)} budgets were refused.",
        "",
        "| problem | budget | chosen | predicted | measured | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['problem']} | {bytes_text(one['budget'])} | {one['plan']} | {bytes_text(one['predicted'])} | "
        f"{bytes_text(one['measured'])} | {'**over**' if one['measured'] > one['budget'] else 'inside'} |"
        for one in ran
    ]
    lines += [
        "",
        "## All plans",
        "",
        "| problem | plan | tensors | predicted | measured | off by |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['problem']} | {row['plan']} | {bytes_text(row['tensors'])} | {bytes_text(row['predicted'])} | "
        f"{bytes_text(row['measured'])} | {row['off']:+.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    count = int(words[0]) if words and words[0].isdigit() else 10
    names = [word for word in words if word in PROBLEMS] or PROBLEMS
    kept = HERE / "measured.json"
    results = json.loads(kept.read_text()) if "--resume" in words else {}
    for name in names:
        if name not in results:
            results[name] = problem_rows(name, count)
            kept.write_text(json.dumps(results, indent=1))
            (HERE / "README.md").write_text(written(results))
    print(written(results))


if __name__ == "__main__":
    main(sys.argv[1:])
