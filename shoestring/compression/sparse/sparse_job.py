"""A job whose model becomes sparse while it is trained. It is a job like any other: plans, checkpoints, kill -9 and resume hold for it.

    magnitude    the weights nearest to zero go, on the cubic schedule (Zhu, Gupta 2017, arXiv 1710.01878)
    random       weights that a seed says go, on the same schedule: what the others are to be compared with
    l0           gates with a penalty on how many are open (Louizos, Welling, Kingma 2018, arXiv 1712.01312)
    variational  weights with noise; those that are mostly noise go (Molchanov, Ashukha, Vetrov 2017, arXiv 1701.05369)

compared by Gale, Elsen, Hooker 2019, The State of Sparsity in Deep Neural Networks, arXiv 1902.09574, and here by
benchmarks/compress/sparsity.py: of 87.1 % accuracy on Fashion-MNIST an MLP with 90 % zeros loses 1.5 points (magnitude), 5.9 (random), 2.1
(l0) and 3.2 (variational), with 98 % zeros 4.4, 32.7, 6.7 and 9.0; errors are 0.3 or less, at 98 % 0.7, of random masks 2.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.sparse.gate import Gate
from shoestring.compression.sparse.gated import Gated, GatedWeight, attach, gated, masks_of, sparsity, without_gates
from shoestring.compression.sparse.hard_concrete import HardConcrete
from shoestring.compression.sparse.masks import kept_masks, seed_mask, seed_of
from shoestring.compression.sparse.schedule import SparsitySchedule, scheduled
from shoestring.compression.sparse.steering import margin, steered
from shoestring.compression.sparse.variational import Variational, has_local_noise
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.suggest import did_you_mean
from shoestring.data.feed import with_step_count
from shoestring.runs.initial_weights import valued

__all__ = ["Penalised", "dense_of", "masks_of", "seeds_of", "sparse_job", "sparsity"]

METHODS = ("magnitude", "random", "l0", "variational")
TRAINED = {"l0": 100.0, "variational": 5.0}  # methods whose gates are trained, and how many times as fast as weights
SCOPES = ("all", "layer")
SEED = "seed"  # buffer of a random mask's gate

# Buffers of the model
STEP = "sparse_step"  # training steps that began
END = "sparse_end"  # the step from which on its masks are final; 0: they never are, the method's rule says what is zero
PRESSURE = "sparse_pressure"  # what the mean penalty is multiplied with
FOUND = "sparse_found"  # the share of zeros by the method's own rule when the masks were fixed
BUFFERS = (STEP, END, PRESSURE, FOUND)


@dataclass(frozen=True)
class Method:
    """How a job's weights become sparse."""

    name: str
    schedule: SparsitySchedule
    scope: str = "all"  # of magnitudes: the share is one of all weights together, or of each layer
    seed: int = 0  # of random masks
    penalty: float = 0.0  # times the sum of penalties, in the loss; 0: steered, so that `share` comes out
    pace: float = 10.0  # how many times as fast as weights the gates are trained
    skip: tuple[str, ...] = ()

    @property
    def is_steered(self) -> bool:
        return self.name in TRAINED and not self.penalty


class Penalised(NamedTuple):
    """What the model of a sparse job gives: what the job's own gives, and what the loss has to pay."""

    output: Any
    penalty: Tensor  # 0 in evaluation
    sparsity: Tensor | None  # in evaluation: the share of zeros, if training ended now


