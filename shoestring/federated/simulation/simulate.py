"""Simulated devices: their records lie here, and they work in chunks, a few at once, in as many processes as there are cores.

Which devices make a chunk follows from their names and the sizes of their records alone, and what chunks give is taken in their order, so
the result is the same bits with any number of processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoestring.core.batch import tensors
from shoestring.core.job import Job
from shoestring.federated.device_errors import kind_of
from shoestring.federated.records import Records, records_of
from shoestring.federated.round import Arrived, DeviceView, Objective, Order, Rejected, Round, Sent, not_finite
from shoestring.federated.simulation.cohort import Differs

KEPT = 256 << 20  # bytes of records that a process keeps as tensors

States = dict[str, dict[str, Tensor]]  # what techniques keep on devices, by the device's name


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk."""

    sent: tuple[Sent, ...]  # several where a device failed and the others worked alone
    states: States  # of its devices, afterwards
    rejected: tuple[Rejected, ...] = ()
    restored: tuple[
        str, ...
    ] = ()  # devices that keep the state of before, because what they would keep now is not finite
    differs: str = ""  # why the way in which devices work here is wrong: nothing of this round can be used


@dataclass
class Workshop:
    """Does the work of simulated devices, in one process."""

    parts: Round
    job: Job
    clients: Mapping[str, Any]
    seed: int
    kept: OrderedDict[str, Records] = field(default_factory=OrderedDict)
    size: int = 0  # bytes of those

    def done(self, order: Order, names: Sequence[str], states: States) -> ChunkResult:
        """The work of one chunk. If it fails, every device works alone, and those that fail are named."""
        devices, rejected = [], []
        for name in names:
            try:
                devices.append(DeviceView(self.records(name), dict(states.get(name, {}))))
            except Exception as error:
                rejected.append(Rejected(name, kind_of(error)))
        restored: list[str] = []
        try:
            sent = (self.worked(order, devices, restored),) if devices else ()
        except Differs as why:
            return ChunkResult((), {}, differs=str(why))
        except Exception as error:
            if len(devices) == 1:
                return ChunkResult((), {}, (*rejected, Rejected(devices[0].name, kind_of(error))))
            alone = [self.done(order, (device.name,), states) for device in devices]
            kept = {name: state for one in alone for name, state in one.states.items()}
            failed = (some for one in alone for some in one.rejected)
            return ChunkResult(
                tuple(sent for one in alone for sent in one.sent),
                kept,
                (*rejected, *failed),
                tuple(name for one in alone for name in one.restored),
                next((one.differs for one in alone if one.differs), ""),
            )
        return ChunkResult(
            sent, {device.name: device.state for device in devices if device.state}, tuple(rejected), tuple(restored)
        )

    def worked(self, order: Order, devices: Sequence[DeviceView], restored: list[str]) -> Sent:
        """What devices send. One whose update, or what it would keep, is not finite keeps what it kept before, and is named in `restored`:
        else every later round of it would be spoilt, too."""
        before = [dict(device.state) for device in devices]
        updates = self.parts.work(order, devices, Objective(self.parts.local))
        for device, state, why in zip(devices, before, not_finite(updates), strict=True):
            if device.state and (why or not finite_state(device)):
                device.state.clear()
                device.state.update(state)
                restored.append(device.name)
        return self.parts.encode(order, devices, updates)

    def records(self, name: str) -> Records:
        """A device's records; those used last stay as tensors, as far as there is room."""
        if name in self.kept:
            self.kept.move_to_end(name)
            return self.kept[name]
        found = records_of(self.job, name, self.clients[name], self.seed)
        self.kept[name] = found
        self.size += bytes_of(found)
        while self.size > KEPT and len(self.kept) > 1:
            self.size -= bytes_of(self.kept.popitem(last=False)[1])
        return found


def finite_state(device: DeviceView) -> bool:
    """Whether a device can go on from what techniques keep on it."""
    return all(bool(value.isfinite().all()) for value in device.state.values() if value.is_floating_point())


def bytes_of(records: Records) -> int:
    """About what a device's records take as tensors, with what is made of them: products of all pairs of samples, at most."""
    if records.whole is None:
        return 1024
    return (
        2 * sum(one.numel() * one.element_size() for one in tensors(records.whole)) + 4 * min(records.count, 1024) ** 2
    )


class SimulatedDevices:
    """Devices whose records are here. `states`: what techniques keep on them; it is kept up to date, and saved with the server's."""

    def __init__(self, workshop: Workshop, chunk: int, processes: int = 1, states: States | None = None) -> None:
        from shoestring.federated.simulation.pool import Pool

        self.workshop, self.chunk, self.states = workshop, chunk, states if states is not None else {}
        self.counts: dict[str, int] = {}
        self.pool = Pool(workshop, processes - 1, chunk) if processes > 1 else None

    def work(self, order: Order, names: Sequence[str]) -> Iterator[Arrived]:
        parts = self.workshop.parts
        there = [name for name in names if parts.answers(order, name)]
        away = tuple(name for name in names if name not in set(there))
        if away:
            yield Arrived(None, away)
        chunks = self.chunks(there)
        done: Generator[ChunkResult, None, None] = (
            self.pool.done(order, chunks, self.states)
            if self.pool
            else (self.workshop.done(order, chunk, self.states) for chunk in chunks)
        )
        with closing(done):
            for chunk, one in zip(chunks, done, strict=True):
                if one.differs:
                    raise Differs(one.differs)
                self.states.update(one.states)
                seconds = max(parts.duration(order, name) for name in chunk)
                if one.rejected:
                    yield Arrived(None, rejected=one.rejected)
                if one.restored:
                    yield Arrived(None, restored=one.restored)
                for sent in one.sent:
                    yield Arrived(sent, seconds=seconds)

    def chunks(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Devices with about as many records each: their steps end together."""
        ordered = sorted(names, key=self.count)  # stable: of equals, as they came
        return [tuple(ordered[begin : begin + self.chunk]) for begin in range(0, len(ordered), self.chunk)]

    def count(self, name: str) -> int:
        if name not in self.counts:
            try:
                self.counts[name] = len(self.workshop.clients[name])
            except Exception:  # whoever works on it will say what is wrong
                self.counts[name] = 0
        return self.counts[name]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
