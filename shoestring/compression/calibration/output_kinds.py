"""What kind of output each one is, found by watching what the job's loss and metrics do with it.

The forward, the loss and the metrics run once on a few samples. Functions that tell a kind are noted with the tensor that they were given:
`cross_entropy` tells classes and their axis, `binary_cross_entropy_with_logits` yes or no, `mse_loss` a regression, `normalize` a
direction. To which output such a tensor belongs is asked of autograd: an element of it whose gradient is at one place of an output *is*
that element of the output, whatever views, slices and casts lie between; two elements that are neighbours along the class axis of the
function show which axis of the output that is. A tensor in which elements are mixed (a matrix of similarities) tells nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoestring.compression.calibration.answers import compared_names, left_out, named_tensors
from shoestring.compression.calibration.fidelity import (
    BINARY,
    COSINE,
    KL,
    MEASURES,
    R2,
    OutputMeasure,
    are_probabilities,
    by_numbers,
    feature_axis,
    outputs,
    with_variance,
)
from shoestring.compression.calibration.scratch import trim
from shoestring.core import random_state
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job

AUTO = "auto"
FEW = 8  # samples that the loss is watched on,
FEWEST = 2  # and those that are tried first, where outputs of a batch are
LARGE = 1 << 20  # numbers or more: watching keeps several copies of them, and all that the model computed before
ELEMENTS = 4  # of a tensor that are followed back to an output, if the first have no gradient


class OutputKind(NamedTuple):
    """What a function says of the tensor that it is given. `axis`: that of classes; None: the function's own `dim`."""

    measure: str
    axis: int | None = -1
    loss: bool = False  # it is a loss: inside of a forward only those are noted
    probabilities: bool = False


CLASSES, YES_OR_NO, NUMBERS = OutputKind(KL, 1, True), OutputKind(BINARY, -1, True), OutputKind(R2, -1, True)
SOFTMAX, SIGMOID, DIRECTION = OutputKind(KL, None), OutputKind(BINARY), OutputKind(COSINE, None)
TOLD_BY: dict[Any, OutputKind] = {
    functional.cross_entropy: CLASSES,
    functional.nll_loss: CLASSES,
    functional.multi_margin_loss: CLASSES,
    functional.kl_div: OutputKind(KL, -1, True),
    functional.log_softmax: SOFTMAX,
    functional.softmax: SOFTMAX,
    torch.log_softmax: SOFTMAX,
    torch.softmax: SOFTMAX,
    Tensor.log_softmax: SOFTMAX,
    Tensor.softmax: SOFTMAX,
    torch.argmax: SOFTMAX,
    Tensor.argmax: SOFTMAX,
    functional.binary_cross_entropy_with_logits: YES_OR_NO,
    functional.soft_margin_loss: YES_OR_NO,
    functional.multilabel_soft_margin_loss: YES_OR_NO,
    functional.binary_cross_entropy: OutputKind(BINARY, -1, True, True),
    torch.sigmoid: SIGMOID,
    Tensor.sigmoid: SIGMOID,
    functional.sigmoid: SIGMOID,
    functional.logsigmoid: SIGMOID,
    functional.mse_loss: NUMBERS,
    functional.l1_loss: NUMBERS,
    functional.smooth_l1_loss: NUMBERS,
    functional.huber_loss: NUMBERS,
    functional.gaussian_nll_loss: NUMBERS,
    functional.poisson_nll_loss: NUMBERS,
    functional.cosine_similarity: DIRECTION,
    functional.cosine_embedding_loss: OutputKind(COSINE, -1),
    functional.normalize: DIRECTION,
}
SIZES = {
    torch.pow,
    Tensor.pow,
    Tensor.__pow__,
    torch.square,
    Tensor.square,
    torch.abs,
    Tensor.abs,
}  # of a difference: a regression
OVER = {torch.gt, Tensor.gt, Tensor.__gt__, torch.ge, Tensor.ge, Tensor.__ge__}  # a threshold: yes or no
DEFAULT_DIM = {functional.cosine_similarity: 1, functional.normalize: 1}


@dataclass(frozen=True)
class NotedUse:
    """A tensor that a function was given, and what that says of it."""

    tensor: Tensor
    kind: OutputKind
    axis: int
    said_by: str


