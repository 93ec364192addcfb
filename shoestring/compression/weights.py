"""The weights of a model that can be stored in another form, and how the model uses them."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoestring.compression.forms.grid import matrix_shape
from shoestring.compression.manifest import DTYPES
from shoestring.compression.moments import SecondMoment
from shoestring.compression.scratch import Scratch
from shoestring.core.errors import Mistake

ROWS = 4096         # of inputs of one call that are looked at for second moments: more of a large feature map say little more
NUMBERS = 1 << 22   # of patches of a feature map that are made at once


@dataclass(frozen=True)
class Weight:
    """One weight. `names`: all that the model has for it, more than one if it is tied."""

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
        """Whether it has rows and columns that are worth a grid; a bias, or the scale of a norm, has not."""
        return len(self.shape) > 1 and matrix_shape(self.shape)[1] > 1


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """The model's floating-point parameters, each once; what is not finite is refused."""
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        values[id(parameter)] = parameter
    found = []
    for key, value in values.items():
        if isinstance(value, nn.UninitializedParameter):
            raise Mistake(f"{names[key][0]} has no shape before the model was called once (a lazy module): call it once in the job's model "
                          f"factory")
        if not value.is_floating_point():
            continue
        if value.dtype not in DTYPES.values() or value.layout is not torch.strided:
            raise Mistake(f"{names[key][0]} is {value.layout} of {value.dtype}: only dense ones of {', '.join(DTYPES)} can be compressed")
        if not value.is_meta and not bool(torch.isfinite(value).all()):
            raise Mistake(f"{names[key][0]} has numbers that are not finite: the model was trained to NaN, or its file is damaged; "
                          f"compress a checkpoint from before that")
        found.append(Weight(tuple(names[key]), tuple(value.shape), value.dtype))
    if not found:
        raise Mistake("the model has no weights: there is nothing to compress")
    return tuple(found)


@dataclass
class Usage:
    """How a weight was used in the calls that were looked at."""

    calls: int = 0
    moment: SecondMoment | None = None     # sum of x x^T over the inputs x of a product
    inputs: int = 0                        # x that it is a sum of
    largest: float = 0.0                   # of their numbers, without sign
    index: Tensor | None = None            # of an embedding: rows that the last call looked up
    kinds: set[str] = field(default_factory=set)   # linear, convolution, embedding


class Looking(TorchFunctionMode):
    """While inside, notes how weights, by their identity, are used: by functions, so it does not matter what modules call them. `scratch`:
    where second moments are put; without it there are none."""

    def __init__(self, weights: Mapping[int, str], scratch: Scratch | None) -> None:
        super().__init__()
        self.weights, self.usage, self.scratch = weights, {name: Usage() for name in weights.values()}, scratch

    def __torch_function__(self, function: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        named = dict(kwargs or {})
        if kind := USES.get(function, ""):
            x, weight = (args[place] if place < len(args) else named.get(word) for place, word in enumerate(("input", "weight")))
            self.note(kind, x, weight, args, named)
        return function(*args, **named)

    def note(self, kind: str, x: Any, weight: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        name = self.weights.get(id(weight))
        if name is None or not isinstance(x, Tensor):
            return
        usage = self.usage[name]
        usage.calls += 1
        usage.kinds.add(kind)
        rows = None
        if kind == "embedding":
            usage.index = x.detach()
        elif kind == "linear":
            rows = x.detach().reshape(-1, x.shape[-1])
        else:
            rows = patches(x.detach(), weight, args, named)
        if rows is not None and len(rows):
            usage.largest = max(usage.largest, *(abs(float(one)) for one in x.detach().aminmax()))
            rows = rows[:: -(-len(rows) // ROWS)]   # evenly spread
            usage.inputs += len(rows)
            if self.scratch is not None:
                usage.moment = usage.moment or SecondMoment.none_yet(rows.shape[1], self.scratch)
                usage.moment.add(rows.float())


USES: dict[Any, str] = {functional.linear: "linear", functional.conv1d: "convolution", functional.conv2d: "convolution",
                        functional.embedding: "embedding"}


def patches(x: Tensor, weight: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """What a convolution multiplies its rows with: (positions, in * kernel). None for grouped ones, whose rows have different inputs."""
    words = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(words, args, strict=False)) | dict(named)
    if given.get("groups", 1) != 1:
        return None
    flat = weight.dim() == 3   # one dimension: a picture of height 1
    image = x if x.dim() == weight.dim() else x[None]
    stride, dilation = pair(given.get("stride", 1), flat), pair(given.get("dilation", 1), flat)
    kernel = (1, *weight.shape[2:]) if flat else tuple(weight.shape[2:])
    padding: Any = given.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        image = functional.pad(image[..., None, :] if flat else image,
                               [side for total in reversed(whole) for side in (total // 2, total - total // 2)])
        padding = (0, 0)
    else:
        image, padding = image[..., None, :] if flat else image, pair(padding, flat, 0)
    return spread_patches(image, lambda some: functional.unfold(some, kernel, dilation=dilation, padding=padding, stride=stride))


def spread_patches(image: Tensor, unfold: Callable[[Tensor], Tensor]) -> Tensor:
    """At most 4096 patches of all pictures, evenly spread. `unfold` gives (pictures, in * kernel, positions): a few pictures at a time,
    because patches are as many times larger as the kernel has pixels."""
    if not len(image):
        return image.reshape(0, 0)
    first = unfold(image[:1])
    step, at_once = -(-len(image) * first.shape[2] // ROWS), max(1, NUMBERS // max(first.numel(), 1))
    found = []
    for begin in range(0, len(image), at_once):
        some = unfold(image[begin:begin + at_once]).transpose(1, 2).flatten(0, 1)
        found.append(some[-begin * first.shape[2] % max(step, 1)::max(step, 1)])
    return torch.cat(found)


def pair(value: Any, flat: bool, first: int = 1) -> tuple[int, int]:
    """What convolutions take as one number or several, for both dimensions of a picture."""
    several = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    return (first, several[-1]) if flat else (several[0], several[-1])


@contextmanager
def looking_at(model: nn.Module, weights: Sequence[Weight], scratch: Scratch | None = None) -> Iterator[dict[str, Usage]]:
    """While inside, how the model's weights are used is noted, with second moments if there is a `scratch` file to put them in."""
    values = dict(model.named_parameters(remove_duplicate=False))
    with Looking({id(values[weight.name]): weight.name for weight in weights}, scratch) as look:
        yield look.usage
