"""What is left of a training when its last step is done: the digest of its weights, what the job shows, state to report."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoestring.core.job import Job
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import LivesOnDisk
from shoestring.core.running.run_weights import digest_state, guard_outside, stored_weights, weights
from shoestring.core.units import bytes_text
from shoestring.core.user_code.blame import failure_text
from shoestring.core.user_code.seams import calls_user
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.weights.tensors import write_tensors

SHOWN = 1 << 28  # bytes of weights on disk; above this, nothing is shown


def readable_state(run: Run) -> dict[str, Any]:
    """The state of every technique that consists of numbers and text only, for the report."""

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        return (
            all(map(plain, value))
            if isinstance(value, (list, tuple))
            else value is None or isinstance(value, (int, float, str))
        )

    states = {
        name: part.state_dict()
        for name, part in run.state.items()
        if part.of_technique and not isinstance(part, LivesOnDisk)
    }
    return {name: state for name, state in states.items() if state and plain(state)}


@calls_user("show")
def trained_model(job: Job, run: Run, file: str, warn: Callable[[str], None]) -> tuple[str, str]:
    """The digest of the trained weights and the result of the job's `show`; weights are written to `file`, if given."""
    found = {name: value for name, value in weights(run).items() if hasattr(value, "dtype")}
    if run.team.link.rank and not stored_weights(run):  # the first worker has the same weights and reports them
        return "", ""
    digest, shown = (
        weights_sha256({name: value for name, value in digest_state(run).items() if hasattr(value, "dtype")}),
        "",
    )
    absent = sum(prod(one.shape) * one.dtype.itemsize for one in stored_weights(run).values())
    if job.show is not None and absent > SHOWN:
        shown = (
            f"(the job's show is left out: {bytes_text(absent)} of weights are on disk and would be read for every call "
            f"of the model; shoestring export gives them as a file)"
        )
    elif job.show is not None:
        run.model.eval()
        try:
            with torch.no_grad(), run.outside.usable(), guard_outside(run):
                shown = job.show(run.model) if run.team.link.rank == 0 else ""
        except Exception as error:  # of a diverged model, for example: the run is finished all the same
            warn(f"the job's show failed: {failure_text(error)}; the weights are saved")
    if file:
        write_tensors(Path(file), found)
    return digest, shown
