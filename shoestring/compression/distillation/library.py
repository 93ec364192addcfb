"""The library function `shoestring.distill`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoestring.compression.distillation.job import FILE
from shoestring.compression.distillation.options import DistillOptions
from shoestring.compression.distillation.peers import first_peer
from shoestring.core.command_line.arguments import arguments_of
from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file
from shoestring.core.job import Job
from shoestring.core.running.random_state import fork_rng as random_state_kept
from shoestring.jobfile import Course, check_course, job_path, load_job
from shoestring.runs.checkpoints.checkpoints import BEST, list_checkpoints
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import best_weights, checkpoint_of, named_weights
from shoestring.runs.weights.tensors import write_tensors
from shoestring.training.library import Step, plan, train
from shoestring.training.technique import TrainingTechnique

HIDDEN = "student_"  # prefix of a student's argument that one of `distill` hides


def distill(
    job: Job | str | Path,
    teacher: str | Path | Iterable[str | Path] = (),
    *,
    objective: str | None = None,
    temperature: float | None = None,
    alpha: float | None = None,
    axis: int | None = None,
    passes: int | None = None,
    peers: int | None = None,
    unlabelled: str | Path | None = None,
    ratio: int | None = None,
    noise: str | float | None = None,
    layers: str | None = None,
    memory: str | int | None = None,
    use: Iterable[TrainingTechnique | str] | None = None,
    exact: str | None = None,
    inexact: bool = False,
    fresh_plan: bool = False,
    devices: int = 1,
    run: str | Path | None = None,
    fresh: bool = False,
    adopt: bool = False,
    save_every: int | str = "1m",
    keep: int = 3,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    **flags: Any,
) -> Iterator[Step]:
    """Train a student towards its teachers' outputs, step by step, as `train` does.

        for step in shoestring.distill("small.py", teacher="big.py@runs/big", memory="600MiB", run="runs/small"):
            print(step.number, step.loss)

    job         the student: the path of a job file, or the name of a built-in one; `flags` are the file's own; one
                that is hidden by an argument here is written as student_NAME
    teacher     a run ("big.py@runs/big"), a job file with weights ("big.py@weights.safetensors"); several are an ensemble
    objective, temperature, alpha, axis    the distillation loss, and its share: loss = (1 - alpha) own + alpha distillation
    passes      forward passes of every teacher with dropout on; peers: number of students that learn from each other, without a teacher
    unlabelled, ratio    a job file with unlabelled batches, and how many of them follow each labelled one
    noise       noise on the student's batches only: a standard deviation, or a Python file with `def noise(batch)`
    layers      the student keeps these blocks of the teacher, with their weights: "every=2"
    memory, use, exact, inexact, fresh_plan    as for `plan`; devices, run, fresh, adopt, save_every, keep    as for `train`. With peers and
                a run, the weights of the first peer are in peer.safetensors there

    Raises Mistake if something can't work, and OverBudget if nothing fits.
    """
    asked = DistillOptions(
        (str(teacher),) if isinstance(teacher, (str, Path)) else tuple(map(str, teacher)),
        objective,
        temperature,
        alpha,
        axis,
        passes,
        peers,
        None if unlabelled is None else str(unlabelled),
        ratio,
        None if noise is None else str(noise),
        layers,
    )
    made = taught_job(job, asked, flags, Course(steps, epochs, seed))
    outcome = plan(made, memory, use, exact=exact, inexact=inexact, fresh_plan=fresh_plan, devices=devices)
    done = train(made, outcome, run=run, fresh=fresh, adopt=adopt, save_every=save_every, keep=keep, devices=devices)
    return done if peers is None or run is None else with_peer(done, run)


@speaking_of_arguments()
@random_state_kept()
def taught_job(job: Job | str | Path, asked: DistillOptions, flags: Mapping[str, Any], course: Course) -> Job:
    """The job of a distillation."""
    asked.check()
    check_course(course.values)
    if isinstance(job, Job):
        raise Mistake(
            "a distillation makes its student's job again in every process: give the path of a job file, or the name of a built-in job"
        )
    student = job_path(str(job))
    own = {
        name.removeprefix(HIDDEN) if name.removeprefix(HIDDEN) in arguments_of(DistillOptions) else name: value
        for name, value in flags.items()
    }
    return load_job(FILE, asked.flags(student, own) | course.values)


def with_peer(steps: Iterator[Step], run: str | Path) -> Iterator[Step]:
    yield from steps
    one_peer(run)


def one_peer(run: str | Path) -> str:
    """Write the weights of one peer beside the run, under the names of a single student."""

    folder = Folder(Path(run))
    checkpoint = best_weights(folder) if list_checkpoints(folder.checkpoints, BEST) else checkpoint_of(folder, None)
    target = folder.path / "peer.safetensors"
    with draft_file(target) as draft:
        write_tensors(draft, first_peer(named_weights(checkpoint)), {"format": "pt"})
    return str(target)
