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

LEVELS = 300

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
    members = flat(items)
    last = members[-1]
    top = 0.0
    starts = []
    for item in items:
        starts.append(alive)
        inner = flat((item,))
        for position, number in enumerate(inner):
            carried = blocks[inner[position - 1]].output if position else 0.0
            top = max(top, alive + carried + blocks[number].rise)
        alive += blocks[inner[0]].kept if isinstance(item, int) else blocks[inner[-1]].output
    for item, start in zip(reversed(items), reversed(starts), strict=True):
        if isinstance(item, int):
            needed = start + blocks[item].kept + blocks[item].spike - (counted if item == last else 0.0)
            after[item] = replace(after[item], spike=needed)
        else:
            replayed(blocks, after, item, start, counted if flat(item)[-1] == last else 0.0)
    # All members run forward again while the last one waits to go backward.
    again, waiting = [blocks[number] for number in members], after[last]
    after[last] = replace(
        waiting, spike=max(waiting.spike, top - counted), backward=waiting.backward + sum(block.forward for block in again),
        backward_flops=waiting.backward_flops + sum(block.flops for block in again),
        backward_scratch=max(waiting.backward_scratch, *(block.scratch for block in again)),
    )


def best_schedules(blocks: Sequence[Block], limits: Sequence[float]) -> list[Schedule]:
    """For every limit (bytes above what stands), the fastest schedule that the program finds, or none."""
    count, most = len(blocks), max(limits)
    step = most / LEVELS

    def units(size: Any) -> Any:
        """Levels that so many bytes take."""
        return np.ceil(np.maximum(size, 0.0) / step - 1e-9).astype(int)

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


def solved(blocks: Sequence[Block], units: Callable[[Any], Any]) -> tuple[Table, Table]:
    """Tables over (s, t, m): the least time, and where the first group ends (-1: the first block is kept)."""
    count = len(blocks)
    later = np.concatenate([np.cumsum([block.gradient for block in blocks][::-1])[::-1], [0.0]])   # gradients of blocks >= i
    forward = np.array([block.forward for block in blocks])
    outputs = [min(units(block.output), LEVELS + 1) for block in blocks]
    kept = [min(units(block.kept), LEVELS + 1) for block in blocks]
    rises = np.array([(blocks[r - 1].output if r else 0.0, blocks[r].rise) for r in range(count)])
    spikes = np.array([block.kept + block.spike for block in blocks]) + later[1:]
    needs = np.maximum(units(rises[:, 1:] + later[None, 1:]), units(spikes)[:, None])   # of keeping s, with t to run
    levels = np.arange(LEVELS + 1)
    time = np.full((count, count, LEVELS + 1), np.inf)
    paid = np.full((count, count, LEVELS + 1), np.inf)     # the time of r+1..t when r's output is held
    cut = np.full((count, count, LEVELS + 1), -1, dtype=np.int32)
    for length in range(count):
        for s in range(count - length):
            t = s + length
            block = blocks[s]
            own = block.forward + block.backward
            time[s, t, needs[s, t]:] = own
            if s < t:
                time[s, t, kept[s]:] += time[s + 1, t, :LEVELS + 1 - kept[s]]
                time[s, t, :kept[s]] = np.inf
            if s < t and block.inside:
                stop = next((r for r in range(s, t) if not blocks[r].inside), t)
                # Run s..r forward and forget them, one input and one block's rise at a time, for every r at once.
                tops = rises[s:stop].sum(axis=1) + later[t + 1]
                tops[0] -= rises[s, 0]
                through = units(np.maximum.accumulate(tops))
                options = np.cumsum(forward[s:stop])[:, None] + paid[s:stop, t]
                options += time[s, s:stop]
                np.putmask(options, levels < through[:, None], np.inf)
                best = options.argmin(axis=0)
                value = options[best, levels]
                better = value < time[s, t]
                time[s, t][better] = value[better]
                cut[s, t][better] = best[better] + s
            if s:
                paid[s - 1, t, outputs[s - 1]:] = time[s, t, :LEVELS + 1 - outputs[s - 1]]
    return time, cut
