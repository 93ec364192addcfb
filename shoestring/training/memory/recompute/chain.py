"""Dynamic program for the fastest recomputation schedule of a chain of uneven blocks under a memory limit. The result
is exact.

Let best(s, t, m) be the shortest time to run blocks s..t forward and backward when s's input is held and m bytes are
free.
Block by block there are two choices:

    keep s          f_s + b_s + best(s+1, t, m - kept_s)
    forget s..r     f_s + ... + f_r + best(r+1, t, m - output_r) + best(s, r, m)

and the inner best(s, r, m) runs as a checkpoint within a checkpoint. m is discretised into LEVELS steps and sizes are
rounded up, so a schedule may need less memory than allowed and never more; every schedule is then costed on the real
timeline.
Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains, 2019, arXiv
1911.13214.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shoestring.core.costs.ledger import Block
from shoestring.training.memory.recompute.recompute import Schedule, flat

LEVELS = 300
KEPT = 0

Table = np.ndarray[Any, Any]


def recomputed_costs(blocks: Sequence[Block], schedule: Schedule) -> tuple[Block, ...]:
    """The cost of every block under a schedule over all of them (numbers are positions in `blocks`)."""
    changes: list[dict[str, Any]] = [{} for _ in blocks]
    for item in schedule:
        if not isinstance(item, int):
            members = flat(item)
            last = members[-1]
            for number in members:
                changes[number] = {"kept": 0.0}
            changes[last] = {"kept": blocks[last].output}
            add_replay_cost(blocks, changes, item, 0.0, blocks[last].output)
    return tuple(
        block.with_changes(**change) if change else block for block, change in zip(blocks, changes, strict=True)
    )


def add_replay_cost(
    blocks: Sequence[Block], changes: list[dict[str, Any]], items: Schedule, alive: float, counted: float
) -> None:
    """Write the cost of recomputing a segment into `changes`; `counted` bytes of its last block are in `kept`
    already."""
    members = flat(items)
    last = members[-1]
    top = 0.0
    starts = []
    for item in items:
        starts.append(alive)
        inner = [item] if isinstance(item, int) else flat(item)
        carried = 0.0
        for number in inner:
            top = max(top, alive + carried + blocks[number].rise)
            carried = blocks[number].output
        alive += blocks[inner[0]].kept if isinstance(item, int) else blocks[inner[-1]].output
    for item, start in zip(reversed(items), reversed(starts), strict=True):
        if isinstance(item, int):
            changes[item]["spike"] = start + blocks[item].kept + blocks[item].spike - (counted if item == last else 0.0)
        else:
            add_replay_cost(blocks, changes, item, start, counted if flat(item)[-1] == last else 0.0)
    # All blocks of the segment run forward again before the last one runs backward.
    again, waiting = [blocks[number] for number in members], vars(blocks[last]) | changes[last]
    changes[last] |= {
        "spike": max(waiting["spike"], top - counted),
        "backward": waiting["backward"] + sum(block.forward for block in again),
        "backward_flops": waiting["backward_flops"] + sum(block.flops for block in again),
        "backward_scratch": max(waiting["backward_scratch"], *(block.scratch for block in again)),
    }


def best_schedules(blocks: Sequence[Block], limits: Sequence[float]) -> list[Schedule]:
    """For every limit (bytes above the standing memory), the fastest schedule the program finds, or an empty one."""
    count, most = len(blocks), max(limits)
    step = most / LEVELS

    def units(size: Any) -> Any:
        """A size in levels; one more than there are if it does not fit."""
        return np.minimum(np.ceil(np.maximum(size, 0.0) / step - 1e-9), LEVELS + 1).astype(np.int16)

    gradients = sum(block.gradient for block in blocks)  # all stand at the end; the program adds them as they come
    enough = [int(limit / step + 1e-9) for limit in limits if limit * (1 + 1e-9) >= gradients]
    if not enough:
        return []
    kept = units([block.kept for block in blocks]).tolist()
    outputs = units([block.output for block in blocks]).tolist()
    parts = list(reversed(solve_parts(blocks, units, kept, outputs, min(enough))))
    part_of = [part for part in parts for _ in part.own]

    def schedule(s: int, t: int, m: int) -> Schedule:
        if s > t:
            return ()
        part = part_of[s]
        size = int(part.sizes[s - part.own.start, part.column(t), m])
        if size == KEPT:
            return (s, *schedule(s + 1, t, m - kept[s]))
        r = s + size - 1
        return (schedule(s, r, m), *schedule(r + 1, t, m - outputs[r]))

    found = [schedule(0, count - 1, m) for m in enough if np.isfinite(parts[0].time[0, -1, m])]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class ChainSolution:
    """Tables over (s, t, m) for one part of the chain: shortest time, and blocks in the first segment (KEPT: s is not
    checkpointed).

    A segment never extends beyond its part, so t is a block of the part or the last block of the whole chain, in the
    last column."""

    own: range
    time: Table
    sizes: Table
    plain: Table  # over (s, t): levels with which s..t run without any checkpoint; more don't help

    def column(self, t: int) -> int:
        return t - self.own.start if t in self.own else -1


def parts_of(blocks: Sequence[Block]) -> list[range]:
    """The chain cut into runs of neighbouring blocks that may share a segment; code outside of all blocks is a part of
    its own."""
    ends = [place + 1 for place, (block, after) in enumerate(pairwise(blocks)) if not (block.inside and after.inside)]
    return [range(begin, end) for begin, end in pairwise((0, *ends, len(blocks)))]


def first_repeats(blocks: Sequence[Block]) -> list[int]:
    """For every s the first t for which s..t does not cost what s+1..t+1 costs; s itself if s and s+1 differ already.

    Blocks that leave gradients behind all differ: the gradients that stand already depend on the position."""
    taken = [0.0, *(block.output for block in blocks[:-1])]
    costs = [
        (block.inside, before, block.kept, block.output, block.rise, block.spike, block.forward, block.backward)
        for before, block in zip(taken, blocks, strict=True)
    ]
    ends = [len(blocks) - 1]
    for s in reversed(range(len(blocks) - 1)):
        alike = costs[s] == costs[s + 1] and not blocks[s].gradient and not blocks[s + 1].gradient
        ends.append(max(ends[-1], s + 1) if alike else s)
    return ends[::-1]


def least_levels(kept: list[int], outputs: list[int], lowest: int) -> list[int]:
    """For every s the smallest m that is ever asked for, if nobody asks for less than `lowest` for the whole chain."""
    most = np.cumsum([0, *map(max, kept, outputs)])
    return np.maximum(lowest - most, 0).tolist()  # type: ignore[no-any-return]


def always_slower(blocks: Sequence[Block]) -> bool:
    """Whether to recompute any segment takes so much longer than to keep it that rounding can't hide it."""
    whole = sum(block.forward + block.backward for block in blocks)
    return all(block.forward > 1e-9 * whole for block in blocks if block.inside)


