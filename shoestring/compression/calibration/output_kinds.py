"""Infer what kind of output each model output is (class logits, binary logits, regression, embedding), by watching what
the job's loss and metrics do with it.

The forward pass, the loss and the metrics run once on a few samples, and calls of telling functions are recorded with
their input: `cross_entropy` means class logits and gives their axis, `binary_cross_entropy_with_logits` means binary
logits, `mse_loss` a regression, `normalize` an embedding. Autograd shows to which output such an input belongs: if an
element's gradient is nonzero at exactly one position of an output, it *is* that element, whatever views, slices and
casts lie between. Two neighbours along the function's class axis show which axis of the output that is. Tensors that
mix elements (a similarity matrix) tell nothing.
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

from shoestring.compression.calibration.fidelity import (
    BINARY,
    COSINE,
    KL,
    MEASURES,
    R2,
    OutputMeasure,
    are_probabilities,
    collect_outputs,
    feature_axis,
    measure_from_values,
    with_variance,
)
from shoestring.compression.calibration.loss_behaviour import behaviour_of
from shoestring.compression.calibration.model_outputs import Outputs, compared_names, named_tensors, uncompared_names
from shoestring.compression.calibration.probe import first_samples
from shoestring.compression.calibration.scratch import trim
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running import random_state

AUTO = "auto"
FEW = 8  # samples on which the loss is watched
FEWEST = 2  # samples tried first if outputs are large
LARGE = 1 << 20  # elements of a batch's outputs that count as large: watching keeps several copies and all activations
ELEMENTS = 4  # elements of a tensor traced back to an output, if the first ones have no gradient


class OutputKind(NamedTuple):
    """What a function's input is. `axis`: the class axis; None: the function's `dim` argument."""

    measure: str
    axis: int | None = -1
    loss: bool = False  # the function is a loss: inside the forward pass only losses are recorded
    probabilities: bool = False


CLASSES, YES_OR_NO, NUMBERS = OutputKind(KL, 1, True), OutputKind(BINARY, -1, True), OutputKind(R2, -1, True)
SOFTMAX, SIGMOID, DIRECTION = OutputKind(KL, None), OutputKind(BINARY), OutputKind(COSINE, None)
KIND_BY_FUNCTION: dict[Any, OutputKind] = {
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
MAGNITUDES = {
    torch.pow,
    Tensor.pow,
    Tensor.__pow__,
    torch.square,
    Tensor.square,
    torch.abs,
    Tensor.abs,
}  # of a difference: a regression
THRESHOLDS = {torch.gt, Tensor.gt, Tensor.__gt__, torch.ge, Tensor.ge, Tensor.__ge__}  # a threshold: a binary decision
LOGARITHMS = {torch.log, Tensor.log}  # of 1 - p, where p is the probability of the positive class
DEFAULT_DIM = {functional.cosine_similarity: 1, functional.normalize: 1}


@dataclass(frozen=True)
class NotedUse:
    """A tensor that was passed to a telling function, and the kind that this implies."""

    tensor: Tensor
    kind: OutputKind
    axis: int
    said_by: str


class LossWatcher(TorchFunctionMode):
    """Record the tensors passed to telling functions inside the context. `inside_model`: record losses only."""

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
        kind = KIND_BY_FUNCTION.get(function)
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
        if function in MAGNITUDES and isinstance(first, Tensor) and type(first.grad_fn).__name__ == "SubBackward0":
            return OutputKind(R2)
        if function in LOGARITHMS and isinstance(first, Tensor) and is_one_minus(first):
            return OutputKind(BINARY, -1, False, True)
        threshold = args[1] if function in THRESHOLDS and len(args) > 1 else None
        return SIGMOID if isinstance(threshold, (int, float)) and threshold in (0, 0.5) else None


def is_one_minus(tensor: Tensor) -> bool:
    """Whether it is 1 - p, of probabilities p, perhaps plus a small number or clamped."""
    if not tensor.numel() or float(tensor.min()) < -0.01 or float(tensor.max()) > 1.01:
        return False
    made = tensor.grad_fn
    if type(made).__name__ in ("AddBackward0", "ClampBackward1", "ClampMinBackward0") and made is not None:
        made = made.next_functions[0][0]
    return type(made).__name__ == "RsubBackward1"


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
    """How to compare each output, and notes for the user. `measure`, `axis`: override what is inferred."""
    if measure not in (AUTO, *MEASURES):
        raise Mistake(f"fidelity is measured as {', '.join((AUTO, *MEASURES))}, not as {measure!r}")
    with torch.no_grad():
        first = job.forward(model, batches[0])
    names, notes = compared_names(first, wanted), []
    if (rest := uncompared_names(first, names)) and not wanted:
        notes.append(f"not compared, because they are internal states: {', '.join(rest)}; choose outputs with --output")
    large = sum(one.numel() for _, one in named_tensors(first)) >= LARGE
    del first  # a language model's logits may be as large as all its weights
    found: dict[str, OutputMeasure] = {}
    if measure == AUTO:
        try:
            found = watch_few_samples(job, model, batches[0], names, large)
        except Exception as error:  # data without labels, or a forward without gradients: infer from values alone
            notes.append(
                f"how outputs are compared was inferred from their values alone, because the job's loss could not be watched "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            )
    by_values = measure == R2 or (
        measure == AUTO and any(name not in found or found[name].measure == R2 for name in names)
    )
    said = some_outputs(model, job, batches if by_values else batches[:1], names)
    made = []
    for name in names:
        mine = [one[name] for one in said]
        if measure != AUTO:
            how = OutputMeasure(name, measure, feature_axis(mine[0]), "as asked for")
        else:
            how = found.get(name) or measure_from_values(name, mine)
        made.append(add_value_statistics(replace(how, axis=validated_axis(how, mine[0], axis)), mine, found.get(name)))
    trim()
    return tuple(made), tuple(notes)


def some_outputs(model: nn.Module, job: Job, batches: Sequence[Batch], names: Sequence[str]) -> list[Outputs]:
    """The outputs of batches; if those of all would be large, of the first samples of each, and only these are run."""
    measures = [OutputMeasure(name, COSINE) for name in names]
    found: list[Outputs] = []
    few: int | None = None  # samples of each batch
    for batch in batches:
        some = batch if few is None else first_samples(batch, few)
        found += collect_outputs(model, job.forward, [some], measures)
        if len(found) == 1 and (share := LARGE / (numbers_in(found[0]) * len(batches))) < 1:
            few = max(1, int(share * max((len(one) for one in found[0].values() if one.dim()), default=1)))
        if few is not None:
            found[-1] = {name: one[:few].clone() if one.dim() else one for name, one in found[-1].items()}
    return found


def numbers_in(outputs: Outputs) -> int:
    return max(sum(one.numel() for one in outputs.values()), 1)


def add_value_statistics(how: OutputMeasure, said: Sequence[Tensor], watched: OutputMeasure | None) -> OutputMeasure:
    """Add what the values tell: variances for r2, and whether outputs are probabilities rather than logits."""
    if (
        how.measure in (R2, BINARY)
        and said[0].dim() > 1
        and said[0].shape[how.axis] > 1
        and are_probabilities(said, how.axis)
    ):
        return (
            replace(
                how,
                measure=KL,
                probabilities=True,
                why=f"probabilities that add up to 1{f', though {how.why}' * (how.measure == R2)}",
            )
            if watched is not None
            else how
        )
    if how.measure == R2:
        return with_variance(how, said)
    if how.measure == BINARY and watched is None and all(bool(((one >= 0) & (one <= 1)).all()) for one in said):
        return replace(how, probabilities=True)
    return replace(how, probabilities=True) if how.measure == KL and are_probabilities(said, how.axis) else how


def validated_axis(how: OutputMeasure, tensor: Tensor, asked: int | None) -> int:
    axis = how.axis if asked is None else asked
    if not -tensor.dim() <= axis < max(tensor.dim(), 1):
        raise Mistake(f"--axis {axis}: the output {how.name} has {tensor.dim()} dimensions, {list(tensor.shape)}")
    if how.measure in (KL, COSINE) and (not tensor.dim() or tensor.shape[axis] == 1):
        raise Mistake(
            f"the output {how.name} has the shape {list(tensor.shape)}, and {how.measure} compares vectors along axis {axis}, "
            f"which has size 1: use --fidelity r2, or binary for binary logits, or another --axis"
        )
    return axis


def watch_few_samples(
    job: Job, model: nn.Module, batch: Batch, names: Sequence[str], large: bool
) -> dict[str, OutputMeasure]:
    """Watch the loss on a few samples; if outputs are large, on even fewer, unless these do not settle every output."""
    if large:
        with suppress(Exception):
            found = watch_loss(job, model, first_samples(batch, FEWEST), names)
            if len(found) == len(names):
                return found
    return watch_loss(job, model, first_samples(batch, FEW), names)


def watch_loss(job: Job, model: nn.Module, batch: Batch, names: Sequence[str]) -> dict[str, OutputMeasure]:
    """The kinds of outputs that the loss or else the metrics reveal."""
    watch = LossWatcher()
    with random_state.fork_rng(), torch.enable_grad(), with_gradients(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # losses may warn about an incomplete batch
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
            linked = [(one, axis) for one in watch.noted if (axis := matching_axis(one, tensor)) is not None]
            if linked:
                found[name] = combine_uses(name, tensor, linked)
    if failed is not None and not found:
        raise failed
    for name, how in by_behaviour(job, model, batch, [name for name in there if name not in found]):
        found[name] = how
    return {name: how for name, how in found.items() if how.measure in (BINARY, R2) or there[name].shape[how.axis] > 1}


def by_behaviour(job: Job, model: nn.Module, batch: Batch, names: Sequence[str]) -> Iterator[tuple[str, OutputMeasure]]:
    """The kinds of outputs of which no telling function was called, by what the loss and the metrics do not notice."""
    if not names:
        return
    with random_state.fork_rng(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = job.forward(model, batch)

        def outcomes() -> list[float]:
            with random_state.fork_rng():
                found = [float(job.loss(output, batch))]
                metrics = job.metrics(output, batch) if job.metrics is not None else {}
            return found + [float(one) for one in metrics.values()]

        for name, tensor in named_tensors(output):
            with suppress(Exception):  # the loss refuses changed numbers, or the output can't be changed in place
                if name in names and (told := behaviour_of(tensor, outcomes)) is not None:
                    axis = told.axis if told.measure in (KL, COSINE) else feature_axis(tensor)
                    yield name, OutputMeasure(name, told.measure, axis, told.why)


def combine_uses(name: str, tensor: Tensor, linked: Sequence[tuple[NotedUse, int]]) -> OutputMeasure:
    """Combine what several functions imply for one output or its slices: the first counts, unless losses disagree."""
    losses = {one.kind.measure: one.said_by for one, _ in linked if one.kind.loss}
    if len(losses) > 1:
        return OutputMeasure(
            name, R2, feature_axis(tensor), f"its parts are of different kinds: {', '.join(losses.values())}"
        )
    first, axis = linked[0]
    how = OutputMeasure(name, first.kind.measure, axis, first.said_by, first.kind.probabilities)
    return how if how.measure in (KL, COSINE) else replace(how, axis=feature_axis(tensor))


def matching_axis(one: NotedUse, output: Tensor) -> int | None:
    """The output's axis that corresponds to the function's axis; None if the function's input is not made of elements
    of this output."""
    if one.tensor is output:
        return one.axis % output.dim() - output.dim() if output.dim() else None
    if not (one.tensor.requires_grad and output.requires_grad and one.tensor.numel() and output.dim()):
        return None
    along = one.axis % one.tensor.dim()
    for begin in list(positions_with_neighbour(one.tensor, along))[:ELEMENTS]:
        here = source_position(one.tensor[begin], output)
        if here is None:
            continue
        if one.tensor.shape[along] == 1:
            return -1
        there = source_position(one.tensor[tuple(place + (axis == along) for axis, place in enumerate(begin))], output)
        moved = [axis for axis in range(output.dim()) if there is not None and here[axis] != there[axis]]
        if len(moved) == 1:
            return moved[0] - output.dim()
    return None


def positions_with_neighbour(tensor: Tensor, along: int) -> Iterator[tuple[int, ...]]:
    """Positions in a tensor that have a neighbour along an axis."""
    size = torch.Size(1 if axis == along else length for axis, length in enumerate(tensor.shape))
    for number in range(min(size.numel(), ELEMENTS)):
        yield tuple(int(place) for place in torch.unravel_index(torch.tensor(number), size))


def source_position(element: Tensor, output: Tensor) -> tuple[int, ...] | None:
    """The position in the output that an element is a copy of; None if it depends on none or several."""
    slope = torch.autograd.grad(element, output, retain_graph=True, allow_unused=True)[0]
    places = torch.nonzero(slope) if slope is not None else None
    return tuple(map(int, places[0])) if places is not None and len(places) == 1 else None


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Set requires_grad on all weights inside the context."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        yield
    finally:
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)
