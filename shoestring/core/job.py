"""A job: what the user wants trained. A job file is plain Python with one function `job(...) -> Job`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, samples, split
from shoestring.core.clients.local import Local, Partition
from shoestring.core.errors import Mistake
from shoestring.core.user_code.data_objects import factory_of
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import check_calls
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh, on_one_axis


@calls_user("model")
def default_forward(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


@calls_user("loss")
def default_loss(output: Any, batch: Batch) -> Tensor:
    """The loss a model brings along (`output.loss`, as in transformers), else cross entropy with batch[1]."""
    brought: Tensor | None = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if brought is not None:
        return brought
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(output, Tensor):
        return nn.functional.cross_entropy(output, batch[1])
    raise Mistake(
        "the job gives no loss, the model's output has none and the batch is not an (input, target) pair: "
        "add loss=lambda output, batch: ... to the Job"
    )


@calls_user("optimizer")
def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


USUAL_STEPS = 100  # for a job that gives neither steps nor epochs
UNSAID = -1


class Interval(NamedTuple):
    """How often something is done: every `number` of a unit."""

    number: float
    unit: str  # "steps", "epochs" or "seconds"


def interval(written: int | str) -> Interval:
    """
    >>> interval(100), interval("1 epoch"), interval("5m")
    (Interval(number=100.0, unit='steps'), Interval(number=1.0, unit='epochs'), Interval(number=300.0, unit='seconds'))
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*(|steps?|epochs?|s|m|h)\s*", str(written))
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or not number > 0:
        raise Mistake(
            f'every={written!r} in the Job: give steps (100), epochs ("1 epoch") or a time ("5m", "30s", "1h")'
        )
    if found[2] in SECONDS:
        return Interval(number * SECONDS[found[2]], "seconds")
    if number != int(number):
        raise Mistake(f"every={written!r} in the Job: steps and epochs are whole numbers")
    return Interval(number, "epochs" if found[2].startswith("epoch") else "steps")


SECONDS = {"s": 1, "m": 60, "h": 3600}


class Target(NamedTuple):
    """The metric that decides which weights are best."""

    metric: str
    most: bool  # whether larger is better

    def better(self, now: float, before: float | None) -> bool:
        """Whether a value is better than an earlier one; infinity and NaN never are."""
        return math.isfinite(now) and (before is None or (now > before if self.most else now < before))


def target(written: str) -> Target:
    """
    >>> target("max accuracy")
    Target(metric='accuracy', most=True)
    """
    way, _, metric = written.strip().partition(" ")
    if way not in ("max", "min") or not metric.strip():
        raise Mistake(
            f'goal={written!r} in the Job: say which way and which metric, such as "max accuracy" or "min loss"'
        )
    return Target(metric.strip(), way == "max")


@dataclass(frozen=True)
class Origin:
    """Where a job came from, so that another process can make it again."""

    file: str  # path of the job file
    flags: tuple[tuple[str, Any], ...] = ()  # the flags that were given
    arguments: tuple[
        tuple[str, Any], ...
    ] = ()  # all arguments of its function, with the values that it was called with


class Sampler(Protocol):
    """Chooses which samples of a map-style Dataset make a batch; see `data/samplers.py`."""

    @property
    def fills_batches(self) -> bool: ...  # whether every batch has as many samples as the job asks for
    def refusal(
        self, count: int, size: int
    ) -> str: ...  # why it can't make batches of `size` from `count` samples; empty if it can
    # Sample numbers of every batch from number `begin` on, without end; determined by the seed
    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]: ...
    def per_epoch(self, count: int, size: int) -> int: ...  # batches in one round of the samples