def sparse_job(
    job: Job,
    method: str = "magnitude",
    share: float = 0.9,
    begin: float = 0.1,
    end: float = 0.7,
    every: int = 0,
    scope: str = "",
    seed: int | None = None,
    penalty: float = 0.0,
    pace: float = 0.0,
    skip: str = "",
    amount: float = 0.0,
    amount_of: str = "all",
) -> Job:
    """The job with `share` of its weights zero at its end.

    Until the share `begin` of its steps all weights are trained; from then to `end` more and more are zero, with masks made anew `every` so
    many steps (0: about a hundred times); after it the masks stay. Made sparse are the weights of layers that multiply (linear,
    convolutions, recurrent, attention); biases, norms and embeddings are not, but an embedding that is tied to such a layer is. The job's
    loss and metrics see what they would without it, metrics get `sparsity`, and the held-out loss has no penalty.

    scope     magnitude: the smallest of "all" weights go (the default), or of each "layer"
    seed      random: what the masks follow from (default: the job's)
    penalty   l0, variational: weight of the penalty in the loss, which is a mean over samples (the papers' is 1/N of N samples, times a
              factor). The share is what comes of it, and draws go on to the end. Default: steered so that exactly `share` is reached at
              `end`; from there on the weights that are left are trained without draws, as with the other methods
    pace      l0, variational: how many times as fast as weights the gates are trained, with Adam and its kin (default: 100 and 5, with
              which a few hundred steps at a rate of 0.001 were enough to close a gate)
    skip      names of weights or modules that stay as they are, or patterns of names, with commas between them
    amount    this share of the weights goes each time, until `share` is reached: amount=0.05, every=200 is 5 % every 200 steps; default:
              the cubic schedule, many early and few late. `amount_of`: of "all" weights that there were, or of those that are "left"

    The schedule counts steps of the optimizer in one process or in workers that step together. It is made for the job's steps as they are
    now: a job that is to be shorter or longer gets its steps before this. Weights of `Job(weights=...)` are loaded when the model is made.
    """
    how = checked(method, scope, penalty, pace)
    schedule = scheduled(share, steps_of(job), begin, end, every, amount, amount_of)
    skipped = tuple(one.strip() for one in skip.split(",") if one.strip())
    made = Method(
        method, schedule, how, job.seed if seed is None else seed, penalty, pace or TRAINED.get(method, 1.0), skipped
    )
    metrics = job.metrics
    return replace(
        job,
        model=lambda: with_gates(valued(job.model(), job) if job.weights else job.model(), made),
        weights="",
        forward=lambda model, batch: forward(made, job.forward, model, batch),
        loss=lambda output, batch: job.loss(output.output, batch) + output.penalty,
        metrics=(
            lambda output, batch: {"sparsity": output.sparsity, **(metrics(output.output, batch) if metrics else {})}
        )
        if job.held_out is not None or metrics is not None
        else None,
    )


def checked(method: str, scope: str, penalty: float, pace: float) -> str:
    """The scope; what does not fit the method is refused."""
    if method not in METHODS:
        raise Mistake(f"method={method!r}: there are {', '.join(METHODS)}{did_you_mean(method, list(METHODS))}")
    if scope and (method != "magnitude" or scope not in SCOPES):
        why = (
            f"give one of {', '.join(SCOPES)}"
            if method == "magnitude"
            else "only magnitudes have one: random masks are those of each layer, and trained gates find the layers' shares themselves"
        )
        raise Mistake(f"scope={scope!r} with method={method!r}: {why}")
    if penalty and (method not in TRAINED or penalty < 0):
        why = (
            "only l0 and variational have one"
            if method not in TRAINED
            else "give more than 0, or none to have it steered"
        )
        raise Mistake(f"penalty={penalty} with method={method!r}: {why}")
    if pace < 0 or (pace and method not in TRAINED):
        raise Mistake(
            f"pace={pace} with method={method!r}: the gates of l0 and variational are trained so many times as fast as weights: "
            f"give more than 0, such as 10, to one of them"
        )
    return scope or "all"


def steps_of(job: Job) -> int:
    """How many steps a job takes, which a schedule must know."""
    found = with_step_count(job).steps
    if not found:
        raise Mistake(
            "the job says epochs, and its data do not tell how many steps make one, so that no schedule of pruning can be made: "
            "give the Job steps=..."
        )
    return found


def with_gates(model: nn.Module, method: Method) -> nn.Module:
    """The model with a gate on each of its weights that becomes sparse."""
    taken = [name for name in BUFFERS if hasattr(model, name)]
    if taken:
        raise Mistake(
            f"the model {type(model).__name__} has something called {taken[0]!r}: it is that of a sparse job already"
        )

    def gate(name: str, weight: Tensor, places: tuple[GatedWeight, ...]) -> Gate:
        if method.name == "l0":
            return HardConcrete(weight, method.pace)
        if method.name == "variational":
            layer = places[0].layer
            return Variational(weight, method.pace, layer if len(places) == 1 and has_local_noise(layer) else None)
        plain = Gate(weight)
        if method.name == "random":
            plain.register_buffer(SEED, torch.tensor(seed_of(method.seed, name)))
        return plain

    attach(model, gate, method.skip)
    model.register_buffer(STEP, torch.zeros((), dtype=torch.int64))
    model.register_buffer(END, torch.tensor(0 if method.penalty else method.schedule.end))
    if method.name in TRAINED:
        for name, first in ((PRESSURE, 1.0), (FOUND, 0.0)):
            model.register_buffer(name, torch.tensor(first, dtype=torch.float64))
    return model


