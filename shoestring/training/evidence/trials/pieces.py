"""A trial: does a batch in two micro-batches give the same as the batch at once? Compares losses, gradients and state
changes.

Plain training sees the whole batch; Accumulate and groups of workers see parts of it. That is the same up to rounding
only if the loss is a mean over samples and samples do not interact: not with contrastive losses, moving averages, or
weights initialised from the first batch. This can't be read off a model, so it is tried: two models from the same seed,
one given the batch, the other its two halves, twice over, so that state left by a forward shows in the next.

A model that looks at numbers (`if x.mean() > 0`) may take the same way in the batch and in its halves by luck, so it is
also given its samples in smaller pieces, which differ more.

Randomness must not decide: every random number is replaced by the same constant (a coin shows its likelier side, a
permutation is a reversal), so a sample gets the same wherever it stands in a batch. Numbers drawn by Python or NumPy
can't be replaced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake, error_sentence
from shoestring.core.job import Job
from shoestring.core.private import READ_NUMBER, DispatchMode, arguments_of, has_gradient_hooks, operation_of
from shoestring.core.running import random_state
from shoestring.core.running.run import weighted_loss
from shoestring.core.workers.mesh import on_one_axis
from shoestring.measure.tracker import really_draws
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.evidence.step import first_batch
from shoestring.training.memory.recompute.fingerprint import fingerprint, matches
from shoestring.training.technique import TrainingTechnique as Technique

ROUNDS = 2
QUICK = 0.5  # seconds: if a step takes longer, the trial uses a few samples, FEW or a little more
FEW = 4
SMALL_PIECES = 8  # into so many pieces comes the batch of a model that looks at numbers
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}  # relative tolerances for losses and states
SLOPE = 10  # gradients may differ by so many times that: they are sums with cancellation
KNOWN = (
    "bernoulli",
    "rand",
    "uniform",
    "randn",
    "normal",
    "randint",
    "random",
    "randperm",
    "multinomial",
    "exponential",
    "geometric",
    "log_normal",
    "cauchy",
)
LARGE = 2.0**20  # times the loss: gradients that hooks on weights are tried with; a power of two changes no digits
QUANTILE = 0.37  # replaces random numbers: this far between lowest and highest, or so many deviations above the mean


@dataclass(frozen=True)
class PassOutputs:
    """The results of several passes over a batch."""

    losses: list[float]
    scale: float  # sum of the losses' absolute values
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outside: str  # the generator whose numbers could not be replaced
    changed: bool = False  # whether a forward has changed a weight or a buffer (`Embedding(max_norm=)`, a count)
    hooked: bool = False  # whether hooks run with gradients of weights
    looked: bool = False  # whether the forward or loss has looked at a number in a tensor


def try_in_pieces(
    job: Job, make: Callable[[], nn.Module], techniques: Iterable[Technique] = (), small: bool = False
) -> dict[str, str]:
    """What differs when the job's batch comes in two micro-batches: traits of the model, each with the observation;
    "not tried": why.

    `techniques` make a step fit this machine; `small`: use a few samples instead of the whole batch.
    """
    try:
        batch = first_batch(job)
        if job.count(batch) < 2:
            batch = first_batch(replace(job, mesh=on_one_axis()))
        for technique in techniques:
            if technique.splits_batch:
                batch = job.pieces(batch, technique.parts)[-1]
        if small and job.count(batch) >= 2 * FEW:
            batch = job.pieces(batch, job.count(batch) // FEW)[0]
        if job.count(batch) < 2:
            return {"not tried": "the batch that fits this machine is of one sample"}
        halves = job.pieces(batch, 2)
        shares = [float(job.weight(half)) / float(job.weight(batch)) for half in halves]
    except (Mistake, ZeroDivisionError) as error:
        return {"not tried": str(error)}
    used = [technique for technique in techniques if not technique.splits_batch]
    alone = replace(job, mesh=on_one_axis())
    with random_state.fork_rng():
        try:
            once = run_passes(alone, used, make(), [(batch, 1.0)])
        except Exception as error:
            return {"not tried": error_sentence(error)}
        try:
            apart = run_passes(alone, used, make(), list(zip(halves, shares, strict=True)))
        except Exception as error:
            told = f"half of the batch can't be trained on: {error_sentence(error)}"
            return {"not tried": told} if small else {Trait.UNSPLITTABLE: told}
        found = differing_traits(once, apart)
        reason = ""
        if not found and once.looked and not once.outside:
            reason = difference_in_small_pieces(once, job, lambda parts: run_passes(alone, used, make(), parts), batch)
        if (
            not found and not reason and once.changed
        ):  # in both halves one after the other, as in the batch; but workers see one each
            parts = [run_passes(alone, used, make(), [one]) for one in zip(halves, shares, strict=True)]
            reason = difference_of_state(*parts)
            reason = reason and f"{reason} with each part of a batch, and workers see a part each"
        if not found and not reason and once.hooked:
            reason = difference_by_size(once, run_passes(alone, used, make(), [(batch, LARGE)]))
    return found or ({Trait.MIXES_SAMPLES: reason} if reason else {})


def difference_in_small_pieces(
    once: PassOutputs, job: Job, passes: Callable[[list[tuple[Batch, float]]], PassOutputs], batch: Batch
) -> str:
    """What differs when a batch comes in pieces of few samples; empty if nothing, or if a model can't take so few."""
    try:
        pieces = job.pieces(batch, min(job.count(batch), SMALL_PIECES))
        parts = passes([(one, float(job.weight(one)) / float(job.weight(batch))) for one in pieces])
    except Exception:
        return ""
    reason = difference(once, parts, len(pieces))
    return reason and f"the model looks at numbers of a batch, and {reason}"


