"""The ledger: what one training step costs, as a timeline over the blocks plus what stands the whole time.

Peaks do not add up; timelines do. A step walks the blocks forward, then backward, then updates the weights:

    forward of block i     standing + sum_{j<i} kept_j + rise_i
    backward of block i    standing + sum_{j<=i} kept_j + sum_{j>i} gradient_j + spike_i
    update                 standing + sum_j gradient_j + update_rise

and the peak is the highest of these. For the process, each has the kernels' own scratch memory on top, what the allocator
rounds up and keeps back of the bytes that come and go, and the base that the interpreter and its libraries need.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import numpy as np


@dataclass(frozen=True)
class Block:
    name: str
    inside: bool = True            # False: what runs outside all blocks (embeddings before, head and loss after)
    kept: float = 0.0              # bytes born in its forward and alive at its end
    output: float = 0.0            # of those, the bytes of its result, which the next block takes
    rise: float = 0.0              # bytes above the start of its forward at the highest point of it
    spike: float = 0.0             # bytes above what is kept and the later blocks' gradients, in its backward
    gradient: float = 0.0          # bytes of weight gradient that its backward leaves behind
    forward: float = 0.0           # seconds
    backward: float = 0.0          # seconds, with all that is computed again
    flops: float = 0.0             # operations of its forward
    backward_flops: float = 0.0    # operations of its backward, with all that is computed again
    scratch: float = 0.0           # bytes that kernels take for themselves at the highest point of its forward
    backward_scratch: float = 0.0
    spilled: float = 0.0           # bytes that are not kept because they wait on disk,
    ahead: float = 0.0             # and of the block before it, in memory again ahead of need

    def but(self, **changes: float) -> Block:
        """`replace`, in half the time: a ranking makes tens of thousands of blocks."""
        return Block(**(vars(self) | changes))


NO_BLOCK_RUNS = ("no block of the model was called as a module in the rehearsed step (its layers are used in another way, such as by their "
                 "weights), so there is nothing to wrap and nothing would be saved")
NUMBERS = tuple(field.name for field in fields(Block) if field.name not in ("name", "inside", "gradient", "forward", "backward"))


def between(none: Block, full: Block, share: float) -> Block:
    """The block at a share of the batch: what does not depend on the batch, and that share of the rest."""
    return full.but(**{
        name: getattr(none, name) + share * (getattr(full, name) - getattr(none, name)) for name in NUMBERS
    })


@dataclass(frozen=True)
class Ledger:
    blocks: tuple[Block, ...]
    still: tuple[Block, ...] = ()      # the same blocks at a batch of nothing: the part that does not shrink with it
    batch: int = 1                     # samples that go through the blocks at once
    pieces: int = 1                    # times that the blocks run in a step
    parameters: float = 0.0            # bytes; this and the next three stand the whole time
    buffers: float = 0.0
    inputs: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0             # bytes of gradients that stand the whole time (accumulated ones)
    update_rise: float = 0.0
    update: float = 0.0                # seconds
    update_scratch: float = 0.0
    fused_update: float | None = None  # seconds with fused kernels, where they were timed
    paces: tuple[tuple[float, float], ...] = ((1.0, 1.0),)   # (pieces, seconds of the batch in so many per second at once)
    adding: float = 0.0                # seconds of adding all gradients to others
    calls: float = 0.0                 # seconds of calling the optimizer for every weight alone, beside its work
    waiting: float = 0.0               # seconds in which the step waits for the disk or a link
    traffic: float = 0.0               # bytes written and read per step
    disk_seconds: float = 0.0          # that the disk takes for it at its measured speed, hidden or not
    sent: float = 0.0                  # bytes that a worker sends to others per step
    world: int = 1                     # workers that share a batch; the blocks are those of one of them
    per_sent: float = 0.0              # seconds per byte sent
    per_message: float = 0.0           # seconds per message
    hides: bool = False                # sending has an engine of its own and hides behind backward
    base: float = 0.0                  # bytes of the process before any tensor
    slack: float = 0.0                 # bytes that the allocator rounds up per byte of tensors
    retention: float = 0.0             # bytes that the allocator keeps back per byte of tensors born
    fresh: float = 0.0                 # bytes of tensors born per step
    per_fresh: float = 0.0             # seconds that the allocator takes more per byte of them than at the anchor
    per_spilled: float = 0.0           # seconds per byte written to or read from disk
    per_streamed: float = 0.0          # the same by direct I/O,
    per_moved: float = 0.0             # and seconds of a core that it takes
    cores: int = 1                     # that compute and copying share
    allocators: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)   # kind -> slack, retention, per_fresh
    traits: frozenset[str] = frozenset()   # what the model does that techniques care about: "draws", "mixes samples", ...
    reasons: Mapping[str, str] = field(default_factory=dict)   # trait -> what was found that shows it, where that has to be told
    sure: str = ""                     # how the numbers were found
    under: Mapping[str, Ledger] = field(default_factory=dict)   # the same step measured at other precisions

    @property
    def standing(self) -> float:
        return self.parameters + self.buffers + self.inputs + self.optimizer + self.gradients

    def tops(self) -> Iterator[tuple[float, float]]:
        """The step's timeline: bytes of tensors and of the process at the highest point of every moment."""
        above, share = self.base + self.retention * self.fresh / self.pieces, 1 + self.slack
        alive = self.standing
        for block in self.blocks:
            top = alive + block.rise
            yield top, above + top * share + block.scratch
            alive += block.kept
        for block in reversed(self.blocks):
            top = alive + block.spike
            yield top, above + top * share + block.backward_scratch
            alive += block.gradient - block.kept
        top = alive + self.update_rise
        yield top, above + top * share + self.update_scratch

    def numbers(self) -> dict[str, float]:
        """What is ranked and limited, by the names of their figures."""
        tensors, process = map(max, zip(*self.tops(), strict=True))
        return {"peak_bytes": tensors, "process_bytes": process, "step_seconds": self.seconds, "world": self.world,
                "traffic_bytes": self.traffic, "sent_bytes": self.sent}

    @property
    def peak(self) -> float:
        """Highest number of tensor bytes alive at once."""
        return max(tensors for tensors, _ in self.tops())

    @property
    def process(self) -> float:
        """Highest number of bytes of the whole process."""
        return max(process for _, process in self.tops())

    @property
    def seconds(self) -> float:
        """Time of one step."""
        work = self.pieces * sum(block.forward + block.backward for block in self.blocks)
        return max(work + self.update + self.waiting + self.fresh * self.per_fresh, 0.0)

    @property
    def flops(self) -> float:
        """Operations of one step."""
        return self.pieces * sum(block.flops + block.backward_flops for block in self.blocks)

    def pace(self, pieces: int) -> float:
        """Seconds that the batch takes in so many pieces, per second at once: lines between what was measured.

        >>> Ledger((), paces=((1.0, 1.0), (2.0, 1.0), (8.0, 1.6))).pace(5)
        1.3
        """
        numbers, seconds = zip(*self.paces, strict=True)
        if pieces > numbers[-1] and len(numbers) > 1:   # the last line goes on
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            return float(seconds[-1] + max(slope, 0.0) * (pieces - numbers[-1]))
        return float(np.interp(pieces, numbers, seconds))

    @property
    def inside(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.inside)
