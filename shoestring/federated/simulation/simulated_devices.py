"""Simulated devices: they train in chunks of a few at once, in as many processes as there are cores.

The chunks follow from the devices' names and record counts alone, and results are used in a fixed order, so the result
is the same bits with any number of processes.
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
from shoestring.federated.devices.device_errors import Failure, error_kind
from shoestring.federated.devices.device_output import withheld_output
from shoestring.federated.devices.records import Records, records_of
from shoestring.federated.playing.play import nonfinite_problems
from shoestring.federated.playing.round_events import some_of
from shoestring.federated.round import (
    DeviceResults,
    DeviceView,
    EncodedUpdates,
    Objective,
    Order,
    RejectedDevice,
    Round,
)
from shoestring.federated.simulation.cohort import MethodDiffers

CACHE_BYTES = 256 << 20  # bytes of records that a process keeps as tensors

States = dict[str, dict[str, Tensor]]  # device's name -> state that techniques keep on it


@dataclass(frozen=True)
class ChunkResult:
    """The result of one chunk of devices."""

    sent: tuple[EncodedUpdates, ...]  # more than one if a device failed and each of the others worked alone
    states: States  # of its devices after the work
    rejected: tuple[RejectedDevice, ...] = ()
    restored: tuple[str, ...] = ()  # devices whose new state was not finite, so they keep the old one
    differs: str = ""  # how the simulation method differs from the plain loop; if it does, the round can't be used


@dataclass
class DeviceWorker:
    """Does the work of simulated devices in one process."""

    parts: Round
    job: Job
    clients: Mapping[str, Any]
    seed: int
    named: bool = True  # whether errors may name devices; not in a private federation
    cache: OrderedDict[str, Records] = field(default_factory=OrderedDict)
    size: int = 0  # bytes of the cached records

    @withheld_output()
    def run_chunk(self, order: Order, names: Sequence[str], states: States) -> ChunkResult:
        """Do the work of one chunk. If it fails, every device works alone, to find out which devices fail."""
        devices, rejected = [], []
        for name in names:
            try:
                devices.append(DeviceView(self.records(name), dict(states.get(name, {}))))
            except Failure as error:
                rejected.append(RejectedDevice(name, error_kind(error)))
        restored: list[str] = []
        try:
            sent = (self.train_and_encode(order, devices, restored),) if devices else ()
        except MethodDiffers as why:
            return ChunkResult((), {}, differs=str(why))
        except Failure as error:
            if len(devices) == 1:
                return ChunkResult((), {}, (*rejected, RejectedDevice(devices[0].name, error_kind(error))))
            alone = [self.run_chunk(order, (device.name,), states) for device in devices]
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

    @withheld_output()
    def train_and_encode(self, order: Order, devices: Sequence[DeviceView], restored: list[str]) -> EncodedUpdates:
        """Train devices and encode their updates.

        A device whose update or new state is not finite gets its old state back and is added to `restored`; otherwise
        all of its later rounds would fail, too.
        """
        before = [dict(device.state) for device in devices]
        updates = self.parts.work(order, devices, Objective(self.parts.local))
        for device, state, why in zip(devices, before, nonfinite_problems(updates), strict=True):
            if device.state and (why or not has_finite_state(device)):
                device.state.clear()
                device.state.update(state)
                restored.append(device.name)
        return self.parts.encode(order, devices, updates)

    def describe(self, names: Sequence[str]) -> str:
        return f"the clients {some_of(names)}" if self.named else f"{len(names)} clients"

    @withheld_output()
    def records(self, name: str) -> Records:
        """A device's records, with the most recently used ones in a cache."""
        if name in self.cache:
            self.cache.move_to_end(name)
            return self.cache[name]
        found = records_of(self.job, name, self.clients[name], self.seed)
        self.cache[name] = found
        self.size += records_bytes(found)
        while self.size > CACHE_BYTES and len(self.cache) > 1:
            self.size -= records_bytes(self.cache.popitem(last=False)[1])
        return found


def has_finite_state(device: DeviceView) -> bool:
    """Whether all of a device's state is finite."""
    return all(bool(value.isfinite().all()) for value in device.state.values() if value.is_floating_point())


def records_bytes(records: Records) -> int:
    """Estimated bytes of a device's records as tensors, plus tensors derived from them: at most products of all pairs
    of samples."""
    if records.whole is None:
        return 1024
    return (
        2 * sum(one.numel() * one.element_size() for one in tensors(records.whole)) + 4 * min(records.count, 1024) ** 2
    )


class SimulatedDevices:
    """Devices whose records are on this machine. `states` is updated in place; the caller saves it with the server's
    state."""

    def __init__(self, worker: DeviceWorker, chunk: int, processes: int = 1, states: States | None = None) -> None:
        from shoestring.federated.simulation.pool import Pool

        self.worker, self.chunk, self.states = worker, chunk, states if states is not None else {}
        self.counts: dict[str, int] = {}
        self.pool = Pool(worker, processes - 1, chunk) if processes > 1 else None

    def work(self, order: Order, names: Sequence[str]) -> Iterator[DeviceResults]:
        parts = self.worker.parts
        there = [name for name in names if parts.answers(order, name)]
        away = tuple(name for name in names if name not in set(there))
        if away:
            yield DeviceResults(None, away)
        chunks = self.chunks(there)
        done: Generator[ChunkResult, None, None] = (
            self.pool.run_chunks(order, chunks, self.states)
            if self.pool
            else (self.worker.run_chunk(order, chunk, self.states) for chunk in chunks)
        )
        with closing(done):
            for chunk, one in zip(chunks, done, strict=True):
                if one.differs:
                    raise MethodDiffers(one.differs)
                self.states.update(one.states)
                seconds = max(parts.duration(order, name) for name in chunk)
                if one.rejected:
                    yield DeviceResults(None, rejected=one.rejected)
                if one.restored:
                    yield DeviceResults(None, restored=one.restored)
                for sent in one.sent:
                    yield DeviceResults(sent, seconds=seconds)

    def chunks(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Groups of devices with about as many records each, so that they take about as many steps."""
        ordered = sorted(names, key=self.count)  # stable: equals keep their order
        return [tuple(ordered[begin : begin + self.chunk]) for begin in range(0, len(ordered), self.chunk)]

    def count(self, name: str) -> int:
        if name not in self.counts:
            try:
                with withheld_output():
                    self.counts[name] = len(self.worker.clients[name])
            except Failure:  # the device's work will report what is wrong
                self.counts[name] = 0
        return self.counts[name]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
