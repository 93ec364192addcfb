"""Calibration: what is known of a model before it is compressed: how it uses its weights, and the damage of each
storage option.

Calibration runs some batches once and records outputs, and second moments of the inputs of every weight. The damage of
a format is then

    error = sum over rows of (w - q) M (w - q)^T      the change of the layer's output, by arithmetic
    damage = sensitivity * error                      of the model's outputs; the sensitivity of each weight is measured once

For formats that an allocation uses, the damage itself is measured: the model runs with this one weight stored in that
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shoestring.compression.calibration.expected_damage import LogitErrors, join_rows
from shoestring.compression.calibration.fidelity import (
    Fidelity,
    FidelitySums,
    Forward,
    OutputFidelity,
    OutputMeasure,
    collect_outputs,
    fidelity,
    vectors_in,
)
from shoestring.compression.calibration.latency import LatencyTimer, latency_timer
from shoestring.compression.calibration.model_outputs import Outputs
from shoestring.compression.calibration.moments import SecondMoment
from shoestring.compression.calibration.probe import first_samples, join_if_equivalent
from shoestring.compression.calibration.scratch import Scratch, trim
from shoestring.compression.calibration.storage_choice import StorageChoice
from shoestring.compression.calibration.weight_usage import Usage, Weight, record_usage, weights_of
from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat, matrix_shape
from shoestring.compression.formats.manifest import Stored
from shoestring.compression.formats.packed_modules import temporary_formats
from shoestring.compression.formats.sparse import SparseFormat
from shoestring.compression.quantization.rounding import LARGEST, GridSetting, RoundedWeight, round_to_grid
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake

PROBE = GridSetting(4, 64)  # the grid used to measure a weight's sensitivity
PROBED, FEWEST = 32, 4  # least number of output vectors, and of samples, on which single weights are tried
SHARE_OF_ROWS, FEWEST_ROWS, LOOKED_AT = (
    8,
    64,
    4096,
)  # errors are estimated from one row in 8, but from at least 64 and at most 4096 rows
NOTHING = 1e-12  # smaller damages are rounding errors of the outputs
AT_ONCE = 1 << 22  # numbers of a weight compared at once

Damages = tuple[float, ...]  # of every output
T = TypeVar("T")


class MadeOnce(Generic[T]):
    """A cache: values by key, made on first use."""

    def __init__(self) -> None:
        self.made: dict[str, T] = {}

    def __call__(self, key: str, make: Callable[[], T]) -> T:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@dataclass
class Calibration:
    """Calibration statistics of one model. `original`: the model to compare with, if this one was changed before.

    This is the one object here that caches: formats, damages and calibrations of smaller models are made on first use.
    Its users (`ModelCost`, the `cost` of techniques) are frozen and change nothing else in it.
    """

    model: nn.Module
    forward: Forward
    batches: Sequence[Batch]  # for calibration
    others: Sequence[
        Batch
    ]  # for measuring damages: rounding is fitted to the calibration batches, and looks too good there
    measures: tuple[OutputMeasure, ...]  # the measure of every output
    sample: Batch = None  # a single sample, used for timing
    timed: bool = True  # whether latencies are predicted; not if another program runs the result
    original: nn.Module | None = None
    ways: dict[tuple[str, str], StorageChoice] = field(
        default_factory=dict
    )  # keyed by the weight's name and a label of the format
    damages: dict[tuple[str, str], Damages] = field(default_factory=dict)  # measured damages, with the same keys
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # pruned weights -> mask of the kept numbers
    seed: int | None = None  # the seed that determines the masks, if they were drawn
    notes: tuple[str, ...] = ()  # what techniques left alone, and why
    edits: tuple[Mapping[str, Any], ...] = ()  # how this model was made from the original
    derived: MadeOnce[Calibration] = field(
        default_factory=MadeOnce
    )  # calibrations of models derived from this one, by technique

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch()

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return weights_of(self.model)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def too_large(self) -> dict[str, float]:
        """Weights with numbers beyond the range of float16 (the dtype of all scales and tables), with their largest
        number."""
        largest = {weight.name: float(self.values[weight.name].abs().max()) for weight in self.weights if weight.count}
        return {name: value for name, value in largest.items() if value > LARGEST}

    @cached_property
    def storable(self) -> tuple[Weight, ...]:
        """The weights that a technique may store in another format: those that have numbers, and none too large."""
        return tuple(weight for weight in self.weights if weight.count and weight.name not in self.too_large)

    @property
    def left_plain(self) -> tuple[str, ...]:
        """Weights left alone because of their numbers."""
        return tuple(
            f"{name} has numbers up to {value:.3g}, and float16 holds {LARGEST:,.0f} at most: it is stored as it is"
            for name, value in self.too_large.items()
        )

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages for the user: what techniques left alone, and why."""
        return (*self.notes, *self.left_plain)

    @cached_property
    def usage(self) -> dict[str, Usage]:
        """How weights are used, over all batches."""
        with torch.no_grad(), record_usage(self.model, self.weights, self.scratch) as usage:
            for batch in self.batches:
                self.forward(self.model, batch)
                trim()  # activations and patches, of different sizes for every layer
        return usage

    @cached_property
    def clock(self) -> LatencyTimer:
        """Measures the model's latency, and the additional time of packed weights."""
        return latency_timer(self.model, self.forward, self.sample, self.weights)

    @cached_property
    def probe(self) -> list[Batch]:
        """The batches on which single weights are tried: some samples of each, so that there are short ones and long ones. Where every
        token or pixel is compared, few samples are enough."""
        said = self.outputs([first_samples(self.others[0], 1)])[0]
        fewest = min(vectors_in(said[one.name], one) for one in self.measures)
        count = max(FEWEST, -(-PROBED // max(fewest, 1)))
        return join_if_equivalent(
            [first_samples(batch, max(1, count // len(self.others))) for batch in self.others[:count]], self.outputs
        )

    def outputs(self, batches: Sequence[Batch], model: nn.Module | None = None) -> list[Outputs]:
        """The outputs of the model, or of another one."""
        return collect_outputs(self.model if model is None else model, self.forward, batches, self.measures)

    def fidelity(self, found: Sequence[Outputs], wanted: Sequence[Outputs]) -> Fidelity:
        return fidelity(found, wanted, self.measures)

    def comparison(self, batches: Sequence[Batch], model: nn.Module, original: nn.Module) -> FidelitySums:
        """Compare the outputs of two models, with one batch in memory at a time."""
        found = FidelitySums(self.measures)
        for batch in batches:
            found.add(self.outputs([batch], model)[0], self.outputs([batch], original)[0])
        return found

    @cached_property
    def own_outputs(self) -> list[Outputs]:
        """The model's own outputs on the probe."""
        found = self.outputs(self.probe)
        if not same(found[0], self.outputs(self.probe[:1])[0]):
            raise Mistake(
                "the model gives different outputs when it is called again on the same batch, so the damage of compression can't be "
                "measured; in eval mode it must neither draw random numbers nor keep state"
            )
        return found

    @cached_property
    def base(self) -> Fidelity:
        """The fidelity of this model to the original, before any weight is stored in another format."""
        if self.original is None or self.original is self.model:
            return perfect_fidelity(self.measures)
        return self.comparison(self.others, self.model, self.original).fidelity

    # Formats

    def grids(self, weight: Weight, settings: Sequence[GridSetting]) -> list[str]:
        """Labels of a weight's grid formats. Their errors are estimated from some rows; a format is only made when
        needed."""
        made = [self.grid_storage(weight, setting) for setting in settings]
        missing = [
            (one, grid) for one, grid in zip(settings, made, strict=True) if (weight.name, grid[0]) not in self.ways
        ]
        if missing:
            errors = self.grid_errors(weight, [setting for setting, _ in missing])
            for (setting, grid), error in zip(missing, errors, strict=True):
                self.add(weight, grid, error, partial(self.rounded_form, weight, setting))
            trim()
        return [label for label, _ in made]

    def grid_errors(self, weight: Weight, settings: Sequence[GridSetting]) -> list[float]:
        """Errors of a weight on grids, estimated from some rows: rows are rounded independently."""
        some, times = self.some_rows(weight)
        few, mask = self.matrix(weight, self.values[weight.name])[some], self.mask(weight)
        rounded = round_to_grid(few, settings, self.moment(weight), None if mask is None else mask[some])
        if weight.dtype == torch.float32:
            inputs = 1 if self.moment(weight) is None else max(self.usage[weight.name].inputs, 1)
            return [times * one.error / inputs for one in rounded]
        shape = replace(weight, shape=tuple(few.shape))
        forms = (grid_form(shape, setting, one) for setting, one in zip(settings, rounded, strict=True))
        return [times * self.rows_error(weight, form.dense(), few) for form in forms]  # rounded once more to float16

    def some_rows(self, weight: Weight) -> tuple[slice, float]:
        """Evenly spread rows of a weight's matrix for estimating errors, and the number of rows that each stands for."""
        rows = self.shape(weight)[0]
        step = max(1, rows // min(max(FEWEST_ROWS, rows // SHARE_OF_ROWS), LOOKED_AT))
        return slice(None, None, step), rows / max(-(-rows // step), 1)

    def grid_storage(self, weight: Weight, setting: GridSetting) -> tuple[str, Stored]:
        return (
            f"grid {setting.bits}/{setting.group}",
            Stored(
                weight.names,
                GridFormat.kind,
                weight.shape,
                weight.dtype,
                grid_settings(setting, self.inputs_first(weight)),
            ),
        )

    def add(
        self, weight: Weight, what: tuple[str, Stored], error: float, make: Callable[[], WeightFormat]
    ) -> StorageChoice:
        is_the_weight = what[1].kind == PlainFormat.kind and not what[1].settings
        self.ways[weight.name, what[0]] = StorageChoice(what[1], error, make, None if is_the_weight else self.scratch)
        return self.ways[weight.name, what[0]]

    def form(self, weight: Weight, label: str, make: Callable[[], WeightFormat]) -> str:
        """The label of a weight in a format, which is made once."""
        if (weight.name, label) not in self.ways:
            form = make()
            stored = Stored(weight.names, form.kind, weight.shape, weight.dtype, form.settings)
            exact = form.kind == PlainFormat.kind and not form.settings
            self.add(weight, (label, stored), 0.0 if exact else self.error(weight, form), lambda: form).put_aside(form)
        return label

    def as_it_is(self, weight: Weight) -> str:
        """The label of the unchanged weight, which does no damage; for a pruned one, without its zeros."""
        plain = partial(PlainFormat.of, self.values[weight.name])
        make = partial(self.sparse_format, weight, PlainFormat.of) if weight.name in self.masks else plain
        label = self.form(weight, "plain", make)
        self.damages[weight.name, label] = self.nothing
        return label

    def sparse_format(self, weight: Weight, inner: Callable[[Tensor], WeightFormat]) -> WeightFormat:
        """A pruned weight: its mask (or the mask's seed), and the kept numbers in another format."""
        value, mask = self.values[weight.name], self.masks[weight.name]
        return (
            SparseFormat.of(value, inner, mask)
            if self.seed is None
            else SparseFormat.of_seed(value, inner, int(mask.sum()), self.seed)
        )

    def moment(self, weight: Weight) -> SecondMoment | None:
        """The second moment of its inputs, which correspond to the columns of its `matrix`; None if it is an embedding
        or used in an unknown way."""
        moment = self.usage[weight.name].moment
        if (
            moment is None
            or moment.columns != self.shape(weight)[1]
            or not bool(torch.isfinite(moment.diagonal()).all())
        ):
            return None
        return moment

    def rounded_form(self, weight: Weight, setting: GridSetting) -> WeightFormat:
        value = self.matrix(weight, self.values[weight.name])
        one = round_to_grid(value, [setting], self.moment(weight), self.mask(weight))[0]
        trim()
        return grid_form(weight, setting, one, self.inputs_first(weight))

    def inputs_first(self, weight: Weight) -> bool:
        """Whether it is multiplied as x W: then W^T is rounded, so that rows belong to outputs as for other weights."""
        usage = self.usage[weight.name]
        return usage.inputs_first and usage.moment is not None and weight.name not in self.masks

    def shape(self, weight: Weight) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of its matrix."""
        rows, columns = matrix_shape(weight.shape)
        return (columns, rows) if self.inputs_first(weight) else (rows, columns)

    def matrix(self, weight: Weight, value: Tensor) -> Tensor:
        """A weight, or a tensor of its shape, as a matrix of outputs by inputs."""
        flat = value.reshape(matrix_shape(weight.shape))
        return flat.T if self.inputs_first(weight) else flat

    def importance(self, weight: Weight) -> Tensor | None:
        """Mean squares of the numbers that a weight, shaped (first dimension, others), is multiplied with."""
        moment = self.moment(weight)
        if moment is None:
            return None
        found = moment.diagonal().clamp(min=0) / max(self.usage[weight.name].inputs, 1)
        return found[:, None] if self.inputs_first(weight) else found

    def mask(self, weight: Weight) -> Tensor | None:
        found = self.masks.get(weight.name)
        return None if found is None else self.matrix(weight, found)

    def error(self, weight: Weight, form: WeightFormat) -> float:
        """The error of a format in the metric of the weight's inputs; estimated from some rows, like those of grids."""
        some, times = self.some_rows(weight)
        mine, wanted = (self.matrix(weight, one)[some] for one in (form.dense(), self.values[weight.name]))
        return times * self.rows_error(weight, mine, wanted)

    def rows_error(self, weight: Weight, found: Tensor, wanted: Tensor) -> float:
        """The error in some rows of a weight's matrix."""
        moment, total = self.moment(weight), 0.0
        some = max(1, AT_ONCE // max(self.shape(weight)[1], 1))  # number of rows
        for one, other in zip(found.split(some), wanted.split(some), strict=True):
            off = (one - other).float()
            total += float(off.square().sum(dtype=torch.float64)) if moment is None else moment.error(off)
        return total / (1 if moment is None else max(self.usage[weight.name].inputs, 1))

    # Damage

    @property
    def nothing(self) -> Damages:
        return (0.0,) * len(self.measures)

    def damage(self, weight: Weight, label: str) -> Damages:
        """The damage of a format: measured, or estimated from the weight's sensitivity."""
        if (known := self.damages.get((weight.name, label))) is not None:
            return known
        if not weight.is_matrix:
            return self.together(label)
        error = self.ways[weight.name, label].error
        return tuple(one * error for one in self.sensitivity(weight))

    def sensitivity(self, weight: Weight) -> Damages:
        """Damage per unit of error."""
        label = f"grid {PROBE.bits}/{PROBE.group}"
        self.grids(weight, [PROBE])
        error = self.ways[weight.name, label].error
        return tuple(one / error for one in self.measure_damage(weight, label)) if error > 0 else self.nothing

    def measure_damage(self, weight: Weight, label: str) -> Damages:
        """The damage of storing this one weight in this format, measured on the probe."""
        key = weight.name, label
        if key not in self.damages:
            if not self.usage[weight.name].calls and not self.changes(weight):
                self.damages[key] = self.nothing
            else:
                wanted, form = self.own_outputs, self.ways[key].form  # before the weight is replaced
                with (
                    with_values(self.values[weight.name], form.dense())
                    if form.keeps_inputs
                    else temporary_formats(self.model, {weight.name: form})
                ):
                    found = self.fidelity_on_probe(wanted)
                self.damages[key] = tuple(one if one > NOTHING else 0.0 for one in found.damages)
        return self.damages[key]

    def fidelity_on_probe(self, wanted: Sequence[Outputs]) -> Fidelity:
        """Fidelity of the model as it is now to these outputs of the probe."""
        found, errors = FidelitySums(self.measures), self.logit_errors()
        for batch, one in zip(self.probe, wanted, strict=True):
            now = self.outputs([batch])[0]
            found.add(now, one)
            errors.add(now, one)
        return errors.expected(found.fidelity)

    def logit_errors(self) -> LogitErrors:
        return LogitErrors(self.measures, self.further_logits)

    @cached_property
    def further_logits(self) -> dict[str, Tensor]:
        """Logits of the model on the calibration batches."""
        return join_rows([self.outputs([batch])[0] for batch in self.batches], self.measures)

    def together(self, label: str) -> Damages:
        """The damage of vectors (biases, norms): too small to measure one by one, so all in this format are measured
        together, and the result is divided among them."""
        if ("", label) not in self.damages:
            vectors = [weight for weight in self.weights if not weight.is_matrix and (weight.name, label) in self.ways]
            wanted = self.own_outputs
            with ExitStack() as stack:
                for weight in vectors:
                    stack.enter_context(
                        with_values(self.values[weight.name], self.ways[weight.name, label].form.dense())
                    )
                found = self.fidelity_on_probe(wanted)
            self.damages["", label] = tuple(max(one, 0.0) / max(len(vectors), 1) for one in found.damages)
        return self.damages["", label]

    def changes(self, weight: Weight) -> bool:
        """Whether a weight that no known function used changes the outputs (a custom operation, the weights of an
        LSTM)."""
        return self.matters[weight.name]

    @cached_property
    def matters(self) -> dict[str, bool]:
        """For every weight, whether outputs have a gradient with respect to it, or change when it does."""
        found, wanted = {}, self.own_outputs
        for weight in self.weights:
            if self.usage[weight.name].calls:
                found[weight.name] = True
                continue
            with with_values(self.values[weight.name], self.values[weight.name] * 1.5 + 0.01):
                found[weight.name] = not same(self.outputs(self.probe[:1])[0], wanted[0])
        return found


def perfect_fidelity(measures: Sequence[OutputMeasure]) -> Fidelity:
    """The fidelity of an unchanged model."""
    return Fidelity(1.0, 1.0, 0, tuple(OutputFidelity(one.name, one.measure, 1.0, 1.0, 0, 0, None) for one in measures))


def same(one: Outputs, other: Outputs) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def grid_settings(setting: GridSetting, transposed: bool) -> dict[str, Any]:
    return {"bits": setting.bits, "group": setting.group} | ({"transposed": True} if transposed else {})


def grid_form(weight: Weight, setting: GridSetting, one: RoundedWeight, transposed: bool = False) -> WeightFormat:
    return GridFormat.of(
        one.codes, one.scales, one.zeros, setting.bits, setting.group, weight.shape, weight.dtype, transposed
    )


@contextmanager
def with_values(weight: Tensor, value: Tensor) -> Iterator[None]:
    """While inside, a weight has other numbers. It stays the same parameter, so all references see them."""
    before = weight.data
    weight.data = value.to(weight.dtype)
    try:
        yield
    finally:
        weight.data = before
