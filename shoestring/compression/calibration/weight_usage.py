"""A model's weights, and how its forward pass uses them: by which operators, and with which activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.compression.calibration.moments import SecondMoment
from shoestring.compression.calibration.scratch import Scratch
from shoestring.compression.formats.grid import matrix_shape
from shoestring.compression.formats.manifest import DTYPES
from shoestring.core.errors import Mistake
from shoestring.core.private import DispatchMode, own_parameters

ROWS = 4096  # input rows per call used for second moments: more rows of a large feature map add little information
NUMBERS = 1 << 22  # elements of unfolded patches created at once


@dataclass(frozen=True)
class Weight:
    """One weight. `names`: all its parameter names; more than one if it is tied."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix worth quantizing, unlike a bias, the scale of a norm, or a matrix without numbers."""
        return self.count > 0 and len(self.shape) > 1 and matrix_shape(self.shape)[1] > 1


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """The model's floating-point parameters, each once. Raises Mistake for parameters that can't be compressed."""
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        values[id(parameter)] = parameter
    found = []
    for key, value in values.items():
        if isinstance(value, nn.UninitializedParameter):
            raise Mistake(
                f"{names[key][0]} has no shape until the model is called (a lazy module): call the model once in the job's "
                f"model factory"
            )
        if not value.is_floating_point():
            continue
        if value.dtype not in DTYPES.values() or value.layout is not torch.strided:
            raise Mistake(
                f"{names[key][0]} is a {value.layout} tensor of {value.dtype}: only dense tensors of {', '.join(DTYPES)} "
                f"can be compressed"
            )
        if not value.is_meta and not bool(torch.isfinite(value).all()):
            raise Mistake(
                f"{names[key][0]} has numbers that are not finite: the training diverged to NaN, or the file is damaged; "
                f"compress an earlier checkpoint"
            )
        found.append(Weight(tuple(names[key]), tuple(value.shape), value.dtype))
    if not found:
        raise Mistake("the model has no weights: there is nothing to compress")
    return tuple(found)