def difference_by_size(once: PassOutputs, large: PassOutputs) -> str:
    """What hooks on the gradients of weights change that is not in proportion to them: clipping, for example, which may
    have nothing to do in the trial's batch."""
    for name, value in once.gradients.items():
        if relative_difference(value.to_dense(), large.gradients[name].to_dense() / LARGE) > SLOPE * tolerance_of(once):
            return (
                f"a hook changes the gradient of the weight {name}, not in proportion to it, and gradients of pieces are smaller "
                f"than that of the batch"
            )
    return ""


def run_passes(
    job: Job, techniques: Iterable[Technique], model: nn.Module, pieces: list[tuple[Batch, float]]
) -> PassOutputs:
    """Losses, gradients and state after a few passes over the micro-batches, without an update."""
    with as_found(job):
        return run_passes_and_change(job, techniques, model, pieces)


def run_passes_and_change(
    job: Job, techniques: Iterable[Technique], model: nn.Module, pieces: list[tuple[Batch, float]]
) -> PassOutputs:
    """The same; what the job's functions keep is changed."""
    model.zero_grad(set_to_none=True)
    run = build_run(job, techniques, model)
    state = [(value, fingerprint(value)) for value in (*model.parameters(), *model.buffers())]
    losses, scale, outside, looked = [], 0.0, set[str](), False
    for _ in range(ROUNDS):
        found = []
        for piece, share in pieces:
            random_state.seed(job.seed)  # so that a number drawn once per forward is the same in all of them
            before = generator_states()
            with ConstantDraws() as calm:
                loss = run.gradients(replace(run, loss=scale_loss(run.loss, share)), piece)
            found.append(float(loss))
            looked |= calm.looked
            outside |= calm.left | ({"Python or NumPy"} if generator_states() != before else set())
        losses.append(sum(found))
        scale += sum(map(abs, found))
    return PassOutputs(
        losses,
        scale / ROUNDS,
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        {name: p.detach() for name, p in model.named_parameters()},
        dict(model.named_buffers()),
        " and ".join(sorted(outside)),
        not all(matches(before, value) for value, before in state),
        any(map(has_gradient_hooks, model.parameters())),
        looked,
    )


def scale_loss(loss: Callable[[Any, Batch], Tensor], share: float) -> Callable[[Any, Batch], Tensor]:
    return lambda output, batch: weighted_loss(loss(output, batch), share)


def differing_traits(once: PassOutputs, apart: PassOutputs) -> dict[str, str]:
    """The traits that the differences show."""
    if not all(map(math.isfinite, (*once.losses, *apart.losses))):
        return {"not tried": f"the loss of the trial became {once.losses[-1]}"}
    reason = difference(once, apart)
    if once.outside:  # the numbers that a sample gets depend on its position
        drawn = f"the model draws numbers by {once.outside}"
        return {Trait.DRAWS: drawn} | ({"not tried": f"{drawn}, which differ from piece to piece"} if reason else {})
    return {Trait.MIXES_SAMPLES: reason} if reason else {}


