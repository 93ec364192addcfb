"""What shorter messages do to a loss: the gpt job, two workers, the same batches, with and without; writes README.md and loss.png.

    python benchmarks/compression/run.py [steps]

A run is kept in measured.json and not made again for the same number of steps. The loss of the finished model is that on text
windows that no run was trained on in that order (another seed); the curves are those of training, each worker's own loss and their mean.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot

from shoestring.core.running import random_state
from shoestring.core.technique import text
from shoestring.jobfile import job_path, load_job
from shoestring.jobs.gpt import batches
from shoestring.processes.group.launch import run_group
from shoestring.processes.nodes import Team
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.folder import Folder
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.evidence.tasks import specs_of
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.technique import TrainingTechnique as Technique

HERE = Path(__file__).parent
KEPT = HERE / "measured.json"
WAYS: tuple[Technique, ...] = (DataParallel(), CompressGradients("int8"), CompressGradients("topk"))
WINDOWS, CONTEXT = 128, 128  # that a finished model is judged by
ASKED = {"int8": 3.9, "topk": 25.0}
CLOSE = 0.01


def main(steps: int = 600) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        key = f"{text(way)}, {steps} steps"
        if key not in kept:
            kept[key] = trained(way, steps)
            KEPT.write_text(json.dumps(kept))
        found[text(way)] = kept[key]
        print(
            key,
            f"judged {kept[key]['judged']:.4f}, training {lately(kept[key]['losses']):.4f}, {kept[key]['sent']:,} bytes",
            flush=True,
        )
    drawn(found, steps)
    (HERE / "README.md").write_text(written(found, steps))


def trained(way: Technique, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        task = TrainTask(
            file=str(job_path("gpt")),
            techniques=specs_of([way]),
            steps=steps,
            recording=RecordingSettings(place, Cadence(seconds=1e9)),
        )
        result = run_group(task, {"OMP_NUM_THREADS": "1"}, Team(2))
        saved = newest_good(Folder(Path(place)).checkpoints)[0]
        assert saved is not None, "a run that ended has a checkpoint"
        return {"losses": list(result.losses), "sent": result.measured["sent_bytes"], "judged": judged(saved.weights())}


@torch.no_grad()
def judged(weights: Any) -> float:
    """The loss of a finished model."""
    job = load_job(job_path("gpt"), {})
    random_state.seed(job.seed)
    model = job.model()
    model.load_state_dict(dict(weights.items()))
    draw = batches(16, CONTEXT, seed=12345)
    return mean(
        float(job.loss(job.forward(model, batch), batch)) for batch, _ in zip(draw, range(WINDOWS // 16), strict=False)
    )


def lately(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return mean(losses[-max(len(losses) // 10, 1) :])


def drawn(found: dict[str, dict[str, Any]], steps: int) -> None:
    matplotlib.use("agg")
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, one in found.items():
        window = max(steps // 30, 1)
        smooth = [mean(one["losses"][max(0, end - window) : end]) for end in range(window, steps + 1)]
        (line,) = axes.plot(
            range(window, steps + 1), smooth, label=name.replace("Gradients()", "Gradients(kind='int8')"), linewidth=1.2
        )
        axes.plot([steps * 1.01], [one["judged"]], "o", color=line.get_color(), markersize=4)
    axes.set(
        xlabel="step",
        ylabel="loss",
        ylim=(2.2, 3.4),
        title="Training loss (mean of a thirtieth); dots: finished model, other text",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "loss.png", dpi=110)


def written(found: dict[str, dict[str, Any]], steps: int) -> str:
    whole = found[text(WAYS[0])]
    rows = [
        "| way | bytes a worker sends a step | less | finished model's loss | against whole gradients | training loss, last tenth | |",
        "|---|---|---|---|---|---|---|",
    ]
    said = []
    for way, (name, one) in zip(WAYS, found.items(), strict=True):
        less, off = whole["sent"] / one["sent"], one["judged"] / whole["judged"] - 1
        own = lately(one["losses"]) / lately(whole["losses"]) - 1
        rows.append(
            f"| {name} | {one['sent']:,} | {less:.2f} x | {one['judged']:.4f} | {off:+.2%} | {lately(one['losses']):.4f} | "
            f"{own:+.2%} |"
        )
        kind = getattr(way, "kind", "")
        if least := ASKED.get(kind):
            kept = less >= least and off <= CLOSE
            said.append(
                f"- {kind}: at least {least:g} times less with a final loss within {CLOSE:.0%}: "
                f"{'holds' if kept else 'does not hold'} ({less:.2f} times, {off:+.2%})."
            )
    return "\n".join(
        [
            "# What compression does to a loss",
            "",
            f"Written by `python benchmarks/compression/run.py {steps}`: the `gpt` job as it is (AdamW, "
            f"batches of 8), two workers, {steps} "
            f"steps on the same batches, one run each. The finished model is judged by {WINDOWS} windows of text drawn with another seed. "
            f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}.",
            "",
            *rows,
            "",
            *said,
            "",
            "![loss](loss.png)",
            "",
            "With `topk` every worker trains weights of its own, around the shared ones which are the finished model. Its training loss is "
            "that of the workers' own weights.",
            "",
        ]
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
