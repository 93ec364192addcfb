"""The best schedule of recomputation for a chain of uneven blocks under a memory limit, by an exact dynamic program.

Let best(s, t, m) be the least time to run blocks s..t forward and backward when s's input is held and m bytes are free.
Block by block there are two choices:

    keep s          f_s + b_s + best(s+1, t, m - kept_s)
    forget s..r     f_s + ... + f_r + best(r+1, t, m - output_r) + best(s, r, m)

and the inner best(s, r, m) is run as a checkpoint within a checkpoint. m is cut into LEVELS steps and rounded up, so a schedule
may need less than it was allowed and never more; every schedule is then costed on the real timeline.
Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains, 2019, arXiv 1911.13214.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoestring.core.ledger import Block
from shoestring.memory.recompute import Schedule, flat

LEVELS = 400

Table = np.ndarray[Any, Any]


def forgotten(blocks: Sequence[Block], schedule: Schedule) -> tuple[Block, ...]:
    """The blocks as they cost under a schedule over all of them (numbers are positions in `blocks`)."""
    after = list(blocks)
    for item in schedule:
        if not isinstance(item, int):
            members = flat(item)
            for number in members:
                after[number] = replace(blocks[number], kept=0.0)
            last = members[-1]
            after[last] = replace(after[last], kept=blocks[last].output)
            replayed(blocks, after, item, 0.0, blocks[last].output)
    return tuple(after)


def replayed(blocks: Sequence[Block], after: list[Block], items: Schedule, alive: float, counted: float) -> None:
    """Write the cost of computing a group again into `after`; `counted` bytes of its last block are in `kept` already."""
    last = flat(items)[-1]
    top = 0.0
    starts = []
    for item in items:
        starts.append(alive)
        members = flat((item,))
        for position, number in enumerate(members):
            carried = blocks[members[position - 1]].output if position else 0.0
            top = max(top, alive + carried + blocks[number].rise)
            once_more(blocks, after, last, number)
        alive += blocks[members[0]].kept if isinstance(item, int) else blocks[members[-1]].output
    for item, start in zip(reversed(items), reversed(starts), strict=True):
        if isinstance(item, int):
            needed = start + blocks[item].kept + blocks[item].spike - (counted if item == last else 0.0)
            after[item] = replace(after[item], spike=needed)
        else:
            replayed(blocks, after, item, start, counted if flat(item)[-1] == last else 0.0)
    after[last] = replace(after[last], spike=max(after[last].spike, top - counted))


def once_more(blocks: Sequence[Block], after: list[Block], last: int, number: int) -> None:
    """Block `number` runs forward again while block `last` waits to go backward."""
    block, waiting = blocks[number], after[last]
    after[last] = replace(
        waiting, backward=waiting.backward + block.forward, backward_flops=waiting.backward_flops + block.flops,
        backward_scratch=max(waiting.backward_scratch, block.scratch),
    )


def best_schedules(blocks: Sequence[Block], limits: Sequence[float]) -> list[Schedule]:
    """For every limit (bytes above what stands), the fastest schedule that the program finds, or none."""
    count, most = len(blocks), max(limits)
    step = most / LEVELS

    def units(size: float) -> int:
        return int(np.ceil(max(size, 0.0) / step - 1e-9))

    time, cut = solved(blocks, units)

    def schedule(s: int, t: int, m: int) -> Schedule:
        if s > t:
            return ()
        r = int(cut[s, t, m])
        if r < 0:
            return (s, *schedule(s + 1, t, m - units(blocks[s].kept)))
        return (schedule(s, r, m), *schedule(r + 1, t, m - units(blocks[r].output)))

    found = []
    for limit in limits:
        m = int(limit / step + 1e-9)
        if np.isfinite(time[0, count - 1, m]):
            found.append(schedule(0, count - 1, m))
    return list(dict.fromkeys(found))


def solved(blocks: Sequence[Block], units: Callable[[float], int]) -> tuple[Table, Table]:
    """Tables over (s, t, m): the least time, and where the first group ends (-1: the first block is kept)."""
    count = len(blocks)
    later = np.concatenate([np.cumsum([block.gradient for block in blocks][::-1])[::-1], [0.0]])   # gradients of blocks >= i
    forward = np.array([block.forward for block in blocks])
    time = np.full((count, count, LEVELS + 1), np.inf)
    cut = np.full((count, count, LEVELS + 1), -1, dtype=np.int32)
    levels = np.arange(LEVELS + 1)
    for length in range(count):
        for s in range(count - length):
            t = s + length
            block = blocks[s]
            need = max(units(block.rise + later[t + 1]), units(block.kept + block.spike + later[s + 1]))
            own = block.forward + block.backward
            rest = time[s + 1, t] if s < t else np.zeros(LEVELS + 1)
            keep = own + shifted(rest, units(block.kept) if s < t else 0)
            time[s, t] = np.where(levels >= need, keep, np.inf)
            if s == t or not block.inside:
                continue
            stop = next((r for r in range(s, t) if not blocks[r].inside), t)
            once = np.cumsum(forward[s:stop])
            rows, through = [], 0
            for r in range(s, stop):   # run s..r forward and forget them: one input and one block's rise at a time
                carried = blocks[r - 1].output if r > s else 0.0
                through = max(through, units(carried + blocks[r].rise + later[t + 1]))
                total = once[r - s] + shifted(time[r + 1, t], units(blocks[r].output)) + time[s, r]
                rows.append(np.where(levels >= through, total, np.inf))
            options = np.stack(rows)
            best = options.argmin(axis=0)
            value = options[best, levels]
            better = value < time[s, t]
            time[s, t] = np.where(better, value, time[s, t])
            cut[s, t] = np.where(better, best + s, cut[s, t])
    return time, cut


def shifted(row: Table, by: int) -> Table:
    """The row as seen with `by` levels less to spend."""
    if by == 0:
        return row
    moved = np.full_like(row, np.inf)
    moved[by:] = row[:-by] if by < len(row) else moved[by:]
    return moved
