"""Stream: weights, gradients and moments live in one file on disk, and pass through memory block by block.

    weights      sum_i w_i  ->  three blocks: at work, read ahead, written behind
    gradients    sum_i g_i  ->  those of one block
    moments      sum_i m_i  ->  a few chunks
    activations  sum_i a_i  ->  what goes into each block, and all of one: blocks are computed again in backward
    traffic      read w for the forward, w again and m for the backward; write w and m: 28 bytes a parameter with Adam in float32
    time         max(traffic / disk speed, compute), and what moving and checking take of the cores

A block is read ahead of its forward and of its backward, in the order of the step before; its backward computes it again, and every
parameter is stepped as soon as its gradient is there. An embedding or head larger than a block, or shared, is split by rows (row_split.py).
What a checkpoint stands on is never written over (disk_store.py). What else is small stays in memory.
Exact: the same kernels see the same numbers; only the sum over the splits of a large head has another order.
Rajbhandari et al.: ZeRO-Infinity, 2021, arXiv 2104.07857; Pudipeddi et al.: L2L, 2020, arXiv 2002.05645.
"""
from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.ledger import Block, Ledger
from shoestring.core.ledger_parts import Traffic
from shoestring.core.run import Run
from shoestring.core.training import TrainingTechnique
from shoestring.memory import eight_bits
from shoestring.memory.checkpoint import Checkpoint
from shoestring.memory.offloaded_optimizer import BUFFERS, CHUNK, offload_refusal
from shoestring.memory.streaming import UNIT_BUFFERS, Streaming
from shoestring.memory.swap import Swap


@dataclass(frozen=True)
class Stream(TrainingTechnique):
    to: str = "disk"
    moments: str = ""     # "8bit": in 8 bits, which is not exact

    order: ClassVar[int] = 48
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    why: ClassVar[str] = "weights, gradients and moments live on disk and pass through memory block by block"

    def __post_init__(self) -> None:
        if self.to != "disk" or self.moments not in ("", "8bit"):
            raise Mistake(f"Stream(to={self.to!r}, moments={self.moments!r}): there is to='disk', and moments='8bit' or none")

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Stream, ...]:
        return (cls(), cls(moments="8bit"))

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has("can't be recomputed"):
            return ledger.findings.reasons["can't be recomputed"]
        if (reason := offload_refusal(ledger, bool(self.moments))):
            return reason
        return "" if ledger.has("own process") else "state on disk needs a run of its own: use a job file"

    def exactness(self, ledger: Ledger) -> Exactness:
        if self.moments:
            return Exactness.CHANGED
        return Exactness.ROUNDING if any(block.gradient > 4 * CHUNK for block in ledger.blocks[1:] if not block.inside) else Exactness.BITS

    def drift(self, ledger: Ledger) -> float:
        return eight_bits.DRIFT

    def making(self) -> AbstractContextManager[object]:
        """While inside, a model that does not fit in memory can be made."""
        return Swap()

    def cost(self, ledger: Ledger) -> Ledger:
        again = Checkpoint(every=1).cost(replace(ledger, blocks=tuple(map(unspilled, ledger.blocks))))
        inside = [block.gradient for block in again.blocks if block.inside]
        most, whole = max(inside, default=0.0), again.block_gradients
        before, update, machine = ledger.standing, ledger.update, ledger.machine
        share = before.optimizer / before.parameters * (eight_bits.SHARE if self.moments else 1.0) if before.parameters else 0.0
        traffic = whole * (3 + 2 * share)
        waiting = traffic * machine.per_byte_moved / machine.cores
        blocks = []
        for block in again.blocks:
            backward = block.backward + (update.seconds + update.call_seconds) * block.gradient / (whole or 1.0)
            waiting += max(block.gradient * machine.per_byte_streamed - block.forward, 0.0)
            waiting += max(block.gradient * (2 + 2 * share) * machine.per_byte_streamed - backward, 0.0)
            split = block.gradient if block.gradient > most else 0.0   # a weight that is never there whole
            blocks.append(replace(block, gradient=0.0, spike=max(block.spike - split, 0.0), backward=backward))
        wide = max((block.gradient for block in again.blocks if not block.inside), default=0.0)
        buffers = UNIT_BUFFERS * most + BUFFERS * min(4.0 * CHUNK, most) * share + 2 * BUFFERS * min(4.0 * CHUNK, wide) * (wide > most)
        return replace(again, blocks=tuple(blocks), standing=replace(before, parameters=buffers, optimizer=0.0, gradients=0.0),
                       update=replace(update, seconds=0.0, rise=0.0),
                       traffic=again.traffic + Traffic(traffic, traffic * machine.per_byte_streamed, waiting=waiting))

    def apply(self, run: Run) -> Run:
        return Streaming(run, coded=bool(self.moments)).run


def unspilled(block: Block) -> Block:
    """A block that was spilled, as it is when it is computed again: then only what goes into it waits on disk."""
    return replace(block, kept=block.kept + block.spilled, rise=block.rise - block.ahead,
                   spike=block.spike - block.spilled - block.ahead, spilled=0.0, ahead=0.0)
