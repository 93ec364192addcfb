"""Begin a training in a worker process: make the run, and check that all workers made the same weights."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn
from xxhash import xxh3_64

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.measure.tracker import Tracker
from shoestring.runs.events.event import Warned
from shoestring.runs.weights.initial_weights import fresh_model, source
from shoestring.runs.weights.tensors import pieces
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.execution.recorder import Recorder
from shoestring.training.technique import TrainingTechnique, making


def made_run(
    job: Job,
    techniques: tuple[TrainingTechnique, ...],
    recorder: Recorder | None,
    tracker: Tracker | None,
    model: nn.Module | None = None,
) -> Run:
    """The job's run with techniques applied, for the job's model or the given one; without a tracker, the model is not
    inspected."""
    resumed = recorder.look() if recorder else False
    with making(techniques):
        if model is None:
            model = fresh_model(job)
            if recorder and not resumed and (found := source(model, job)) and found.note:
                recorder.tell(Warned(found.note))
        else:
            random_state.seed(job.seed)
        check_same_weights(model, job.link)
        with tracker or nullcontext():
            return build_run(
                job, techniques, model, recorder.folder.path if recorder else None, resumed, tracker is not None
            )


def check_same_weights(model: nn.Module, link: Link) -> None:
    """Refuse to train if workers started with different weights."""
    if link.world == 1 or link.imagined:
        return
    digest = xxh3_64()
    for value in model.state_dict().values():
        for piece in pieces(value) if hasattr(value, "dtype") else ():
            digest.update(piece)
    found = link.objects(digest.hexdigest())
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        raise Mistake(
            f"worker {others[0]} of {link.world} made other weights than worker 0, though both began from the job's seed: "
            f"the model draws from something else (the time, the operating system, its own generator); seed that too"
        )