class WatchedLoss(TorchFunctionMode):
    """While inside, notes the tensors that telling functions are given. `inside_model`: only losses count."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[NotedUse] = []
        self.inside_model, self.who = True, "the model's own loss"

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        given = [args[0] if args else named.get("input", named.get("x1"))]
        if function in (functional.cosine_similarity, functional.cosine_embedding_loss):
            given.append(args[1] if len(args) > 1 else named.get("x2", named.get("input2")))
        kind = TOLD_BY.get(function)
        if kind is None and not self.inside_model:
            kind = self.by_arithmetic(function, args)
        if kind is not None and (kind.loss or not self.inside_model):
            for one in given:
                if isinstance(one, Tensor) and one.is_floating_point() and one.dim():
                    axis = axis_of(function, kind, one, args, named)
                    self.noted.append(NotedUse(one, kind, axis, f"{self.who} calls {function.__name__}"))
        return function(*args, **named)

    def by_arithmetic(self, function: Any, args: tuple[Any, ...]) -> OutputKind | None:
        first = args[0] if args else None
        if function in SIZES and isinstance(first, Tensor) and type(first.grad_fn).__name__ == "SubBackward0":
            return OutputKind(R2)
        threshold = args[1] if function in OVER and len(args) > 1 else None
        return SIGMOID if isinstance(threshold, (int, float)) and threshold in (0, 0.5) else None


def axis_of(function: Any, kind: OutputKind, given: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    if kind.axis is not None:
        return min(kind.axis, given.dim() - 1)
    usual = DEFAULT_DIM.get(function, -1)
    place = 2 if function in DEFAULT_DIM else 1
    dim = named.get("dim", args[place] if len(args) > place else usual)
    return dim if isinstance(dim, int) and -given.dim() <= dim < given.dim() else -1


def measures_of(
    job: Job,
    model: nn.Module,
    batches: Sequence[Batch],
    wanted: Sequence[str] = (),
    measure: str = AUTO,
    axis: int | None = None,
) -> tuple[tuple[OutputMeasure, ...], tuple[str, ...]]:
    """How every output is compared, and what the user should know of it. `measure`, `axis`: in place of what is found."""
    if measure not in (AUTO, *MEASURES):
        raise Mistake(f"fidelity is measured as {', '.join((AUTO, *MEASURES))}, not as {measure!r}")
    with torch.no_grad():
        first = job.forward(model, batches[0])
    names, notes = compared_names(first, wanted), []
    if (rest := left_out(first, names)) and not wanted:
        notes.append(
            f"not compared, as they are states inside of the model: {', '.join(rest)}; --output names what is compared"
        )
    large = sum(one.numel() for _, one in named_tensors(first)) >= LARGE
    del first  # of a language model it may be as large as all weights
    found: dict[str, OutputMeasure] = {}
    if measure == AUTO:
        try:
            found = watched_on_few(job, model, batches[0], names, large)
        except (
            Exception
        ) as error:  # data without labels, a forward without gradients: then numbers alone say what suits them
            notes.append(
                f"how outputs are compared follows from their numbers alone: the job's loss could not be watched "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            )
    by_values = measure == R2 or (
        measure == AUTO and any(name not in found or found[name].measure == R2 for name in names)
    )
    said = outputs(
        model, job.forward, batches if by_values else batches[:1], [OutputMeasure(name, COSINE) for name in names]
    )
    made = []
    for name in names:
        mine = [one[name] for one in said]
        if measure != AUTO:
            how = OutputMeasure(name, measure, feature_axis(mine[0]), "as asked for")
        else:
            how = found.get(name) or by_numbers(name, mine)
        made.append(finished(replace(how, axis=checked_axis(how, mine[0], axis)), mine, found.get(name)))
    trim()
    return tuple(made), tuple(notes)


def finished(how: OutputMeasure, said: Sequence[Tensor], watched: OutputMeasure | None) -> OutputMeasure:
    """With what its numbers say beside: variances, and whether logits are probabilities already."""
    if how.measure == R2:
        return with_variance(how, said)
    if how.measure == BINARY and watched is None and all(bool(((one >= 0) & (one <= 1)).all()) for one in said):
        return replace(how, probabilities=True)
    return replace(how, probabilities=True) if how.measure == KL and are_probabilities(said, how.axis) else how


def checked_axis(how: OutputMeasure, tensor: Tensor, asked: int | None) -> int:
    axis = how.axis if asked is None else asked
    if not -tensor.dim() <= axis < max(tensor.dim(), 1):
        raise Mistake(f"--axis {axis}: the output {how.name} has {tensor.dim()} dimensions, {list(tensor.shape)}")
    if how.measure in (KL, COSINE) and (not tensor.dim() or tensor.shape[axis] == 1):
        raise Mistake(
            f"the output {how.name} is {list(tensor.shape)}, and {how.measure} compares vectors along axis {axis}, which has one "
            f"number: use --fidelity r2, or binary for logits of yes or no, or another --axis"
        )
    return axis


def few(batch: Batch, count: int) -> Batch:
    """About so many samples of a batch; all of it, if it can't be cut."""
    try:
        return split(batch, max(1, samples(batch) // count))[0]
    except Mistake:
        return batch


def watched_on_few(
    job: Job, model: nn.Module, batch: Batch, names: Sequence[str], large: bool
) -> dict[str, OutputMeasure]:
    """The kinds of outputs that a few samples tell; more samples are watched where fewer do not tell all."""
    if large:
        with suppress(Exception):
            found = watched_kinds(job, model, few(batch, FEWEST), names)
            if len(found) == len(names):
                return found
    return watched_kinds(job, model, few(batch, FEW), names)


def watched_kinds(job: Job, model: nn.Module, batch: Batch, names: Sequence[str]) -> dict[str, OutputMeasure]:
    """The kinds of those outputs that the loss, or else the metrics, tell."""
    watch = WatchedLoss()
    with random_state.kept(), torch.enable_grad(), with_gradients(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a part of a batch
        with watch:
            output = job.forward(model, batch)
            there = {name: one for name, one in named_tensors(output) if name in names}
            watch.inside_model, watch.who = False, "the loss"
            failed: Exception | None = None
            try:
                job.loss(output, batch)
            except Exception as error:
                failed = error
            watch.who = "the metrics"
            if job.metrics is not None:
                job.metrics(output, batch)
        found: dict[str, OutputMeasure] = {}
        for name, tensor in there.items():
            linked = [(one, axis) for one in watch.noted if (axis := place_in(one, tensor)) is not None]
            if linked:
                found[name] = united(name, tensor, linked)
    if failed is not None and not found:
        raise failed
    return {name: how for name, how in found.items() if how.measure in (BINARY, R2) or there[name].shape[how.axis] > 1}


def united(name: str, tensor: Tensor, linked: Sequence[tuple[NotedUse, int]]) -> OutputMeasure:
    """What the functions that were given an output, or parts of it, say together: the first counts, unless parts are of different kinds."""
    losses = {one.kind.measure: one.said_by for one, _ in linked if one.kind.loss}
    if len(losses) > 1:
        return OutputMeasure(
            name, R2, feature_axis(tensor), f"parts of it are of different kinds: {', '.join(losses.values())}"
        )
    first, axis = linked[0]
    how = OutputMeasure(name, first.kind.measure, axis, first.said_by, first.kind.probabilities)
    return how if how.measure in (KL, COSINE) else replace(how, axis=feature_axis(tensor))


def place_in(one: NotedUse, output: Tensor) -> int | None:
    """The axis of an output that a function's axis is, if the tensor that it was given consists of elements of the output."""
    if one.tensor is output:
        return one.axis % output.dim() - output.dim() if output.dim() else None
    if not (one.tensor.requires_grad and output.requires_grad and one.tensor.numel() and output.dim()):
        return None
    along = one.axis % one.tensor.dim()
    for begin in list(first_places(one.tensor, along))[:ELEMENTS]:
        here = origin(one.tensor[begin], output)
        if here is None:
            continue
        if one.tensor.shape[along] == 1:
            return -1
        there = origin(one.tensor[tuple(place + (axis == along) for axis, place in enumerate(begin))], output)
        moved = [axis for axis in range(output.dim()) if there is not None and here[axis] != there[axis]]
        if len(moved) == 1:
            return moved[0] - output.dim()
    return None


def first_places(tensor: Tensor, along: int) -> Iterator[tuple[int, ...]]:
    """Places of a tensor with a neighbour along an axis."""
    size = torch.Size(1 if axis == along else length for axis, length in enumerate(tensor.shape))
    for number in range(min(size.numel(), ELEMENTS)):
        yield tuple(int(place) for place in torch.unravel_index(torch.tensor(number), size))


def origin(element: Tensor, output: Tensor) -> tuple[int, ...] | None:
    """The one place of an output that an element follows from; None if it is none or several."""
    slope = torch.autograd.grad(element, output, retain_graph=True, allow_unused=True)[0]
    places = torch.nonzero(slope) if slope is not None else None
    return tuple(map(int, places[0])) if places is not None and len(places) == 1 else None


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """While inside, the model's weights need gradients."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        yield
    finally:
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)