def forward(method: Method, own: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch) -> Penalised:
    """The job's own forward, with all gates as they are to be in this step."""
    there = gated(model)
    nothing = next(iter(there.values())).weight.new_zeros(())
    if not model.training:
        output = own(model, batch)
        with torch.no_grad():
            kept = torch.stack([one.gate.kept(one.weight).sum() for one in there.values()]).sum()
            return Penalised(output, nothing, 1 - kept / sum(one.weight.numel() for one in there.values()))
    step = begin_step(method, model, there)
    for one in there.values():
        one.gate.noisy = not method.is_steered or step < method.schedule.end
        one.gate.draw()
    output = own(model, batch)
    for name, one in there.items():
        one.gate.check_used(name)
    return Penalised(output, penalty(method, model, there, step) if method.name in TRAINED else nothing, None)


def begin_step(method: Method, model: nn.Module, there: Mapping[str, Gated]) -> int:
    """The number of the step that a forward is part of. Masks that are due with it are made.

    A batch in pieces is several forwards: in the first of them no weight has a gradient yet.
    """
    counter: Any = getattr(model, STEP)
    if torch.is_grad_enabled() and all(one.weight.grad is None for one in there.values()):
        counter += 1
        if method.schedule.due(int(counter)):
            with torch.no_grad():
                update_masks(method, model, there, int(counter))
    return int(counter)


def update_masks(method: Method, model: nn.Module, there: Mapping[str, Gated], step: int) -> None:
    """What the schedule asks for when this step begins."""
    share = method.schedule.share_at(step)
    if method.name == "random":
        for one in there.values():
            seed: Any = getattr(one.gate, SEED)
            one.gate.fix(seed_mask(one.weight.shape, share, int(seed)).to(one.weight.device), one.weight)
        return
    scores = [one.gate.scores(one.weight) for one in there.values()]
    if method.name == "magnitude":
        fix(there, kept_masks(scores, share, method.scope == "layer"))
    elif method.is_steered:
        pressure: Any = getattr(model, PRESSURE)
        pressure.fill_(steered(float(pressure), margin(scores, share), method.schedule.updates))
        if step == method.schedule.end:
            found: Any = getattr(model, FOUND)
            found.fill_(sparsity({name: one.gate.kept(one.weight) for name, one in there.items()}))
            fix(there, kept_masks(scores, share, each=False))


def fix(there: Mapping[str, Gated], masks: list[Tensor]) -> None:
    for one, mask in zip(there.values(), masks, strict=True):
        one.gate.fix(mask, one.weight)


def penalty(method: Method, model: nn.Module, there: Mapping[str, Gated], step: int) -> Tensor:
    """What the loss has to pay in this step.

    Given, its weight grows evenly from nothing at the schedule's begin to all of it at its end; steered, it is a mean over weights. When
    masks are final it is nothing, and still depends on the gates: a parameter without a gradient is not what all optimizers expect.
    """
    whole = torch.stack([one.gate.penalty(one.weight) for one in there.values()]).sum()
    if not method.is_steered:
        return method.penalty * method.schedule.progress(step) * whole
    pressure: Any = getattr(model, PRESSURE)
    weight = float(pressure) if method.schedule.begin < step < method.schedule.end else 0.0
    return weight / sum(one.weight.numel() for one in there.values()) * whole


def seeds_of(model: nn.Module) -> dict[str, int]:
    """Of a model with random masks, the seed of each weight's: `seed_mask(shape, share, seed)` makes it again."""
    found = {name: getattr(one.gate, SEED, None) for name, one in gated(model).items()}
    if None in found.values():
        raise Mistake("the masks of this model do not follow from a seed: only those of method='random' do")
    return {name: int(seed) for name, seed in found.items() if seed is not None}


def dense_of(model: nn.Module, unfinished: bool = False) -> nn.Module:
    """The trained model of a sparse job as an ordinary one, a copy with zeros: no gates, the names of its weights as they were before.

    A model that has not got to its final masks is refused unless `unfinished`.
    """
    gated(model)  # a model without is refused
    step, end = int(getattr(model, STEP)), int(getattr(model, END))
    if step < end and not unfinished:
        raise Mistake(
            f"the model was trained for {step} steps, and its masks are final from step {end} on: "
            f"{sparsity(masks_of(model)):.4f} of its weights are zero so far; train on, or take it as it is with unfinished=True"
        )
    made = without_gates(model)
    for name in BUFFERS:
        if hasattr(made, name):
            delattr(made, name)
    return made
