"""Gradients that wait on disk: until those of all micro-batches are summed, or until their global norm is known.

    every micro-batch      g  =  its own gradient  (+ what waits)      written, unless the step can be taken now
    last micro-batch       |g| of every weight, from the whole gradient while it is in memory
    second pass, clipped   g  is read, scaled by min(clip / (|all| + 1e-6), 1), and applied

Gradients pass through a ring of buffers in chunks. Each has one slot on disk: they are gone when the step is over, so
no checkpoint uses them. Gradients of small weights stay in memory. The norm is computed as in
`torch.nn.utils.clip_grad_norm_`: the norm of every weight's gradient, in the order of the model, then the norm of these
norms; its bits are the same, because the norm of one number is that number. Only a weight that is never whole in memory
(row_split.py) has the norm of its parts' norms, which is equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from shoestring.training.memory.offload import offloaded_optimizer
from shoestring.training.memory.offload.disk_store import DiskStore
from shoestring.training.memory.offload.offloaded_optimizer import BufferRing, flat_view, strides_of

TINY = 1e-6  # clip_grad_norm_ adds it to the norm


class WaitingGradients:
    """The gradients of large weights within a step. A weight in `rows` is never whole: it comes so many rows at a
    time."""

    def __init__(self, store: DiskStore, names: Mapping[nn.Parameter, str], rows: Mapping[nn.Parameter, int]) -> None:
        self.store, self.names, self.rows = store, names, rows
        self.strides = {parameter: strides_of(parameter) for parameter in names}
        self.spans = {parameter: spans(parameter, rows.get(parameter)) for parameter in names}
        sizes: dict[str, int] = {}
        for parameter, found in self.spans.items():
            for number, (begin, end) in enumerate(found):
                region = self.region(parameter, number)
                sizes[region] = (end - begin) * parameter.element_size()
                store.reserve(region, sizes[region], slots=1, lasting=False)
        self.ring = BufferRing(store, sizes) if sizes else None
        self.waiting: set[nn.Parameter] = set()  # parameters whose gradient is on disk
        self.norms: dict[nn.Parameter, list[Tensor]] = {}  # of the parts of a complete gradient

    def region(self, parameter: nn.Parameter, number: int) -> str:
        return f"waiting gradient of {self.names[parameter]}[{number}]"

    def begin_step(self) -> None:
        self.waiting.clear()
        self.norms.clear()
        if self.ring is not None:
            self.ring.accesses.begin_step()

    def add(self, parameter: nn.Parameter, number: int, part: Tensor, keep: bool) -> None:
        """Add the waiting gradient to a part of a gradient; if `keep`, store the sum. `part` is changed in place."""
        assert self.ring is not None, "who waits has a region"
        if not keep and parameter not in self.waiting:
            return
        region = self.region(parameter, number)
        buffer = self.ring.fetch(region) if parameter in self.waiting else self.ring.blank(region)
        held = buffer.part(0, parameter.dtype, (part.numel(),))
        if parameter in self.waiting:
            part.add_(held.to(part.device))
        if keep:
            held.copy_(part)
            self.store.write(region, buffer)

    def note_added(self, parameter: nn.Parameter, keep: bool) -> None:
        """All parts of a gradient were added."""
        if keep:
            self.waiting.add(parameter)
        else:
            self.waiting.discard(parameter)

    def add_whole(self, parameter: nn.Parameter, keep: bool) -> None:
        """Add the waiting gradient to a parameter's `.grad`; if `keep`, store the sum."""
        assert parameter.grad is not None, "its gradient has come"
        flat = flat_view(parameter.grad, self.strides[parameter])
        if parameter.grad.stride() != self.strides[parameter]:
            parameter.grad = flat.as_strided(parameter.shape, self.strides[parameter])
        for number, (begin, end) in enumerate(self.spans[parameter]):
            self.add(parameter, number, flat[begin:end], keep)
        self.note_added(parameter, keep)

    def read(self, parameter: nn.Parameter, number: int) -> Tensor:
        """A part of a waiting gradient, valid until another is read."""
        assert self.ring is not None, "who waits has a region"
        begin, end = self.spans[parameter][number]
        return self.ring.fetch(self.region(parameter, number)).part(0, parameter.dtype, (end - begin,))

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A whole waiting gradient, laid out like its parameter."""
        found = torch.empty_strided(
            parameter.shape, self.strides[parameter], dtype=parameter.dtype, device=parameter.device
        )
        flat = flat_view(found)
        for number, (begin, end) in enumerate(self.spans[parameter]):
            flat[begin:end].copy_(self.read(parameter, number))
        return found

    def note_norm(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Record the norm of a complete gradient, or of its next part."""
        self.norms.setdefault(parameter, []).append(get_total_norm([gradient]))

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The global norm of all gradients; `parameters` in the model's order."""
        norms = []
        for parameter in parameters:
            if parameter in self.waiting and parameter not in self.norms:  # it got no gradient in the last micro-batch
                for number in range(len(self.spans[parameter]) if parameter in self.rows else 1):
                    self.note_norm(
                        parameter, self.read(parameter, number) if parameter in self.rows else self.whole(parameter)
                    )
            if parameter in self.norms:
                found = self.norms[parameter]
                norms.append(found[0] if len(found) == 1 else get_total_norm(found))
            elif parameter.grad is not None:
                norms.append(get_total_norm([parameter.grad]))
        return get_total_norm(norms)


def clipping(norm: Tensor, most: float) -> Tensor:
    """The factor that scales gradients of this global norm down to a norm of at most `most`."""
    return torch.clamp(most / (norm + TINY), max=1.0)


def spans(parameter: nn.Parameter, rows: int | None) -> list[tuple[int, int]]:
    """The ranges of a parameter's numbers that pass through memory at once."""
    count = parameter.numel()
    size = offloaded_optimizer.CHUNK if rows is None else rows * parameter.shape[1]
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
