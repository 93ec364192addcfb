"""Packed weights that can be trained: what is packed again afterwards is what the training saw.

A latent number w stands behind every code; the model computes with the rounded one, and the gradient goes past the rounding as if it were
not there (straight-through estimator: Bengio, Léonard, Courville 2013, arXiv 1308.3432). The scale of a group learns too (Esser et al.
2020, "Learned Step Size Quantization", arXiv 1902.08153):

    q(w) = s (clamp(round(w / s) + z, 0, 2^b - 1) - z),    dq/dw = 1 inside the grid, 0 outside;   dq/ds = round(w / s) - w / s inside

Latent numbers begin in the middle of their codes. Nearer to the original weight, many begin at the edge, and the first steps move thousands
of codes at once, which undoes what rounding made up for (MiniLM at 9 MB: damage .039 -> .22 after seven steps).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import FormatTensor, PlainFormat, Settings, Shape, WeightFormat
from shoestring.compression.formats.grid import GridFormat, grid_shape, matrix_shape
from shoestring.compression.quantization.rounding import LEAST_SCALE
from shoestring.numerics.block_quantization import per_number


class Latent(WeightFormat):
    """A form while it is trained. It is never stored."""

    kind = "latent"
    zeros: Tensor

    def __init__(self, form: WeightFormat) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype, self.settings, self.packed_kind = form.shape, form.dtype, dict(form.settings), form.kind
        dense = form.dense()
        if isinstance(form, GridFormat):
            self.scales = nn.Parameter(form.scales.float())
            self.register_buffer("zeros", form.zero_points().float())
            self.values = nn.Parameter(self.turned(dense.float().reshape(matrix_shape(form.shape))).contiguous())
        else:
            self.values = nn.Parameter(dense.clone())

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        raise AssertionError("what is trained is not stored")

    def wide(self, values: Tensor) -> Tensor:
        return per_number(values, int(self.settings["group"]), grid_shape(self.shape, self.settings)[1])

    @property
    def top(self) -> int:
        return (1 << int(self.settings["bits"])) - 1

    def dense(self) -> Tensor:
        if self.packed_kind != GridFormat.kind:
            return self.values
        found = self.on_grid(self.values, self.wide(self.stored_scales), self.wide(self.zeros))
        return self.turned(found).reshape(self.shape).to(self.dtype)

    def turned(self, matrix: Tensor) -> Tensor:
        return matrix.T if self.settings.get("transposed") else matrix

    def rows(self, index: Tensor) -> Tensor:
        if self.packed_kind != GridFormat.kind:
            return torch.nn.functional.embedding(index, self.values)
        if self.settings.get("transposed"):
            return self.dense()[index]
        wanted, back = index.reshape(-1).unique(return_inverse=True)
        scales, zeros = self.wide(self.stored_scales[wanted]), self.wide(self.zeros[wanted])
        found = self.on_grid(self.values[wanted], scales, zeros)
        return found[back].view(*index.shape, *self.shape[1:]).to(self.dtype)

    @property
    def stored_scales(self) -> Tensor:
        """As they will be stored, in float16; the gradient goes past that."""
        kept = self.scales.detach().clamp(min=LEAST_SCALE).half().float()
        return self.scales + (kept - self.scales.detach())

    def on_grid(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        share = values / scales
        inside = torch.minimum(torch.maximum(share, -zeros), self.top - zeros)
        return (inside + (inside.detach().round() - inside.detach())) * scales

    def packed(self) -> WeightFormat:
        """The form again, with what was learned."""
        if self.packed_kind != GridFormat.kind:
            return PlainFormat.of(self.values.detach().to(self.dtype), str(self.settings.get("stored", "")))
        scales = self.stored_scales.detach()
        wide, zeros = self.wide(scales), self.wide(self.zeros)
        inside = torch.minimum(torch.maximum(self.values.detach() / wide, -zeros), self.top - zeros)
        bits, group = int(self.settings["bits"]), int(self.settings["group"])
        return GridFormat.of(
            (inside.round() + zeros).to(torch.uint8),
            scales,
            self.zeros.to(torch.uint8),
            bits,
            group,
            self.shape,
            self.dtype,
            bool(self.settings.get("transposed")),
        )

    def rate(self) -> dict[str, float]:
        """By how much one step of Adam should move its numbers: a small part of a step of the grid, or of their usual size."""
        if self.packed_kind == GridFormat.kind:
            step = float(self.scales.detach().mean())
            return {"values": STEP * step, "scales": 0.05 * STEP * step}
        size = float(self.values.detach().square().mean().sqrt()) or 1e-3
        return {"values": PLAIN * size}


STEP = 0.015  # of a grid's step, that a latent number moves in a step of training at the first rate
PLAIN = 0.0005  # of the usual size of numbers that are not on a grid


def latent_forms(forms: Mapping[str, WeightFormat]) -> dict[str, Latent]:
    """Trainable forms of those that can be trained: grids and plain numbers."""
    return {name: Latent(form) for name, form in forms.items() if isinstance(form, (GridFormat, PlainFormat))}
