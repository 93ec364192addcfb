"""A form: how one weight is stored, and how its numbers are computed from that.

A form is a module whose buffers are what is on disk and in memory, bit for bit. What tensors it consists of follows from the weight's
shape and the form's settings alone (`layout`): so a size is known to the byte before anything is computed, and a file that says otherwise
is refused before anything of it is read. Making a form of a weight (rounding, fitting a codebook) is the technique's business, not the
form's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]
Settings = Mapping[str, Any]  # as JSON has them


class FormatTensor(NamedTuple):
    """One tensor of a form."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightFormat(nn.Module, ABC):
    """Abstract. `kind` names it in a manifest; `settings` is all that `layout` needs beside the shape."""

    kind: ClassVar[str]
    keeps_inputs: ClassVar[bool] = (
        True  # a layer is given what it was given; else its damage is more than that of its weight
    )

    def __init__(self, shape: Shape, dtype: torch.dtype, settings: Settings, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.described(shape, dtype, settings, tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def described(self, shape: Shape, dtype: torch.dtype, settings: Settings, tensors: Mapping[str, Tensor]) -> None:
        """Note what it is of; tensors that are not as the layout says are refused."""
        self.shape, self.dtype, self.settings = tuple(shape), dtype, dict(settings)
        wanted = self.layout(self.shape, dtype, settings)
        found = {name: FormatTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if found != wanted:
            name = next(name for name in (*wanted, *found) if wanted.get(name) != found.get(name))
            raise ValueError(
                f"{self.kind} of {list(shape)} has {name} as {found.get(name)}, and needs {wanted.get(name)}"
            )

    @classmethod
    @abstractmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        """The tensors that it consists of, by name. Settings that can't be are a ValueError."""

    @classmethod
    def blank(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> Self:
        """One with nothing in it, to see how long it takes."""
        parts = cls.layout(shape, dtype, settings)
        return cls(
            shape, dtype, settings, {name: torch.zeros(part.shape, dtype=part.dtype) for name, part in parts.items()}
        )

    @abstractmethod
    def dense(self) -> Tensor:
        """The weight: of the form's shape and dtype."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What a linear layer with this weight gives."""
        return functional.linear(x, self.dense(), bias)

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of the weight, as an embedding looks them up: index.shape + shape[1:]."""
        return self.dense()[index]

    def tensors(self) -> dict[str, Tensor]:
        """All that is stored."""
        return dict(self.named_buffers())

    @property
    def stored_bytes(self) -> int:
        return sum(part.bytes for part in self.layout(self.shape, self.dtype, self.settings).values())

    @property
    def bits(self) -> float:
        """Bits of a number, all that is stored counted."""
        return 8 * self.stored_bytes / max(prod(self.shape), 1)

    def extra_repr(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{'x'.join(map(str, self.shape))}, {self.bits:.2f} bits{', ' * bool(said)}{said}"


class PlainFormat(WeightFormat):
    """The weight as it is, or in another type of number that torch has."""

    kind = "plain"
    values: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        if settings.get("stored", "") not in ("", *FLOATS):
            raise ValueError(f"numbers stored as {settings['stored']!r}: there are {', '.join(FLOATS)}")
        stored = FLOATS.get(settings.get("stored", ""), dtype)
        return {"values": FormatTensor(tuple(shape), stored)}

    @classmethod
    def of(cls, weight: Tensor, stored: str = "") -> Self:
        """
        >>> PlainFormat.of(torch.tensor([0.1]), "float16").dense()
        tensor([0.1000])
        """
        settings = {"stored": stored} if stored else {}
        kept = weight.detach().to(FLOATS.get(stored, weight.dtype))
        return cls(tuple(weight.shape), weight.dtype, settings, {"values": kept.clone() if kept is weight else kept})

    def dense(self) -> Tensor:
        return self.values.to(self.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return self.values[index].to(self.dtype)


FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
