"""The job of `shoestring distill`: a student's job file with a distillation loss.

Its flags are plain text, so a run can store them and every process can build the same job. Files and weights are named
with the beginning of their SHA-256, and a changed file is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoestring.compression.distillation.method import distillation_job, gaussian_noise
from shoestring.compression.distillation.peers import codistillation_job
from shoestring.compression.distillation.sources import digest_of, parse_teacher, teacher_opener, teacher_weights_file
from shoestring.compression.distillation.students import fewer_layers, layers_of, parse_layers
from shoestring.compression.distillation.teachers import Teachers
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.jobfile import Course, job_path, load_job, parse_flags

FILE = __file__


def job(
    student: str,
    teacher: str = "",
    objective: str = "kl",
    temperature: float | None = None,
    alpha: float | None = None,
    axis: int = -1,
    passes: int = 0,
    peers: int = 0,
    unlabelled: str = "",
    ratio: int = 1,
    noise: str = "",
    layers: str = "",
    steps: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
) -> Job:
    """Build the distillation job. `student`: a job file with its flags, written like a teacher (sources.py); `teacher`:
    several words, one per teacher; `unlabelled`: a job file."""
    course = Course(steps, epochs, seed).values
    given = (("objective", objective), ("temperature", temperature), ("alpha", alpha), ("axis", axis))
    how: dict[str, Any] = {
        name: value for name, value in given if value is not None
    }  # defaults for peers differ from those for a teacher
    own, named = job_of_file(student, course), shlex.split(teacher)
    more = job_of_file(unlabelled, {}) if unlabelled else None
    if bool(named) == bool(peers):
        raise Mistake(f"{len(named)} teachers and {peers} peers: give one --teacher or more, or else --peers 2")
    if peers:
        if passes or noise or layers:
            raise Mistake("--passes, --noise and --layers are about a teacher, and --peers has none: leave them out")
        return codistillation_job(own, peers, **how, unlabelled=more, ratio=ratio)
    teachers = Teachers(tuple(teacher_opener(one) for one in named), passes)
    own = own if not layers else with_fewer_layers(own, layers, named)
    return distillation_job(
        own, teachers, **how, noise=parse_noise(noise) if noise else None, unlabelled=more, ratio=ratio
    )


def job_of_file(written: str, course: dict[str, int]) -> Job:
    """The job of a job file with its flags, whose digest is checked if one is given."""
    found = parse_teacher(written)
    path = job_path(found.path)
    if found.digest and digest_of(path) != found.digest:
        raise Mistake(
            f"{path} is not the job file that this distillation was begun with: put it back, or begin anew with --fresh"
        )
    return load_job(path, {**parse_flags(path, list(found.flags)), **course})


def with_fewer_layers(own: Job, layers: str, named: list[str]) -> Job:
    """The student's job with fewer blocks, initialised from the first teacher."""
    kept = parse_layers(layers)
    from shoestring.measure.fake import Stage

    file = teacher_weights_file(named[0])
    return replace(
        own, model=lambda: fewer_layers(own.model(), kept), weights=layers_of(Stage().model(own.model), kept, file)
    )


def parse_noise(written: str) -> Callable[[Batch], Batch]:
    """Parse --noise: the standard deviation of Gaussian noise, or a Python file with `def noise(batch)`."""
    try:
        return gaussian_noise(float(written))
    except ValueError as error:
        if isinstance(error, Mistake):
            raise
    import importlib.util

    found = parse_teacher(written)
    spec = (
        importlib.util.spec_from_file_location("shoestring_noise", found.path) if found.path.endswith(".py") else None
    )
    if spec is None or spec.loader is None:
        raise Mistake(
            f"--noise {written}: give a standard deviation such as 0.1, or a Python file with `def noise(batch)`"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        if found.digest and digest_of(found.path) != found.digest:
            raise Mistake(
                f"{found.path} is not the file that this distillation was begun with: put it back, or begin anew with --fresh"
            )
        spec.loader.exec_module(module)
        made: Callable[[Batch], Batch] = module.noise
    except (OSError, AttributeError) as error:
        raise Mistake(f"--noise {written}: {error}; give a Python file with `def noise(batch)`") from error
    return made
