"""Whether a way of training gives what the plain loop does, by trying both on a few real devices."""
from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoestring.core import random_state
from shoestring.federated.cohort.sequential import Sequential, load
from shoestring.federated.cohort.way import Moved, Unsuitable, Way
from shoestring.federated.device_errors import kind_of
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.memory.block_state import BlockState, FrozenTensor

CLOSE = 1e-5      # largest difference, relative to the size of a device's update
EPS = torch.finfo(torch.float32).eps
STEPS = 3         # of every device that are tried,
BATCHES = 2.5     # with so many batches of records: one is short
ATTEMPTS = 3      # from other weights: where a maximum or a ReLU is decided by the last bit, one attempt says nothing

DROPOUTS = {nn.functional.dropout, nn.functional.dropout1d, nn.functional.dropout2d, nn.functional.dropout3d, nn.functional.alpha_dropout,
            nn.functional.feature_alpha_dropout, torch.dropout}


class Said(NamedTuple):
    reason: str = ""      # why the way can't be used; empty: it can
    draws: bool = False   # it draws other random numbers than the plain loop


class NoDropout(TorchFunctionMode):
    """While inside, dropout gives what it was given."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is nn.functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)


def agreement(way: Way, plain: Sequential, devices: Sequence[Records]) -> Said:
    """Models with dropout are compared without it, because two ways that draw differently can't be compared otherwise."""
    if not devices:
        return Said("there is no device to try it on")
    some = [smaller(one, plain.job.local.batch) for one in devices]
    if keeps_something(plain, some[0]):
        return Said("the model keeps something from one call to the next, and many devices at once would make other calls")
    drawing = draws(plain, some[0])
    with NoDropout() if drawing else nullcontext():
        if drawing and draws(plain, some[0]):
            return Said("the model draws random numbers otherwise than by dropout, and would draw others")
        right, apart = [tried(plain, plain, some, attempt) for attempt in range(ATTEMPTS)], float("inf")
        try:
            for attempt, one in enumerate(right):
                if not apart <= CLOSE:
                    apart = distance(tried(way, plain, some, attempt), one, begun(plain, attempt))
        except Unsuitable as why:
            return Said(str(why))
        except Exception as error:   # whatever a model does that can't be done for several at once
            return Said(kind_of(error))
    if not apart <= CLOSE:
        return Said(f"its updates differ from the plain loop's by {apart:.1g} of their size")
    return Said(draws=drawing)


def tried(way: Way, plain: Sequential, devices: Sequence[Records], attempt: int) -> Moved:
    """A few steps from weights that follow from the attempt's number."""
    row, local = begun(plain, attempt), plain.job.local
    some = replace(local, steps=min(local.steps or STEPS, STEPS))
    return way.moved(row.expand(len(devices), -1), devices, Objective(some), [attempt + 7 * place for place in range(len(devices))])


def begun(plain: Sequential, attempt: int) -> Tensor:
    with random_state.kept():
        random_state.seed(attempt)
        return plain.layout.row(plain.job.model())


def smaller(records: Records, batch: int) -> Records:
    most = max(int(batch * BATCHES), 1) if batch else records.count
    return replace(records, trained=records.trained[:most])


def try_forward(plain: Sequential, records: Records) -> None:
    """A forward in training."""
    batch = records.batch(records.trained[:2])
    with torch.no_grad():
        plain.job.loss(plain.job.forward(plain.model, batch), batch)


def begin(plain: Sequential) -> None:
    load(plain.layout, plain.model, plain.layout.row(plain.model), plain.beside)
    plain.model.train()


def keeps_something(plain: Sequential, records: Records) -> bool:
    """Whether a second forward leaves the model other than the first did; of a batch norm's statistics others know."""
    inside = {id(one) for one in plain.model.buffers()}
    with random_state.kept():
        begin(plain)
        try_forward(plain, records)
        before = BlockState(plain.model).picture()
        try_forward(plain, records)
    return any(not one.same() for one in before if not (isinstance(one, FrozenTensor) and id(one.tensor) in inside))


def draws(plain: Sequential, records: Records) -> bool:
    """Whether a forward in training draws random numbers."""
    with random_state.kept():
        begin(plain)
        before = torch.get_rng_state(), random.getstate()
        try_forward(plain, records)
        return not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()


def distance(found: Moved, right: Moved, start: Tensor) -> float:
    """The largest of all devices' |difference| / |update|, beyond what the plain loop itself rounds.

    It rounds its weights in every step, by up to half of EPS of each; where updates are small against weights, that is all one sees.
    """
    apart, size = (found.rows - right.rows).norm(dim=1), right.rows.norm(dim=1)
    rounded = EPS * start.norm() * right.steps
    return float(((apart - rounded).clamp_min(0) / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
