"""A trial: do the stages of a pipeline compute the same as one process? Compares losses, gradients and buffers.

How a model combines the outputs of several blocks (lists filled by forward hooks, attributes, a library's own recorder)
can't be seen from one trace on shapes. So all stages run in one process on real numbers, with models from the same seed
and a few samples, twice over, so that state left by a forward shows in the next. The reference process computes the
same micro-batches. Randomness is replaced as in training/evidence/trials/pieces.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake, reason_text
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.workers.mesh import Mesh, on_one_axis
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.evidence.step import first_batch
from shoestring.training.evidence.tasks import StagesResult
from shoestring.training.evidence.trials.pieces import (
    FEW,
    ROUNDS,
    SLOPE,
    TOLERANCE,
    ConstantDraws,
    PassOutputs,
    relative_difference,
    run_passes,
)
from shoestring.training.group_technique import StagedTechnique

ADVICE = (
    "let blocks return what others use, and collect it in the forward anew every time (not in attributes, globals or hooks that a "
    "forward adds to), or use a plan without it"
)


def try_in_stages(job: Job, make: Callable[[], nn.Module], technique: StagedTechnique) -> StagesResult:
    """What differs when a technique's stages compute a batch, or why that was not tried. `make` returns the same model
    every time."""
    alone = replace(job, mesh=on_one_axis())
    try:
        batch = few_samples(alone, technique.parts)
        pieces = job.pieces(batch, min(technique.parts, job.count(batch)))
        shares = [float(job.weight(piece)) / float(job.weight(batch)) for piece in pieces]
    except (Mistake, ZeroDivisionError) as error:
        return StagesResult(untried=str(error))
    with random_state.fork_rng():
        try:
            once = run_passes(alone, (), make(), list(zip(pieces, shares, strict=True)))
        except Exception as error:
            return StagesResult(untried=reason_text(error))
        try:
            staged = run_passes_in_stages(job, technique, make, batch)
        except Mistake as error:
            return StagesResult(str(error))
        except Exception as error:
            return StagesResult(f"they fail ({reason_text(error)}): {ADVICE}")
    if not all(map(math.isfinite, once.losses)):
        return StagesResult(untried=f"the loss of the trial became {once.losses[-1]}")
    found = difference_of_stages(once, staged)
    if found and once.outside:
        return StagesResult(untried=f"the model draws numbers by {once.outside}, and others in stages")
    return StagesResult(found and f"{found}: {ADVICE}")


def few_samples(job: Job, pieces: int) -> Batch:
    """The job's batch, or a part of it with a few samples, at least one per micro-batch."""
    batch, wanted = first_batch(job), max(FEW, pieces)
    return job.pieces(batch, job.count(batch) // wanted)[0] if job.count(batch) >= 2 * wanted else batch


def run_passes_in_stages(
    job: Job, technique: StagedTechnique, make: Callable[[], nn.Module], batch: Batch
) -> PassOutputs:
    """Losses, gradients and state after all stages passed over a batch a few times, without an update."""

    def run_of(mesh: Mesh) -> Run:
        model = make()
        model.zero_grad(set_to_none=True)
        return build_run(replace(job, mesh=mesh), (technique,), model)  # which frees other stages' weights

    losses = []
    with as_found(job):
        line = technique.line(run_of)
        for _ in range(ROUNDS):
            random_state.seed(job.seed)
            with ConstantDraws():
                losses.append(line.gradients(batch))
    return PassOutputs(
        losses, sum(map(abs, losses)) / ROUNDS, line.weight_gradients(), line.weights(), line.buffers(), ""
    )


def difference_of_stages(once: PassOutputs, staged: PassOutputs) -> str:
    """A difference larger than rounding; empty if there is none. Stages compute the same numbers in nearly the same
    order: every weight's gradient must agree, however small it is."""
    tolerance = max((TOLERANCE.get(one.dtype, 1e-4) for one in once.weights.values()), default=1e-4)
    for whole, parts in zip(once.losses, staged.losses, strict=True):
        if not abs(whole - parts) <= tolerance * max(once.scale, staged.scale):
            return f"the loss is {parts:.6g} in stages and {whole:.6g} in one process"
    for kind, before, after in (("weight", once.weights, staged.weights), ("buffer", once.buffers, staged.buffers)):
        for name, value in before.items():
            if relative_difference(value, after.get(name)) > tolerance:
                return f"a forward changes the {kind} {name} itself, to other values in stages than in one process"
    return difference_of_gradients(once.gradients, staged.gradients, SLOPE * tolerance)


def difference_of_gradients(once: Mapping[str, Tensor], staged: Mapping[str, Tensor], tolerance: float) -> str:
    for name in sorted(once.keys() ^ staged.keys()):
        has, lacks = ("one process", "stages") if name in once else ("stages", "one process")
        return f"the weight {name} gets a gradient in {has} and none in {lacks}"
    sizes = {name: float(value.abs().double().square().sum()) ** 0.5 for name, value in once.items()}
    total = math.sqrt(sum(size**2 for size in sizes.values()))
    for name, value in once.items():
        apart = float((value - staged[name]).abs().double().square().sum()) ** 0.5
        if not apart <= tolerance * (sizes[name] + tolerance * total):
            return f"the gradient of the weight {name} is {apart / max(sizes[name], 1e-30):.2g} of its size apart from that in one process"
    return ""
