"""OffloadModel: keep weights, gradients and moments in one file on disk and stream them through memory block by block.

    weights      sum_i w_i  ->  three blocks: one at work, one read ahead, one written behind
    gradients    sum_i g_i  ->  those of one block
    moments      sum_i m_i  ->  a few chunks
    activations  sum_i a_i  ->  the input of every block, and everything of one: blocks are recomputed in backward
    traffic      read w for the forward, w again and m for the backward; write w and m: 28 bytes a parameter with Adam in float32
                 + write g, read g and w once more if the job clips by the global norm: 40
                 + read w twice, write g and read it, for every further micro-batch: 16
                 frozen: read w for the forward, and for the backward where a gradient passes; never written: 4 or 8
    time         max(traffic / disk speed, compute), plus the cores' time for copying and checksums

A block is read ahead of its forward and of its backward, in the order of the previous step; its backward recomputes it,
and every parameter is stepped as soon as its gradient is there. Gradients that can't be applied yet, because more
micro-batches follow or the global norm must be known first, wait on disk (waiting_gradients.py); a clipped step then
brings every block through memory once more. An embedding or head that is larger than a block, or shared, is split by
rows (row_split.py). State that a checkpoint uses is never overwritten (disk_store.py). Everything else is small and
stays in memory.
Exact: the same kernels see the same numbers; only the splits of a large head are summed in another order, as is the
norm of a split weight when the job clips.
Rajbhandari et al.: ZeRO-Infinity, 2021, arXiv 2104.07857; Pudipeddi et al.: L2L, 2020, arXiv 2002.05645.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.costs.ledger_parts import Traffic, Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.model.swap import Swap
from shoestring.core.optimization.stepping import StepDivision
from shoestring.core.running.run import Run
from shoestring.training.memory.offload.offloaded_optimizer import BUFFERS, CHUNK, offload_refusal
from shoestring.training.memory.offload.streaming import UNIT_BUFFERS, Streaming
from shoestring.training.memory.optimizers import eight_bits
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import Owned, TrainingTechnique


@dataclass(frozen=True)
class OffloadModel(TrainingTechnique):
    """Keep weights, gradients and optimizer state on disk and load one block at a time.

    Costs: 28 bytes of disk traffic a weight and step with Adam in float32, 24 bytes of disk a weight, and every
    forward twice.

    Not for: models that fit into memory in any other way: it is the slowest plan where the disk is slower than the
    computation.
    """

    to: str = "disk"
    moments: str = ""  # "8bit": moments in 8 bits, which is not exact

    order: ClassVar[int] = 48
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    divides: ClassVar[StepDivision] = StepDivision.IN_TURNS
    why: ClassVar[str] = "weights, gradients and moments live on disk and pass through memory block by block"

    def __post_init__(self) -> None:
        if self.to != "disk" or self.moments not in ("", "8bit"):
            raise Mistake(
                f"OffloadModel(to={self.to!r}, moments={self.moments!r}): there is to='disk', and moments='8bit' or none"
            )

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[OffloadModel, ...]:
        return (cls(), cls(moments="8bit"))

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS})

    def refusal(self, ledger: Ledger) -> str:
        if reason := super().refusal(ledger):
            return reason
        if ledger.has(Trait.NOT_RECOMPUTABLE):
            return ledger.findings.reasons[Trait.NOT_RECOMPUTABLE]
        if reason := offload_refusal(ledger, bool(self.moments)):
            return reason
        return "" if ledger.has(Trait.OWN_PROCESS) else "state on disk needs a run of its own: use a job file"

    def exactness(self, ledger: Ledger) -> Exactness:
        if self.moments:
            return Exactness.CHANGED
        # A head split by rows sums in another order; an embedding does not, but its norm does where the job clips
        trained, rows = trained_weights(ledger), ledger.columns.unchanged  # with unchanged names
        outside = [block.name for block in rows[0 if ledger.has(Trait.CLIPS) else 1 :] if not block.inside]
        if ledger.has(Trait.CACHES):  # without it, keys and values lie otherwise in memory
            return Exactness.ROUNDING
        return Exactness.ROUNDING if any(trained[name] > 4 * CHUNK for name in outside) else Exactness.BITS

    def drift(self, ledger: Ledger) -> float:
        return eight_bits.DRIFT

    def making(self) -> AbstractContextManager[object]:
        """While inside, a model that does not fit in memory can be constructed."""
        return Swap()

    def cost(self, ledger: Ledger) -> Ledger:
        again = Checkpoint(every=1).cost(replace(ledger, blocks=tuple(map(without_offload, ledger.blocks))))
        trained, frozen = weights_of(ledger)
        sizes = {block.name: trained[block.name] + frozen[block.name] for block in again.blocks}
        most, whole = (
            max((sizes[block.name] for block in again.blocks if block.inside), default=0.0),
            sum(trained.values()),
        )
        before, update, machine, pieces, clips = (
            ledger.standing,
            ledger.update,
            ledger.machine,
            ledger.pieces,
            ledger.has(Trait.CLIPS),
        )
        share = before.optimizer / whole * (eight_bits.SHARE if self.moments else 1.0) if whole else 0.0
        stepping = (
            1 + 2 * share + 2 * clips
        )  # write weights and moments; with clipping, read weights and gradients once more
        waiting_gradients = 2 * (pieces - 1) + clips
        reads = sum((1 + (block.backward_flops > 0)) * frozen[block.name] for block in ledger.blocks)
        traffic = whole * (2 * pieces + waiting_gradients + stepping) + pieces * reads
        waiting = traffic * machine.per_byte_moved / machine.cores
        seconds = update.seconds + update.call_seconds
        if clips:  # the update is a separate pass
            waiting += max(whole * stepping * machine.per_byte_streamed - seconds, 0.0)
        blocks = []
        for block in again.blocks:
            mine = trained[block.name]
            backward = block.backward + (0.0 if clips else seconds * mine / (whole or 1.0) / pieces)
            moved = (
                sizes[block.name] + mine * (waiting_gradients + (0.0 if clips else stepping)) / pieces
            )  # per micro-batch, in backward
            waiting += pieces * max(sizes[block.name] * machine.per_byte_streamed - block.forward, 0.0)
            waiting += pieces * max(moved * machine.per_byte_streamed - backward, 0.0)
            split = mine if mine > most else 0.0  # a weight that is never whole in memory
            blocks.append(replace(block, gradient=0.0, spike=max(block.spike - split, 0.0), backward=backward))
        wide = max((sizes[block.name] for block in again.blocks if not block.inside), default=0.0)
        chunk, rows = min(4.0 * CHUNK, most), min(4.0 * CHUNK, wide) * (wide > most)
        waits = pieces > 1 or clips
        inside = sum(sizes[block.name] for block in again.blocks if block.inside)
        outside = sum(sizes.values()) - inside
        buffers = (
            min(UNIT_BUFFERS * most, inside)
            + min(BUFFERS * chunk, whole) * share
            + 2 * min(BUFFERS * rows, outside)
            + min(BUFFERS * max(chunk, rows), whole) * waits
        )  # no more than everything that passes through them
        return replace(
            again,
            blocks=tuple(blocks),
            standing=replace(before, parameters=buffers, optimizer=0.0, gradients=0.0),
            update=replace(update, seconds=seconds if clips else 0.0, rise=most if clips else 0.0),
            streamed=sum(sizes.values()),
            traffic=again.traffic + Traffic(traffic, traffic * machine.per_byte_streamed, waiting=waiting),
        )

    def apply(self, run: Run) -> Run:
        return Streaming(run, coded=bool(self.moments)).run


def without_offload(block: Block) -> Block:
    """A block without its offloaded activations: it is recomputed, so only its input waits on disk."""
    return replace(
        block,
        kept=block.kept + block.spilled,
        rise=block.rise - block.ahead,
        spike=block.spike - block.spilled - block.ahead,
        spilled=0.0,
        ahead=0.0,
    )


def weights_of(ledger: Ledger) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of trained and of frozen weights by block. For frozen weights only the sum is known: it is assigned to
    blocks without a gradient, if there are any."""
    trained = trained_weights(ledger)
    frozen = max(ledger.standing.parameters - sum(trained.values()), 0.0)
    inside = [block.name for block in ledger.blocks if block.inside]
    holders = [name for name in inside if not trained[name]] or inside
    return trained, {name: frozen / len(holders) if name in holders else 0.0 for name in trained}


def trained_weights(ledger: Ledger) -> dict[str, float]:
    """Bytes of trained weights by block."""
    if ledger.pieces > 1:  # gradient accumulation has moved the gradients out of the blocks
        return {block.name: block.gradient for block in ledger.at_zero_batch}
    names = (block.name for block in ledger.columns.unchanged)
    return dict(zip(names, ledger.columns.column("gradient").tolist(), strict=True))