@dataclass
class Usage:
    """How the observed forward passes used one weight."""

    calls: int = 0  # of modules that own it; 1 if it was used although none of them was called
    inputs_read: InputMoments | None = None  # None: no moments are recorded
    moment: SecondMoment | None = None  # sum of x x^T over inputs: (columns, columns); of rows if inputs_first
    inputs: int = 0  # number of inputs x in that sum
    largest: float = 0.0  # largest absolute input
    index: Tensor | None = None  # for an embedding: the rows looked up by the last call
    kinds: set[str] = field(default_factory=set)  # linear, inputs first, convolution, embedding, recurrent
    inputs_first: bool = False  # multiplied as x W instead of x W^T: its rows belong to inputs
    mixed: bool = False  # used both ways, so it has no single moment

    def add(self, kind: str, rows: Tensor, inputs_first: bool = False) -> None:
        """Record inputs, given as rows."""
        self.kinds.add(kind)
        if not len(rows):
            return
        self.largest = max(self.largest, float(rows.abs().max()))
        if self.mixed or (self.inputs and self.inputs_first != inputs_first):
            self.mixed = True
            return
        if len(rows) > ROWS:  # evenly spread
            rows = rows[:: -(-len(rows) // ROWS)]
        self.inputs_first, self.inputs = inputs_first, self.inputs + len(rows)
        if self.inputs_read is not None:
            self.inputs_read.add(self, rows)


class InputMoments:
    """Second moments of inputs. Weights that always read the same inputs (queries, keys and values) share a moment and
    its factor."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch, self.rows = (
            scratch,
            torch.empty(0),
        )  # a copy of the last inputs: the model may change them in place
        self.readers: dict[
            int, Usage
        ] = {}  # usages that read the last inputs, by id; these are added when other inputs arrive
        self.owners: dict[int, set[int]] = {}  # id of a moment -> ids of the usages that share it

    def add(self, usage: Usage, rows: Tensor) -> None:
        if id(usage) in self.readers or not torch.equal(rows, self.rows):
            self.finish()
            self.rows = rows.clone()
        self.readers[id(usage)] = usage

    def finish(self) -> None:
        """Add the last inputs. If some sharers of a moment did not read them, they get a copy of it first."""
        rows, readers, self.rows, self.readers = self.rows.float(), self.readers, torch.empty(0), {}
        for before in {id(one.moment): one.moment for one in readers.values()}.values():
            mine = {key for key, one in readers.items() if one.moment is before}
            moment, others = before, self.owners.get(id(before), mine) - mine
            if before is None or others:
                moment = SecondMoment.zero(rows.shape[1], self.scratch) if before is None else before.copy()
                self.owners[id(before)] = others
            assert moment is not None, "made above if there was none"
            self.owners[id(moment)] = mine
            moment.add(rows)
            for key in mine:
                readers[key].moment = moment


class UsageProbe(DispatchMode):
    """Record how weights are used, by watching which ATen operators read their storage. So it does not matter which
    modules or functions call the operators, or through which views."""

    def __init__(self, weights: Mapping[str, Tensor], scratch: Scratch | None) -> None:
        super().__init__()
        self.inputs_read = InputMoments(scratch) if scratch is not None else None
        self.usage = {name: Usage(inputs_read=self.inputs_read) for name in weights}
        self.places = {one.untyped_storage().data_ptr(): (name, one) for name, one in weights.items()}

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **dict(kwargs or {}))
        if note := NOTE_BY_OPERATOR.get(function):
            note(self, args, found)
        return found

    def weight(self, tensor: Any) -> tuple[Usage, Tensor] | None:
        """The weight that a tensor is or views: its usage and the whole tensor."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        name, whole = self.places.get(tensor.untyped_storage().data_ptr(), ("", tensor))
        return (self.usage[name], whole) if name else None

    def product(self, left: Tensor, right: Tensor) -> None:
        """Record left @ right, if one of them is a weight."""
        if known := self.weight(right):
            note_product(*known, right, left.reshape(-1, left.shape[-1]))
        if (known := self.weight(left)) and left.dim() > 1:
            x = right if right.dim() > 1 else right[:, None]
            note_product(*known, left.transpose(-1, -2), x.transpose(-1, -2).reshape(-1, x.shape[-2]))


def note_product(usage: Usage, whole: Tensor, view: Tensor, rows: Tensor) -> None:
    """Record rows @ view, where the view (inputs, outputs) shows a weight, or a batch of copies of it."""
    if view.dim() == 3 and (view.shape[0] == 1 or not view.stride(0)):
        view = view[0]
    columns = matrix_shape(tuple(whole.shape))[1]
    by_row, by_column = (columns, 1) if whole.is_contiguous() else whole.stride() if whole.dim() == 2 else (0, 0)
    if view.dim() != 2 or whole.dim() < 2 or rows.shape[1] != view.shape[0]:
        usage.kinds.add("other")
    elif view.shape[0] == columns and view.stride(0) == by_column:
        usage.add("linear", rows)
    elif view.shape[0] == len(whole) and view.stride(0) == by_row:
        usage.add("inputs first", rows, inputs_first=True)
    else:
        usage.kinds.add("other")


def note_convolution(look: UsageProbe, args: tuple[Any, ...], found: Any) -> None:
    x, weight, _, stride, padding, dilation, transposed, _, groups = args
    known = look.weight(weight)
    if known is None or known[1].shape != weight.shape:
        return
    known[0].kinds.add("convolution")
    if transposed and groups == 1:
        known[0].add("convolution", x.movedim(1, -1).reshape(-1, x.shape[1]), inputs_first=True)
    elif not transposed and groups == 1 and weight.dim() in (3, 4):
        known[0].add("convolution", unfold_patches(x, weight, stride, padding, dilation))


def note_embedding(look: UsageProbe, args: tuple[Any, ...], found: Any) -> None:
    if known := look.weight(args[0]):
        known[0].kinds.add("embedding")
        known[0].index = args[1].detach()


def note_recurrent(look: UsageProbe, args: tuple[Any, ...], found: Any) -> None:
    """Record a layer of an LSTM: its inputs (steps, batch, inputs), and the hidden state before each step."""
    x, inputs, hidden, _, _, first, _, backwards = args[:8]
    states = (
        torch.cat((found[0][1:], first.reshape(1, *found[0].shape[1:])))
        if backwards
        else torch.cat((first.reshape(1, *found[0].shape[1:]), found[0][:-1]))
    )
    for weight, rows in ((inputs, x), (hidden, states)):
        if known := look.weight(weight):
            known[0].add("recurrent", rows.reshape(-1, rows.shape[-1]))


ATEN = torch.ops.aten
NOTE_BY_OPERATOR: dict[Any, Callable[[UsageProbe, tuple[Any, ...], Any], None]] = {
    ATEN.mm.default: lambda look, args, found: look.product(args[0], args[1]),
    ATEN.bmm.default: lambda look, args, found: look.product(args[0], args[1]),
    ATEN.mv.default: lambda look, args, found: look.product(args[0], args[1]),
    ATEN.addmm.default: lambda look, args, found: look.product(args[1], args[2]),
    ATEN.addmv.default: lambda look, args, found: look.product(args[1], args[2]),
    ATEN.baddbmm.default: lambda look, args, found: look.product(args[1], args[2]),
    ATEN.convolution.default: note_convolution,
    ATEN.embedding.default: note_embedding,
    ATEN.mkldnn_rnn_layer.default: note_recurrent,
}


def unfold_patches(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Input patches that a convolution multiplies its weight with: (positions, in * kernel)."""
    image, kernel = x if x.dim() == weight.dim() else x[None], tuple(weight.shape[2:])
    stride, padding, dilation = (  # one number is for every dimension: padding="valid" is [0]
        tuple(one) * len(kernel) if len(one) == 1 else tuple(one) for one in (stride, padding, dilation)
    )
    if weight.dim() == 3:  # a 1-d convolution: treat it as an image of height 1
        image, kernel = image[..., None, :], (1, *kernel)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    return sample_patches(
        image, lambda some: functional.unfold(some, kernel, dilation=dilation, padding=padding, stride=stride)
    )


def sample_patches(image: Tensor, unfold: Callable[[Tensor], Tensor]) -> Tensor:
    """At most 4096 patches, evenly spread over all images. `unfold` returns (images, in * kernel, positions); it is
    called for a few images at a time, because patches are larger than the image by the kernel's pixels."""
    if not len(image):
        return image.reshape(0, 0)
    first = unfold(image[:1])
    step, at_once = -(-len(image) * first.shape[2] // ROWS), max(1, NUMBERS // max(first.numel(), 1))
    found = []
    for begin in range(0, len(image), at_once):
        some = unfold(image[begin : begin + at_once]).transpose(1, 2).flatten(0, 1)
        found.append(some[-begin * first.shape[2] % max(step, 1) :: max(step, 1)])
    return torch.cat(found)


@contextmanager
def record_usage(
    model: nn.Module, weights: Sequence[Weight], scratch: Scratch | None = None
) -> Iterator[dict[str, Usage]]:
    """Record how the model's weights are used inside the context, with second moments of their inputs if a `scratch`
    file is given. Torch's fused attention kernel, which hides its products, is disabled."""
    values = dict(model.named_parameters(remove_duplicate=False))
    look = UsageProbe({weight.name: values[weight.name] for weight in weights}, scratch)
    names = {id(values[weight.name]): weight.name for weight in weights}

    def count_call(module: nn.Module, given: Any) -> None:
        for name in {names[id(one)] for one in own_parameters(module).values() if id(one) in names}:
            look.usage[name].calls += 1

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        for module in model.modules():
            if any(id(one) in names for one in own_parameters(module).values()):
                stack.callback(module.register_forward_pre_hook(count_call).remove)
        with look:
            yield look.usage
    if look.inputs_read is not None:
        look.inputs_read.finish()
    for usage in look.usage.values():
        usage.calls = max(usage.calls, 1) if usage.kinds else 0
        usage.moment = None if usage.mixed else usage.moment