def difference(once: PassOutputs, apart: PassOutputs, count: int = 2) -> str:
    """A difference larger than rounding; empty if there is none."""
    if reason := difference_of_state(once, apart):
        return f"{reason} when the batch comes in {count} pieces"
    tolerance = tolerance_of(once)
    for whole, parts in zip(once.losses, apart.losses, strict=True):
        if abs(whole - parts) > tolerance * max(once.scale, apart.scale):
            return f"the loss of a batch is not the mean of its pieces' losses: {whole:.6g} at once, {parts:.6g} in {count} pieces"
    squares = {name: float(value.to_dense().abs().double().square().sum()) for name, value in once.gradients.items()}
    apart_by = sum(
        float((value.to_dense() - apart.gradients[name].to_dense()).abs().double().square().sum())
        if name in apart.gradients
        else squares[name]
        for name, value in once.gradients.items()
    )
    length = math.sqrt(sum(squares.values()))
    if math.sqrt(apart_by) > SLOPE * tolerance * length:
        return f"the gradient of a batch is not the mean of its pieces' gradients: they are {math.sqrt(apart_by) / length:.2g} of it apart"
    return ""


def tolerance_of(once: PassOutputs) -> float:
    return max((TOLERANCE.get(one.dtype, 1e-4) for one in once.weights.values()), default=1e-4)


def difference_of_state(once: PassOutputs, other: PassOutputs) -> str:
    """The first weight or buffer that passes have left with other values."""
    for kind, before, after in (("weight", once.weights, other.weights), ("buffer", once.buffers, other.buffers)):
        for name, value in before.items():
            if relative_difference(value, after.get(name)) > tolerance_of(once):
                return f"a forward changes the {kind} {name} itself, to other values"
    return ""


def relative_difference(value: Tensor, other: Tensor | None) -> float:
    """Relative difference between two tensors."""
    if other is None or other.shape != value.shape or other.dtype != value.dtype:
        return math.inf
    if value.layout is not torch.strided or not value.numel() or torch.equal(value, other):
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return math.inf
    largest = max(float(value.abs().max()), float(other.abs().max()))
    return float((value - other).abs().max()) / largest if largest > 0 else 0.0


def generator_states() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators."""
    kind, keys, place, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys).data), place, rest


class ConstantDraws(DispatchMode):
    """While active, random numbers are replaced by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[str] = set()  # random operations that could not be replaced
        self.looked = False  # whether a number was taken out of a tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.looked |= func is READ_NUMBER
        drawn = torch.Tag.nondeterministic_seeded in func.tags and really_draws(func, args, kwargs)
        if not drawn:
            return func(*args, **kwargs)
        found = draw_constant(func, args, kwargs)
        if found is None:
            self.left.add(operation_of(func).__name__)
            return func(*args, **kwargs)
        return found


def draw_constant(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a random operation with one constant in place of all random numbers; None if the operation is
    unknown."""
    name = operation_of(func).__name__.rstrip("_").removesuffix("_like")
    if name not in KNOWN:
        return None
    given = {argument.name: argument.default_value for argument in arguments_of(func)}
    given |= dict(zip(given, args, strict=False)) | kwargs
    source = given.get("self")
    chances = (
        source.clone() if isinstance(source, Tensor) and source.is_floating_point() else None
    )  # an in-place operation overwrites it
    out: Tensor = func(*args, **kwargs)
    if name == "bernoulli":
        likely = torch.as_tensor(given["p"] if given.get("p") is not None else chances)
        return out.copy_((likely >= 0.5).expand(out.shape))
    if name in ("rand", "uniform"):
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        return out.fill_(low + QUANTILE * (high - low))
    if name in ("randn", "normal"):
        return out.copy_(torch.as_tensor(given.get("mean", 0.0) + QUANTILE * given.get("std", 1.0)).expand(out.shape))
    if name in ("randint", "random"):
        return out.fill_(given.get("low") or given.get("from") or 0)
    if name == "randperm":
        return out.copy_(torch.arange(len(out) - 1, -1, -1))
    if name == "multinomial":
        assert chances is not None, "there are chances to draw by"
        return out.copy_(chances.topk(out.shape[-1]).indices)
    return out.fill_(1.0)
