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
from typing import Any

import numpy as np

from shoestring.core.ledger import Block
from shoestring.memory.recompute import Schedule, flat

LEVELS = 300

Table = np.ndarray[Any, Any]


def forgotten(blocks: Sequence[Block], schedule: Schedule) -> tuple[Block, ...]:
    """The blocks as they cost under a schedule over all of them (numbers are positions in `blocks`)."""
    changes: list[dict[str, Any]] = [{} for _ in blocks]
    for item in schedule:
        if not isinstance(item, int):
            members = flat(item)
            last = members[-1]
            for number in members:
                changes[number] = {"kept": 0.0}
            changes[last] = {"kept": blocks[last].output}
            replayed(blocks, changes, item, 0.0, blocks[last].output)
    return tuple(block.changed(**change) if change else block for block, change in zip(blocks, changes, strict=True))


def replayed(blocks: Sequence[Block], changes: list[dict[str, Any]], items: Schedule, alive: float, counted: float) -> None:
    """Write the cost of computing a segment again into `changes`; `counted` bytes of its last block are in `kept` already."""
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
            replayed(blocks, changes, item, start, counted if flat(item)[-1] == last else 0.0)
    # All members run forward again while the last one waits to go backward.
    again, waiting = [blocks[number] for number in members], vars(blocks[last]) | changes[last]
    changes[last] |= {
        "spike": max(waiting["spike"], top - counted), "backward": waiting["backward"] + sum(block.forward for block in again),
        "backward_flops": waiting["backward_flops"] + sum(block.flops for block in again),
        "backward_scratch": max(waiting["backward_scratch"], *(block.scratch for block in again)),
    }


def best_schedules(blocks: Sequence[Block], limits: Sequence[float]) -> list[Schedule]:
    """For every limit (bytes above what stands), the fastest schedule that the program finds, or none."""
    count, most = len(blocks), max(limits)
    step = most / LEVELS

    def units(size: Any) -> Any:
        """Levels that so many bytes take; one more than there are, if they are too many."""
        return np.minimum(np.ceil(np.maximum(size, 0.0) / step - 1e-9), LEVELS + 1).astype(np.int16)

    kept = units([block.kept for block in blocks]).tolist()
    outputs = units([block.output for block in blocks]).tolist()
    time, cut = solved(blocks, units, kept, outputs)

    def schedule(s: int, t: int, m: int) -> Schedule:
        if s > t:
            return ()
        r = int(cut[s, t, m])
        if r < 0:
            return (s, *schedule(s + 1, t, m - kept[s]))
        return (schedule(s, r, m), *schedule(r + 1, t, m - outputs[r]))

    found = []
    gradients = sum(block.gradient for block in blocks)   # all that is there in the end; before, the program counts them
    for limit in limits:
        m = int(limit / step + 1e-9)
        if np.isfinite(time[0, count - 1, m]) and limit * (1 + 1e-9) >= gradients:
            found.append(schedule(0, count - 1, m))
    return list(dict.fromkeys(found))


def solved(blocks: Sequence[Block], units: Callable[[Any], Any], kept: list[int], outputs: list[int]) -> tuple[Table, Table]:
    """Tables over (s, t, m): the least time, and where the first segment ends (-1: the first block is kept).

    From the last s to the first; for every s, from the smallest segment to the largest; for all t and m at once.
    """
    count = len(blocks)
    later = np.concatenate([np.cumsum([block.gradient for block in blocks][::-1])[::-1], [0.0]])   # gradients of blocks >= i
    forward = np.array([block.forward for block in blocks])
    carried = np.array([0.0, *(block.output for block in blocks[:-1])])
    rises = np.array([block.rise for block in blocks])
    spikes = np.array([block.kept + block.spike for block in blocks]) + later[1:]
    needs = np.maximum(units(rises[:, None] + later[None, 1:]), units(spikes)[:, None])   # of keeping s, with t to run
    levels = np.arange(LEVELS + 1, dtype=np.int16)
    time = np.full((count, count, LEVELS + 1), np.inf)
    cut = np.full((count, count, LEVELS + 1), -1, dtype=np.int16)
    for s in reversed(range(count)):
        block = blocks[s]
        np.copyto(time[s, s:], block.forward + block.backward, where=levels >= needs[s, s:, None])
        if s + 1 < count:
            time[s, s + 1:, kept[s]:] += time[s + 1, s + 1:, :LEVELS + 1 - kept[s]]
            time[s, s + 1:, :kept[s]] = np.inf
        stop = next((r for r in range(s, count - 1) if not blocks[r].inside), count - 1)
        # Run s..r forward and forget them, one input and one block's rise at a time.
        tops = (carried + rises)[s:stop, None] + later[1:]
        tops[:1] -= carried[s]
        through = units(np.maximum.accumulate(tops))
        spent = np.cumsum(forward[s:stop])
        for r in range(s, stop):
            least = max(through[r - s, -1], outputs[r])
            value = spent[r - s] + time[r + 1, r + 1:, least - outputs[r]:LEVELS + 1 - outputs[r]]
            value += time[s, r, least:]
            better = value < time[s, r + 1:, least:]
            better &= levels[least:] >= through[r - s, r + 1:, None]
            np.copyto(time[s, r + 1:, least:], value, where=better)
            np.copyto(cut[s, r + 1:, least:], r, where=better)
    return time, cut
