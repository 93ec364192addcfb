"""Whether the job's optimizer step can be divided: tried on small stand-in weights, never judged by its class.

An optimizer that divides by the norm of all gradients, counts its calls, or skips a step with any NaN gradient passes
none of these tests, and one that divides by each weight's norm fails the last. Nor can a step be divided if weights
share memory: moving one moves the other. Not found is coupling that begins after
more than LONG steps, or in large models only for weights of many numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn, optim

from shoestring.core.errors import error_sentence
from shoestring.core.job import Job
from shoestring.core.optimization.optimizer import takes_names
from shoestring.core.optimization.stepping import UNDIVIDED, StepDivision, Stepping, only, parameter_like
from shoestring.core.private import extent, without_modes
from shoestring.core.running import random_state

# Elementwise optimizers: known because their code was read. A subclass may do anything else, and is tried
ELEMENTWISE = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.Rprop,
)


BY_WEIGHT = (optim.Adafactor, optim.Muon, optim.SparseAdam)  # and these treat every weight independently


NUMBERS = 1 << 17  # of all stand-ins together: they have the weights' own sizes, or these halved until they are as few


WHOLE = 1 << 20  # the same where groups depend on sizes


TRIED = 200  # most weights that get a gradient in a trial; of more, these many are chosen evenly


LONG = 500  # steps of the trial for late effects; with the first and the last weight only


SCALES = (
    1.0,
    1e-3,
    30.0,
    1e-6,
    1e3,
    0.1,
    1e5,
    0.0,
)  # scales of gradients, step by step: clipping and skipping depend on them


ROUNDED = (
    1e-6  # tolerated difference, relative to a weight's movement, for another order of operations; HALF for 16 bits
)


HALF = 5e-2


class Untried(Exception):
    """The optimizer can't be tried on stand-ins; the text says why."""


Gradients = list[list[Tensor | None]]  # [step][weight]


History = list[list[Tensor]]  # [step][weight]: every weight before the first step and after each


def try_stepping(job: Job, optimizer: optim.Optimizer, model: nn.Module) -> Stepping:
    """How the job's optimizer step can be divided. `optimizer` is the model's; others like it are made for the
    trial."""
    if shared := weights_in_one_place(model):
        return Stepping(dict.fromkeys(StepDivision, shared))
    kind, own = type(optimizer).__name__, "step" not in vars(optimizer)  # own: its step was not replaced
    whole = {
        StepDivision.IN_PARTS: f"{kind} looks at whole weights, as far as is known, and parts of them would be stepped"
    }
    if own and type(optimizer) in (*ELEMENTWISE, *BY_WEIGHT):
        return UNDIVIDED if type(optimizer) in ELEMENTWISE else Stepping(whole)
    key = tuple((name, one.shape, one.dtype) for name, one in model.named_parameters() if one.requires_grad)
    if LAST and LAST[0][0] is job.optimizer and LAST[0][1] == key:
        return LAST[0][2]
    with random_state.fork_rng(), without_modes(), torch.enable_grad():
        try:
            reasons = SteppingTrial(job, optimizer, model).reasons()
        except Exception as error:
            told = str(error) if isinstance(error, Untried) else error_sentence(error)
            reasons = dict.fromkeys(
                StepDivision,
                f"{kind} could not be tried on small weights ({told}), so it is not known whether it steps "
                f"every weight by itself",
            )
    if not isinstance(
        optimizer, ELEMENTWISE
    ):  # its state for a weight may not have one number for each of the weight's
        reasons = whole | reasons
    LAST[:] = [(job.optimizer, key, Stepping(reasons))]
    return LAST[0][2]


