"""Weight formats: how one weight is stored, and how it is decoded.

A weight format is a module whose buffers are the stored tensors, bit for bit the same on disk and in memory. Its
tensors follow from the weight's shape and the format's settings alone (`layout`): so sizes are known to the byte before
anything is computed, and a file with other tensors is refused before they are read. Converting a weight to a format
(rounding, fitting a codebook) is the job of techniques, not of the format.
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
Settings = Mapping[str, Any]  # JSON values


class FormatTensor(NamedTuple):
    """Shape and dtype of one stored tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightFormat(nn.Module, ABC):
    """Abstract base of weight formats. `kind` names it in a manifest; `settings` is all that `layout` needs besides the
    shape and dtype."""

    kind: ClassVar[str]
    keeps_inputs: ClassVar[bool] = True  # False: activations are quantized too, which adds damage

    def __init__(self, shape: Shape, dtype: torch.dtype, settings: Settings, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.set_layout(shape, dtype, settings, tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def set_layout(self, shape: Shape, dtype: torch.dtype, settings: Settings, tensors: Mapping[str, Tensor]) -> None:
        """Set shape, dtype and settings. Raises ValueError if the tensors do not match the layout."""
        self.shape, self.dtype, self.settings = tuple(shape), dtype, dict(settings)
        wanted = self.layout(self.shape, dtype, settings)
        found = {name: FormatTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if found != wanted:
            name = next(name for name in (*wanted, *found) if wanted.get(name) != found.get(name))
            raise ValueError(
                f"the format {self.kind} of shape {list(shape)} got {name} as {found.get(name)}, and needs {wanted.get(name)}"
            )

    @classmethod
    @abstractmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        """Shapes and dtypes of the stored tensors, by name. Raises ValueError for invalid settings."""

    @classmethod
    def blank(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> Self:
        """A format filled with zeros, to measure how long it takes."""
        parts = cls.layout(shape, dtype, settings)
        return cls(
            shape, dtype, settings, {name: torch.zeros(part.shape, dtype=part.dtype) for name, part in parts.items()}
        )

    @abstractmethod
    def dense(self) -> Tensor:
        """Decode the whole weight: a tensor of `shape` and `dtype`."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Output of a linear layer with this weight."""
        return functional.linear(x, self.dense(), bias)

    def rows(self, index: Tensor) -> Tensor:
        """Decode some rows, as an embedding looks them up: a tensor of shape index.shape + shape[1:]."""
        return self.dense()[index]

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return dict(self.named_buffers())

    @property
    def stored_bytes(self) -> int:
        return sum(part.bytes for part in self.layout(self.shape, self.dtype, self.settings).values())

    @property
    def bits(self) -> float:
        """Bits per weight, counting everything that is stored."""
        return 8 * self.stored_bytes / max(prod(self.shape), 1)

    def extra_repr(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{'x'.join(map(str, self.shape))}, {self.bits:.2f} bits{', ' * bool(said)}{said}"


class PlainFormat(WeightFormat):
    """The weight as it is, or in another floating-point dtype."""

    kind = "plain"
    values: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        if settings.get("stored", "") not in ("", *FLOATS):
            raise ValueError(f"stored={settings['stored']!r} is unknown: there are {', '.join(FLOATS)}")
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
