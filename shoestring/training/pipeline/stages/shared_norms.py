"""Batch norms that several chunks of a pipeline call in one forward: their running statistics become those of one
process.

In training, a norm's output does not depend on its running statistics r. A call with the batch's own statistics s
updates them:

    r  <-  (1 - m) r + m s          m: the norm's momentum

so a chunk's k calls for a micro-batch, started from zeros, leave a number c, and started from any r they leave (1 -
m)^k r + c. After a batch the first worker that has the norm replays these in the order of one process, by micro-batch
and then by chunk, and sends the result to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.core.private import BATCH_NORMS
from shoestring.core.workers.link import Link
from shoestring.training.pipeline.stages.walk import Chain

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class SharedNorm:
    module: nn.Module
    momentum: float
    chunks: tuple[int, ...]

    @property
    def statistics(self) -> list[Tensor]:
        return list(self.module.buffers(recurse=False))

    def flat(self) -> Tensor:
        """Mean, variance and count, concatenated."""
        return torch.cat([one.detach().reshape(-1).double() for one in self.statistics])

    def put(self, flat: Tensor) -> None:
        for one, value in zip(self.statistics, flat.split([one.numel() for one in self.statistics]), strict=True):
            one.data.copy_(
                value.view(one.shape)
            )  # through .data: autograd saved them in every call, and needs none of their values in training


def playable(model: nn.Module) -> dict[str, tuple[nn.Module, float]]:
    """The norms whose calls can be replayed later, by name, with their momentum. Excluded: norms with a forward of
    their own, which may read the statistics, and norms whose momentum depends on their count (None), whose calls do not
    add up like this."""
    return {
        name: (module, module.momentum)
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
        and type(module).forward is BATCH_NORMS.forward
        and module.momentum is not None
        and [buffer for buffer, one in module.named_buffers(recurse=False) if one is not None] == list(STATISTICS)
    }


class SharedNorms:
    """One worker's side of the norms that several chunks call."""

    def __init__(
        self, model: nn.Module, chain: Chain, ranges: Sequence[range], link: Link, home: Callable[[int], int]
    ) -> None:
        self.link, self.home = link, home
        self.norms: dict[str, SharedNorm] = {}
        for name, (module, momentum) in playable(model).items():
            mean = f"{name}.{STATISTICS[0]}"
            chunks = tuple(
                chunk for chunk, calls in enumerate(ranges) if any(mean in chain.changing[call] for call in calls)
            )
            if len(chunks) > 1:
                self.norms[name] = SharedNorm(module, momentum, chunks)
        self.left: dict[
            tuple[str, int, int], Tensor
        ] = {}  # by norm, micro-batch and chunk: the statistics that calls from zeros left

    @contextmanager
    def noting(self, piece: int, chunk: int) -> Iterator[None]:
        """While inside, a chunk computes a micro-batch."""
        here = {name: norm for name, norm in self.norms.items() if chunk in norm.chunks and norm.module.training}
        before = {name: norm.flat() for name, norm in here.items()}
        with torch.no_grad():
            for name, norm in here.items():
                norm.put(torch.zeros_like(before[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, norm in here.items():
                    self.left[name, piece, chunk] = norm.flat()
                    norm.put(before[name])

    @torch.no_grad()
    def play(self) -> None:
        """After all micro-batches of a batch: give every worker the statistics of one process."""
        for name, norm in sorted(self.norms.items()):
            first, *others = sorted(set(map(self.home, norm.chunks)))
            own = {key: one for key, one in self.left.items() if key[0] == name}
            if not own:
                continue
            now = norm.flat()
            if self.link.rank == first:
                pieces = sorted({piece for _, piece, _ in own})
                for piece in pieces:
                    for chunk in norm.chunks:
                        if (worker := self.home(chunk)) == first:
                            left = own[name, piece, chunk]
                        else:
                            left = torch.zeros_like(now)
                            self.link.receive(left, worker)
                        kept = now * (1 - norm.momentum) ** left[-1]
                        kept[-1] = now[-1]
                        now = kept + left
                for other in others:
                    self.link.send(now, other)
            else:
                for key in sorted(own):
                    self.link.send(own[key], first)
                self.link.receive(now, first)
            norm.put(now)
        self.left.clear()
