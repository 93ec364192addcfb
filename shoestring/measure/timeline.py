"""Read a tracker's log: the peak, where it is and what it consists of, and the ledger of a plain step.

Contract: A peak is read off a log here, or walked on a ledger's timeline (core/costs/ledger), and nowhere else. It is that of
the first two steps, because optimizers make their state in the first (tests/measure/test_timeline.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoestring.core.costs.ledger import Block
from shoestring.measure.tracker import VALIDATE, Log, Moment, StorageEvent


@dataclass(frozen=True)
class Peak:
    bytes: int
    moment: Moment
    parts: tuple[tuple[str, int], ...]  # bytes by role, largest first


class MomentSpan(NamedTuple):
    moment: Moment
    start: int  # bytes alive at its begin
    top: int  # bytes alive at its peak
    end: int  # bytes alive at its end


def stretches(log: Log, size: Callable[[int], int] = int) -> Iterator[MomentSpan]:
    """The live bytes of every moment in the log; `size` gives the memory that a storage of n bytes takes."""
    alive = 0
    sizes: dict[int, int] = {}
    for moment, events in log.moments():
        start = top = alive
        for event in events:
            before = sizes.get(event.storage, 0)
            now = before + event.bytes
            sizes[event.storage] = now
            alive += size(now) - size(before)
            top = max(top, alive)
        yield MomentSpan(moment, start, top, alive)


def with_filled_workspaces(log: Log, share: float) -> Log:
    """The log as the kernel sees it if libraries write to this fraction of their workspaces: untouched pages take no
    memory."""
    return (
        replace(
            log,
            events=[
                StorageEvent(event.storage, int(share * event.bytes)) if event.storage in log.workspaces else event
                for event in log.events
            ],
        )
        if share < 1
        else log
    )


def peak(log: Log) -> Peak:
    """The largest number of bytes alive at once in the log's steps, and what they were. Preparing the run is not part
    of a step."""
    best, moment, position = -1, Moment("", ""), 0
    alive = seen = 0
    first = log.marks[0][0] if log.marks else 0
    for where, events in log.moments():
        for event in events:
            alive += event.bytes
            seen += 1
            if alive > best and seen >= first:
                best, moment, position = alive, where, seen
    return Peak(best, moment, tuple(parts_at(log, position).most_common()))


def parts_at(log: Log, position: int) -> Counter[str]:
    """Bytes alive after so many events, by role; storages without a role are named after the phase in which they were
    allocated."""
    alive: Counter[int] = Counter()
    births: dict[int, str] = {}
    seen = 0
    for moment, events in log.moments():
        for event in events[: position - seen]:
            alive[event.storage] += event.bytes
            births.setdefault(event.storage, "activations" if moment.phase in ("forward", VALIDATE) else "temporaries")
        seen += len(events)
        if seen >= position:
            break
    parts: Counter[str] = Counter()
    for storage, size in alive.items():
        parts[log.roles.get(storage, births[storage])] += size
    return +parts


def last_step(log: Log) -> tuple[list[MomentSpan], dict[int, tuple[Moment, int]]]:
    """The moments of the last whole step, and every storage allocated in it with its moment and size."""
    spans = list(zip(stretches(log), (events for _, events in log.moments()), strict=True))
    updates = [k for k, (stretch, _) in enumerate(spans) if stretch.moment.phase == "update"]
    stop = updates[-1]
    start = next(k for k in range(stop, -1, -1) if spans[k][0].moment.phase == "" or k == 0)
    born = {
        event.storage: (stretch.moment, event.bytes)
        for stretch, events in spans[start : stop + 1]
        for event in events
        if event.bytes > 0
    }
    return [stretch for stretch, _ in spans[start : stop + 1] if stretch.moment.phase], born


def validation(log: Log) -> list[MomentSpan]:
    """The moments of the validation after the steps; empty if there is none."""
    return [stretch for stretch in stretches(log) if stretch.moment.phase == VALIDATE]


def blocks_of(log: Log) -> tuple[Block, ...]:
    """The blocks of the last plain step, in execution order, with the bytes and operations of each."""
    step, born = last_step(log)
    steps = max(sum(moment.phase == "update" for _, moment in log.marks), 1)  # operations are counted over all of them
    forward = [stretch for stretch in step if stretch.moment.phase == "forward"]
    gradient: Counter[str] = Counter()
    for storage, (moment, size) in born.items():
        if log.roles.get(storage) == "gradients":
            gradient[moment.block] += size
    tops: dict[str, int] = {}
    for stretch in step:
        if stretch.moment.phase == "backward":
            tops[stretch.moment.block] = max(tops.get(stretch.moment.block, 0), stretch.top)
    kept, later = forward[-1].end - forward[0].start, 0
    blocks = []
    for stretch in reversed(forward):
        name = stretch.moment.block
        held = stretch.end - stretch.start
        base = forward[0].start + kept + later
        blocks.append(
            Block(
                name,
                inside=name in log.outputs,
                kept=held,
                rise=stretch.top - stretch.start,
                output=sum(
                    born[storage][1]
                    for storage in log.outputs.get(name, ())
                    if born.get(storage, ("", 0))[0] == stretch.moment
                ),
                spike=tops.get(name, base) - base,
                gradient=gradient[name],
                flops=log.flops[Moment("forward", name)] / steps,
                backward_flops=log.flops[Moment("backward", name)] / steps,
            )
        )
        kept, later = kept - held, later + gradient[name]
    return tuple(reversed(blocks))