@dataclass(
    frozen=True, eq=False
)  # a user's objects are neither compared nor hashed: two jobs are equal if they are the same object
class Job:
    """What is to be trained, and how. `model` and `data` must be given; everything else has a default.

    What is trained
      model       a factory: `lambda: MyModel()`. Planning builds it without memory, so give a function, not a model
      weights     initial weights: a safetensors file, several of them, or a `Weights`, which can take a part of a file
      data        batches (a list, a DataLoader), a map-style data set (any object with `__len__` and `__getitem__`), or a function that
                  makes them. A list contains batches, or with `collate` samples; the same for held_out:
                  `collate=torch.utils.data.default_collate` makes batches of samples as torch does
      batch, sampler, collate, workers    how batches are made from a data set
      forward, loss, weight, split        how the model is called on a batch, what is minimised, what the loss averages over, and how
                  a batch is cut into pieces if its first dimension does not tell
      largest     a factory of the largest batch that the data can yield, if sizes vary; without it, it is searched for

    How it is trained
      optimizer   makes the optimizer from the parameters that need a gradient; if its argument's name begins with `named`, from pairs
                  of name and parameter
      schedule    makes a torch learning-rate scheduler: `lambda optimizer: ...` or `lambda optimizer, steps: ...`. It is stepped after
                  every step; in `PerEpoch(...)`, after every epoch; ReduceLROnPlateau, after every validation
      steps, epochs    when it ends: after so many steps or rounds of the data, whichever comes first; 100 steps if neither is given
      clip        largest global norm of the gradients
      seed        determines every random number

    How good it is
      held_out    batches, a data set, or a function that makes them: data for validation, not trained on
      metrics     `lambda output, batch: {"accuracy": ...}`: means over the batch; the loss is always measured
      validate    `lambda model: {"accuracy": ...}`, for metrics that are not means over batches
      every       when to validate: 100 (steps), "1 epoch" or "5m". It is also done at the end
      goal        "max accuracy" or "min loss": the best weights by this metric are kept
      patience    end after so many validations in a row without improvement; 0: never
      show        returns a text about the trained model to look at

    Where records lie on many devices (`shoestring federate`)
      clients     a factory of a mapping, device's name -> its records (a data set, or a list of samples), or a rule that divides `data`
                  among devices: `Dirichlet(0.3)`, `Iid()`, `ByColumn("author")`, `QuantitySkew()`
      local       what a device does in a round: `Local(epochs=1, batch=10, lr=0.05)`
      group       `lambda name: "tablet"`: the group of a device, for reports that compare groups

    How it answers requests (`shoestring serve`)
      answer      a generator function of a request's fields: it yields a sample, is handed the model's output for it, and returns the
                  answer: `def answer(text: str): output = yield tokenizer(text, return_tensors="pt"); return {...}`; see serving/sample.py
    """

    model: Callable[[], nn.Module]
    data: Any
    loss: Callable[[Any, Batch], Tensor] = default_loss
    forward: Callable[[nn.Module, Batch], Any] = default_forward
    weight: Callable[[Batch], float] = samples  # what the loss averages over
    # split(batch, n): the batch as a list of n batches whose weights add up to its own, for batches that can't be cut
    # along the first dimension of their tensors, such as graphs; `weight` must be given with it
    split: Callable[[Batch, int], Sequence[Batch]] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = default_optimizer
    batch: int = 8  # samples per step, used when data is a Dataset
    sampler: Sampler | None = None  # which samples of a Dataset make a batch; None: shuffled, each once per epoch
    steps: int = UNSAID  # 0 or unset: as many as `epochs` make; unset, and no epochs: 100
    seed: int = 0
    clip: float = 0.0  # largest global norm of the gradients; 0: no clipping
    weights: Any = ""  # initial weights, such as a safetensors file
    show: Callable[[nn.Module], str] | None = None  # a text about the trained model
    origin: Origin | None = None  # set when the job was read from a file
    mesh: Mesh = field(default_factory=on_one_axis)  # set when several workers train it
    epochs: int = 0  # rounds of the data; 0: limited by `steps` alone
    collate: Callable[[list[Any]], Batch] | None = None  # makes a batch of a Dataset's samples; None: torch's default
    workers: int = (
        0  # processes that fetch samples of a Dataset ahead; 0: fetched in this process, when they are needed
    )
    largest: Callable[[], Batch] | None = None
    schedule: Callable[..., Any] | None = None
    held_out: Any = None
    metrics: Callable[[Any, Batch], Mapping[str, Any]] | None = None
    validate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    every: int | str = "1 epoch"
    goal: str = "min loss"
    patience: int = 0
    clients: Callable[[], Mapping[str, Any]] | Partition | None = None
    local: Local = field(default_factory=Local)
    group: Callable[[str], str] | None = None
    answer: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.steps == UNSAID:
            object.__setattr__(self, "steps", 0 if self.epochs else USUAL_STEPS)
        for name, least in (("batch", 1), ("steps", 0), ("epochs", 0), ("clip", 0), ("workers", 0), ("patience", 0)):
            value, kind = getattr(self, name), Real if name == "clip" else Integral
            if not isinstance(value, kind):
                raise Mistake(
                    f"{name}={value!r} in the Job: give a {'whole ' * (kind is Integral)}number, such as {least + 1}"
                )
            if not float(value) >= least:  # also of NaN
                raise Mistake(f"{name}={value} in the Job: give {least} or more")
        check_calls(vars(self))
        object.__setattr__(self, "data", factory_of("data", self.data))
        if self.held_out is not None:
            object.__setattr__(self, "held_out", factory_of("held_out", self.held_out))
        if not self.steps and not self.epochs:
            raise Mistake("steps=0 and no epochs in the Job: give 1 step or more, or epochs=1")
        if self.held_out is not None and self.validate is not None:
            raise Mistake(
                "the Job has held_out and validate, which are two ways to say how good the model is: give one of them"
            )
        if (
            self.metrics is not None and self.held_out is None and self.clients is None
        ):  # devices hold out some of their own records
            raise Mistake(
                "the Job has metrics and no held_out: give held_out=lambda: batches to measure them on, or "
                "validate=lambda model: {...}"
            )
        if self.patience and not self.validates:
            raise Mistake(
                f"patience={self.patience} in the Job, and nothing says how good the model is: give held_out=lambda: batches"
            )
        interval(self.every), target(self.goal)  # raises a mistake in them now

    @property
    def validates(self) -> bool:
        return self.held_out is not None or self.validate is not None

    @property
    def counts_epochs(self) -> bool:
        """Whether anything in it depends on where an epoch ends."""
        return (
            bool(self.epochs) or (self.validates and interval(self.every).unit == "epochs") or self.schedule is not None
        )

    @property
    def link(self) -> Link:
        """The link to all workers."""
        return self.mesh.link

    def count(self, batch: Batch) -> int:
        """The number of parts a batch could be split into: samples, or its weight if the job splits it itself."""
        return samples(batch) if self.split is None else max(int(self.weight(batch)), 1)

    def pieces(self, batch: Batch, count: int) -> list[Batch]:
        """A batch in `count` pieces."""
        return split(batch, count) if self.split is None else check_pieces(self.split, self.weight, batch, count)


def check_pieces(
    own: Callable[[Batch, int], Sequence[Batch]], weight: Callable[[Batch], float], batch: Batch, count: int
) -> list[Batch]:
    """The pieces from a job's own split; refused unless they make up the batch."""
    try:
        found = own(batch, count)
    except Exception as error:
        raise Mistake(f"the job's split failed for {count} pieces: {type(error).__name__}: {error}") from error
    if not isinstance(found, (list, tuple)) or len(found) != count:
        gave = f"{len(found)} of them" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise Mistake(
            f"the job's split was asked for {count} pieces of a batch and gave {gave}: it must give a list of as many batches"
        )
    whole, parts = float(weight(batch)), sum(float(weight(piece)) for piece in found)
    if abs(whole - parts) > 1e-6 * max(abs(whole), abs(parts)):
        raise Mistake(
            f"the job's split gave {count} pieces with the weight {parts:g} of a batch with the weight {whole:g}: "
            f"every sample must be in one piece, and the job's weight must count them"
        )
    return list(found)