def tops_of(carried: Table, rises: Table, after: Table) -> Table:
    """Bytes to run the first blocks forward without keeping activations, one input and one block's working memory at a
    time: a row for every number of blocks, a column for every t."""
    tops = (carried + rises)[:, None] + after
    tops[:1] -= carried[:1, None]
    return np.maximum.accumulate(tops)


def try_segments(
    time: Table, sizes: Table, i: int, new: int, out: int, tried: range, spent: Table, through: Table
) -> None:
    """Try all segments from row i up to before column `new`, whose blocks leave `out` levels each, for t >= new and the
    m in `tried`."""
    window = slice(tried.start, tried.stop)
    values = spent[: new - i, None, None] + time[i + 1 : new + 1, new:, tried.start - out : max(tried.stop - out, 0)]
    values += time[i, i:new, None, window]
    values[np.arange(LEVELS + 1)[window] < through[: new - i, :, None]] = np.inf
    found = values.min(0)
    better = found < time[i, new:, window]
    time[i, new:, window][better] = found[better]
    sizes[i, new:, window][better] = values[:, better].argmin(0) + 1


def solve_parts(
    blocks: Sequence[Block], units: Callable[[Any], Any], kept: list[int], outputs: list[int], lowest: int = 0
) -> list[ChainSolution]:
    """The solutions for all parts of the chain, last part first.

    s runs from last to first; for every s, segments from smallest to largest; all t and m at once. Results that are
    known for identical blocks one position later are copied instead of computed again. Segments are tried between two
    bounds of m only: less is never asked for by who has `lowest` levels or more for the whole chain, and with more
    nothing is checkpointed.
    """
    count, known = len(blocks), first_repeats(blocks)
    later = np.concatenate(
        [np.cumsum([block.gradient for block in blocks][::-1])[::-1], [0.0]]
    )  # gradients of blocks >= i
    forward = np.array([block.forward for block in blocks])
    carried = np.array([0.0, *(block.output for block in blocks[:-1])])
    rises = np.array([block.rise for block in blocks])
    spikes = units(np.array([block.kept + block.spike for block in blocks]) + later[1:])
    levels = np.arange(LEVELS + 1, dtype=np.int16)
    floors, bounded = least_levels(kept, outputs, lowest), always_slower(blocks)
    solutions: list[ChainSolution] = []
    for own in reversed(parts_of(blocks)):
        a, b = own.start, own.stop
        last = [*own, *[count - 1] * (b < count)]  # the t of every column
        time = np.empty((b - a, len(last), LEVELS + 1))  # t < s is never written, so it takes no memory
        sizes = np.zeros(time.shape, dtype=np.int16)  # KEPT everywhere
        plain = np.zeros(time.shape[:2], dtype=np.int64)
        after = later[1:][last]  # gradients that stand before t
        for s in reversed(own):
            i, block = s - a, blocks[s]
            new = min(known[s], b - 1) - a  # the first column to compute
            if new > i:
                for table in (time, sizes, plain):
                    table[i, i:new] = table[i + 1, i + 1 : new + 1]
            needs = np.maximum(units(rises[s] + after[new:]), spikes[s])  # memory for keeping s, with t still to run
            time[i, new:] = np.inf
            np.copyto(time[i, new:], block.forward + block.backward, where=levels >= needs[:, None])
            plain[i, new:] = needs
            if s + 1 < count:
                begin = max(new, i + 1)
                rest = time[i + 1, begin:] if s + 1 < b else solutions[-1].time[0, -1:]
                time[i, begin:, kept[s] :] += rest[:, : LEVELS + 1 - kept[s]]
                time[i, begin:, : kept[s]] = np.inf
                after_s = plain[i + 1, begin:] if s + 1 < b else solutions[-1].plain[0, -1:]
                np.maximum(plain[i, begin:], after_s + kept[s], out=plain[i, begin:])
            floor, top = floors[s], min(int(plain[i, new:].max()), LEVELS + 1) if bounded else LEVELS + 1
            stop = min(b, count - 1) if block.inside else s
            through = units(tops_of(carried[s:stop], rises[s:stop], after[new:]))
            spent = np.cumsum(forward[s:stop])
            if new > i:  # these blocks all have the same output and their segments are solved: try them at once
                try_segments(time, sizes, i, new, outputs[s], range(max(floor, outputs[s]), top), spent, through)
            for r in range(a + new, stop):
                begin, out = max(new, r + 1 - a), outputs[r]
                low = max(floor, through[r - s, -1], out)
                if low >= top:
                    continue
                rest = time[r + 1 - a, begin:] if r + 1 < b else solutions[-1].time[0, -1:]
                value = spent[r - s] + rest[:, low - out : top - out]
                value += time[i, r - a, low:top]
                better = value < time[i, begin:, low:top]
                better &= levels[low:top] >= through[r - s, begin - new :, None]
                np.copyto(time[i, begin:, low:top], value, where=better)
                np.copyto(sizes[i, begin:, low:top], r + 1 - s, where=better)
        solutions.append(ChainSolution(own, time, sizes, plain))
    return solutions
