"""Training in this process, stopped after some steps and gone on with from a checkpoint by a run that knows nothing of the first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoestring import Job
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import LivesOnDisk
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import Feed
from shoestring.runs.checkpoints.checkpoints import draft as drafted
from shoestring.runs.checkpoints.checkpoints import newest_good, publish
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.execution.snapshot import restore, snapshot_of
from shoestring.training.loop import steps
from shoestring.training.progress import Progress
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import seeded


@dataclass(frozen=True)
class Trained:
    weights: Tensor  # all numbers of the model's state
    rates: list[float | None]  # of every step
    run: Run
    losses: list[float]


def trained(job: Job, techniques: Sequence[Technique], folder: Path, stops: Collection[int] = ()) -> Trained:
    """Train to the end as `shoestring.train` does; after each of the steps in `stops`, in a new run from a checkpoint."""
    rates: list[float | None] = []
    losses: list[float] = []
    folder.mkdir(exist_ok=True)
    run, course = begun(job, techniques, folder, False)
    while True:
        for loss in steps(run, course.batches()):
            losses.append(float(loss))
            rates.append(course.rate)
            number = len(losses)
            if course.due(number):
                course.validate(number)
            if number in stops or course.over(number):
                break
        else:
            break
        if course.over(len(losses)):
            break
        save(run, course, folder, len(losses))
        torch.manual_seed(123)  # nothing of this process must matter
        run, course = begun(job, techniques, folder, True)
    bring_home(run)
    return Trained(
        torch.cat([value.detach().float().reshape(-1) for value in run.model.state_dict().values()]), rates, run, losses
    )


def begun(job: Job, techniques: Sequence[Technique], folder: Path, resumed: bool) -> tuple[Run, Progress]:
    feed = Feed(job)
    run = build_run(job, techniques, seeded(job), folder, resumed)
    feed.assignment = run.team.assignment
    course = Progress(job, run, feed)
    if resumed:
        checkpoint, _ = newest_good(folder / "checkpoints")
        assert checkpoint is not None, "it was saved"
        state = {**run.state, "course": course}
        restore(checkpoint, Run(**{**vars(run), "state": state}), feed)
    return run, course


def save(run: Run, course: Progress, folder: Path, step: int) -> None:
    found = snapshot_of(Run(**{**vars(run), "state": {**run.state, "course": course}}), course.feed, step, None)
    publish(drafted(folder / "checkpoints", step, found.weights, found.state, found.aliases))
    for part in run.state_that(LivesOnDisk):
        part.note_saved()