def weights_in_one_place(model: nn.Module) -> str:
    """Which trained weight shares numbers with another weight or buffer, in words; empty if none does. A weight with two
    names is one weight."""
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    named = [*model.named_parameters(), *model.named_buffers()]
    places = sorted((*extent(one), name) for name, one in named if one.layout is torch.strided)
    for number, (_, end, one) in enumerate(places):
        inside = takewhile(lambda place, end=end: place[0] < end, places[number + 1 :])  # type: ignore[misc]
        for other in (name for _, _, name in inside if trained & {one, name}):
            return (
                f"{one} and {other} are two tensors in the same memory, so an update of one moves the other (to share a weight, "
                f"use the same nn.Parameter twice)"
            )
    return ""


# The last tried optimizer, with its weights and the result: plans are tried one after the other
LAST: list[tuple[object, object, Stepping]] = []


class SteppingTrial:
    """Optimizers of stand-ins, made by the job, and the results of stepping them in several ways."""

    def __init__(self, job: Job, optimizer: optim.Optimizer, model: nn.Module) -> None:
        self.job, self.kind, self.elementwise = job, type(optimizer).__name__, isinstance(optimizer, ELEMENTWISE)
        self.sparse = False  # whether gradients must be sparse
        self.weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
        names = {id(one): name for name, one in self.weights.items()}
        grouped = [[names[id(one)] for one in group["params"] if id(one) in names] for group in optimizer.param_groups]
        own = self.side = max((side for one in self.weights.values() for side in one.shape), default=1)
        while self.side > 1 and self.numbers() > NUMBERS:
            self.side //= 2
        if self.groups(*self.make_stand_ins()) != grouped:
            self.side = own
            if self.numbers() > WHOLE:
                raise Untried("its groups depend on the sizes of weights")
            if self.groups(*self.make_stand_ins()) != grouped:
                raise Untried("made again, it has other groups of weights")

    def numbers(self) -> int:
        """How many numbers the stand-ins have."""
        return sum(math.prod(min(side, self.side) for side in one.shape) for one in self.weights.values())

    def make_stand_ins(self) -> tuple[dict[str, nn.Parameter], optim.Optimizer]:
        """New stand-ins, always the same, and an optimizer for them."""
        chance = torch.Generator().manual_seed(0)
        stand_ins = {name: parameter_like(one, self.random(one, chance)) for name, one in self.weights.items()}
        random_state.seed(0)
        made = self.job.optimizer(list(stand_ins.items()) if takes_names(self.job) else list(stand_ins.values()))
        known = set(map(id, stand_ins.values()))
        if not all(id(one) in known for group in made.param_groups for one in group["params"]):
            raise Untried("it does not step the weights that it is given")
        return stand_ins, made

    def random(self, weight: Tensor, chance: torch.Generator) -> Tensor:
        """Random numbers in the shape of a weight's stand-in; in float64 instead of float32, so that differences beyond
        rounding show."""
        dtype = torch.float64 if weight.dtype is torch.float32 else weight.dtype
        return torch.randn([min(side, self.side) for side in weight.shape], dtype=dtype, generator=chance)

    def groups(self, stand_ins: Mapping[str, nn.Parameter], optimizer: optim.Optimizer) -> list[list[str]]:
        names = {id(one): name for name, one in stand_ins.items()}
        return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]

    def reasons(self) -> dict[StepDivision, str]:
        """Why the step can't be divided; the first reason found for each kind."""
        found: dict[StepDivision, str] = {}
        for gradients, must in (
            (self.random_gradients(SCALES, self.spread_names(TRIED)), True),
            (self.gradients_with_nan(), False),
            (self.gradients_with_gap(), False),
            (self.random_gradients([1.0] * LONG, self.spread_names(2)), False),
        ):
            try:
                whole, drew = self.together(gradients)
            except Exception:
                if must and self.sparse:
                    raise
                if must:  # perhaps its gradients must be sparse
                    self.sparse = True
                    return self.reasons()
                continue  # plain training would end there too
            if drew:
                told = (
                    f"{self.kind} draws random numbers in its step, and other weights would get them if it were divided"
                )
                return dict.fromkeys(StepDivision, told)
            if must and (step := apart_from(whole, self.together(gradients)[0], exact=True)):
                told = f"{self.kind}, made anew, does something else in its step {step} than before: it keeps state outside of itself"
                return dict.fromkeys(StepDivision, told)
            for division, ways in self.ways(gradients).items():
                ways = ways[:1] if len(gradients) == LONG else ways
                if division not in found and (reason := self.difference(division, whole, ways)):
                    found[division] = reason
        return found

    def ways(self, gradients: Gradients) -> dict[StepDivision, list[Callable[[], History]]]:
        found: dict[StepDivision, list[Callable[[], History]]] = {
            StepDivision.IN_TURNS: [
                lambda: self.in_turns(gradients, freed=True),
                lambda: self.in_turns(gradients, freed=False),
            ],
            StepDivision.APART: [lambda: self.apart(gradients)],
        }
        return found | ({StepDivision.IN_PARTS: [lambda: self.in_parts(gradients)]} if self.elementwise else {})

    def difference(self, division: StepDivision, whole: History, ways: Sequence[Callable[[], History]]) -> str:
        """What a division changes, in words; empty if nothing."""
        how = {
            StepDivision.IN_TURNS: "one by one",
            StepDivision.APART: "half of them at a time",
            StepDivision.IN_PARTS: "in two parts each",
        }[division]
        for way in ways:
            try:
                step = apart_from(whole, way(), exact=division is StepDivision.IN_TURNS)
            except Exception as error:
                return f"{self.kind} fails where weights are stepped {how} ({error_sentence(error)})"
            if step:
                return (
                    f"{self.kind} moves weights to other values when they are stepped {how} than when they are stepped together (tried "
                    f"on small weights, from step {step} on): each step depends on more than the {PARTS[division]} that it moves"
                )
        return ""

    # Gradients

    def spread_names(self, count: int) -> list[str]:
        """`count` names of weights, evenly chosen, including the first and the last."""
        names = list(self.weights)
        count = min(count, len(names))
        return [names[round(number * (len(names) - 1) / max(count - 1, 1))] for number in range(count)]

    def random_gradients(self, scales: Sequence[float], names: Sequence[str]) -> Gradients:
        """Gradients for these weights, at a different scale for each; none for the others. In each step the second half
        of the weights has the next step's scale, for steps that depend on the largest gradient."""
        chance = torch.Generator().manual_seed(1)
        wanted, half = set(names), len(self.weights) / 2
        return [
            [
                self.random(one, chance) * pair[number >= half] * (1 + number % 5) if name in wanted else None
                for number, (name, one) in enumerate(self.weights.items())
            ]
            for pair in zip(scales, (*scales[1:], *scales[:1]), strict=True)
        ]

    def gradients_with_nan(self) -> Gradients:
        """Gradients of which one is NaN in the second step."""
        found = self.random_gradients([1.0] * 4, self.spread_names(TRIED))
        at = next(number for number, one in enumerate(found[1]) if one is not None)
        found[1][at] = torch.full_like(found[0][at], float("nan"))  # type: ignore[arg-type]
        return found

    def gradients_with_gap(self) -> Gradients:
        """Gradients of which one is missing in the second step."""
        found = self.random_gradients([1.0] * 4, self.spread_names(TRIED))
        found[1][next(number for number, one in enumerate(found[1]) if one is not None)] = None
        return found

    def copy_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient as it is given to a weight: a copy, because optimizers may change it."""
        return (
            None if gradient is None else gradient.to_sparse(1) if self.sparse and gradient.dim() else gradient.clone()
        )

    # Ways to step

    def together(self, gradients: Gradients) -> tuple[History, bool]:
        """All weights at once; and whether random numbers were drawn."""
        stand_ins, optimizer = self.make_stand_ins()
        before = torch.get_rng_state()
        weights = list(stand_ins.values())
        found = [now(weights)]
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = self.copy_gradient(gradient)
            optimizer.step()
            found.append(now(weights))
        return found, not torch.equal(before, torch.get_rng_state())

    def in_turns(self, gradients: Gradients, freed: bool) -> History:
        """One weight after the other. `freed`: from last to first, with never more than one gradient; else all
        gradients are there."""
        stand_ins, optimizer = self.make_stand_ins()
        group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        weights = list(stand_ins.values())
        found = [now(weights)]
        for step in gradients:
            pairs = list(zip(weights, step, strict=True))
            for weight, gradient in pairs:
                weight.grad = None if freed else self.copy_gradient(gradient)
            for weight, gradient in reversed(pairs) if freed else pairs:
                if gradient is None or id(weight) not in group_of:
                    continue
                weight.grad = self.copy_gradient(gradient)
                with torch.no_grad(), only(optimizer, weight, group_of[id(weight)]):
                    optimizer.step()
                weight.grad = None if freed else weight.grad
            found.append(now(weights))
        return found

    def apart(self, gradients: Gradients) -> History:
        """Half of the weights with one optimizer, the others with another."""
        middle, found = len(self.weights) // 2, []
        for begin, end in ((0, middle), (middle, len(self.weights))):
            stand_ins, optimizer = self.make_stand_ins()
            weights = list(stand_ins.values())
            own = [now(weights[begin:end])]
            mine = set(map(id, weights[begin:end]))
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if id(one) in mine]
            for step in gradients:
                for weight, gradient in zip(weights[begin:end], step[begin:end], strict=True):
                    weight.grad = self.copy_gradient(gradient)
                if mine:
                    optimizer.step()
                own.append(now(weights[begin:end]))
            found.append(own)
        return [[*first, *second] for first, second in zip(*found, strict=True)]

    def in_parts(self, gradients: Gradients) -> History:
        """The first half of every weight's numbers with one optimizer, the second half with another."""
        found = []
        for half in (0, 1):
            stand_ins, optimizer = self.make_stand_ins()
            parts = {
                id(one): parameter_like(one, one.detach().flatten().tensor_split(2)[half].clone())
                for one in stand_ins.values()
            }
            for group in optimizer.param_groups:
                group["params"] = [parts[id(one)] for one in group["params"] if parts[id(one)].numel()]
            own = [now(parts.values())]
            for step in gradients:
                for part, gradient in zip(parts.values(), step, strict=True):
                    part.grad = None if gradient is None else gradient.flatten().tensor_split(2)[half].clone()
                optimizer.step()
                own.append(now(parts.values()))
            found.append(own)
        shapes = [[min(side, self.side) for side in one.shape] for one in self.weights.values()]
        return [
            [torch.cat(pair).view(shape) for *pair, shape in zip(first, second, shapes, strict=True)]
            for first, second in zip(*found, strict=True)
        ]


PARTS = {StepDivision.IN_TURNS: "weight", StepDivision.APART: "weights", StepDivision.IN_PARTS: "numbers"}


def now(weights: Iterable[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def apart_from(whole: History, other: History, exact: bool) -> int:
    """The first step, from 1, after which weights differ in bits (`exact`) or by more than rounding; 0 if there is
    none."""
    for number, (before, after) in enumerate(zip(whole, other, strict=True)):
        for begun, one, two in zip(whole[0], before, after, strict=True):
            if not torch.allclose(one, two, 0.0, 0.0 if exact else rounding(begun, one), equal_nan=True):
                return number
    return 0


def rounding(begun: Tensor, weight: Tensor) -> float:
    """Tolerated difference of a weight for operations that are rounded in another order."""
    if not weight.numel():
        return 0.0
    way, largest = (float(one.abs().nan_to_num(0.0, 0.0, 0.0).amax()) for one in (weight - begun, weight))
    return (HALF if weight.dtype.itemsize == 2 else ROUNDED) * way + 4 * torch.finfo(weight.dtype).eps * largest
