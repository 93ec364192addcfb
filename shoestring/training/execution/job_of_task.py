"""Make a task's job again, in a worker process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.data.feed import first_steps
from shoestring.data.lengths import batches_at, once, shared_data
from shoestring.jobfile import load_job
from shoestring.training.evidence.tasks import StepsTask, techniques_of
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.group_technique import axes_not_united, mesh_sizes
from shoestring.training.links.process_mesh import joined_mesh


def job_of(task: StepsTask[Any], link: Link | None = None) -> Job:
    """The job of a task; with the link to a real group, or as a worker of an imagined group."""
    found, stands = shared_data(load_job(Path(task.file), dict(task.flags))), task.position
    job = found if not task.largest else replace(found, largest=once(lambda: batches_at(found, task.largest[:1])[0]))
    techniques = techniques_of(task.techniques)
    sizes = mesh_sizes(techniques, stands.world if link is None else link.world, stands.per_copy)
    if link is not None and (apart := axes_not_united(techniques, sizes)):
        raise Mistake(
            f"of {link.world} workers, the {sizes[apart[0]]} along the axis {apart[0]} have nothing that unites them: they would "
            f"train apart; give as many workers as the plan was made for, or plan for these"
        )
    mesh = (
        imagined_mesh(sizes, stands.rank, stands.same_machine, stands.speeds)
        if link is None
        else joined_mesh(link, sizes, link.same_machine)
    )
    job = replace(job, mesh=mesh)
    if task.steps is None:
        return job
    to_the_end = isinstance(task, TrainTask) and task.recording is not None
    return replace(job, steps=task.steps, epochs=0) if to_the_end else first_steps(job, task.steps)
