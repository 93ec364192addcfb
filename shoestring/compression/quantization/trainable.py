"""Quantization-aware training of packed weights: the model is trained with exactly the weights that are packed
afterwards.

Every code has a latent float weight w. The forward pass uses the rounded value, and the gradient passes through the
rounding unchanged (straight-through estimator: Bengio, Léonard, Courville 2013, arXiv 1308.3432). The scale of each
group is learned too (Esser et al. 2020, "Learned Step Size Quantization", arXiv 1902.08153):

    q(w) = s (clamp(round(w / s) + z, 0, 2^b - 1) - z)
    dq/dw = 1 inside the grid, 0 outside;   dq/ds = round(w / s) - w / s inside

Latent weights start in the middle of their codes. If they started from the original weights, many would start near a
rounding boundary, and the first steps would flip thousands of codes at once and undo GPTQ's compensation (MiniLM at 9
MB: damage .039 -> .22 after seven steps).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import FormatTensor, PlainFormat, Settings, Shape, WeightFormat
from shoestring.compression.formats.grid import GridFormat, grid_shape, matrix_shape
from shoestring.compression.quantization.rounding import LEAST_SCALE
from shoestring.numerics.block_quantization import per_number


class TrainableFormat(WeightFormat):
    """A packed weight while it is trained. It is never stored."""

    kind = "latent"
    zeros: Tensor

    def __init__(self, form: WeightFormat) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype, self.settings, self.packed_kind = form.shape, form.dtype, dict(form.settings), form.kind
        dense = form.dense()
        if isinstance(form, GridFormat):
            self.scales = nn.Parameter(form.scales.float())
            self.register_buffer("zeros", form.zero_points().float())
            self.values = nn.Parameter(
                self.transpose_if_stored_so(dense.float().reshape(matrix_shape(form.shape))).contiguous()
            )
        else:
            self.values = nn.Parameter(dense.clone())

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        raise AssertionError("a trainable format is packed before it is stored")

    def expand_groups(self, values: Tensor) -> Tensor:
        return per_number(values, int(self.settings["group"]), grid_shape(self.shape, self.settings)[1])

    @property
    def top(self) -> int:
        return (1 << int(self.settings["bits"])) - 1

    def dense(self) -> Tensor:
        if self.packed_kind != GridFormat.kind:
            return self.values
        found = self.fake_quantize(self.values, self.expand_groups(self.stored_scales), self.expand_groups(self.zeros))
        return self.transpose_if_stored_so(found).reshape(self.shape).to(self.dtype)

    def transpose_if_stored_so(self, matrix: Tensor) -> Tensor:
        return matrix.T if self.settings.get("transposed") else matrix

    def rows(self, index: Tensor) -> Tensor:
        if self.packed_kind != GridFormat.kind:
            return torch.nn.functional.embedding(index, self.values)
        if self.settings.get("transposed"):
            return self.dense()[index]
        wanted, back = index.reshape(-1).unique(return_inverse=True)
        scales, zeros = self.expand_groups(self.stored_scales[wanted]), self.expand_groups(self.zeros[wanted])
        found = self.fake_quantize(self.values[wanted], scales, zeros)
        return found[back].view(*index.shape, *self.shape[1:]).to(self.dtype)

    @property
    def stored_scales(self) -> Tensor:
        """Scales rounded to float16, as they will be stored, with a straight-through gradient."""
        kept = self.scales.detach().clamp(min=LEAST_SCALE).half().float()
        return self.scales + (kept - self.scales.detach())

    def fake_quantize(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Round to the grid, with the straight-through gradient."""
        share = values / scales
        inside = torch.minimum(torch.maximum(share, -zeros), self.top - zeros)
        return (inside + (inside.detach().round() - inside.detach())) * scales

    def pack(self) -> WeightFormat:
        """The packed weight with the trained values."""
        if self.packed_kind != GridFormat.kind:
            return PlainFormat.of(self.values.detach().to(self.dtype), str(self.settings.get("stored", "")))
        scales = self.stored_scales.detach()
        wide, zeros = self.expand_groups(scales), self.expand_groups(self.zeros)
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

    def learning_rates(self) -> dict[str, float]:
        """Adam learning rates of its parameters: a small fraction of the grid's step, or of the weights' RMS."""
        if self.packed_kind == GridFormat.kind:
            step = float(self.scales.detach().mean())
            return {"values": STEP * step, "scales": 0.05 * STEP * step}
        size = float(self.values.detach().square().mean().sqrt()) or 1e-3
        return {"values": PLAIN * size}


STEP = 0.015  # fraction of a grid step that a latent weight moves in one training step at the initial learning rate
PLAIN = 0.0005  # fraction of the RMS, for weights that are not on a grid


def trainable_formats(forms: Mapping[str, WeightFormat]) -> dict[str, TrainableFormat]:
    """Trainable versions of the weights that can be trained: those on grids, and plain ones."""
    return {name: TrainableFormat(form) for name, form in forms.items() if isinstance(form, (GridFormat, PlainFormat))}
