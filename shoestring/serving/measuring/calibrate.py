"""Measure a model for serving, in a process of its own: how long batches take, what a replica needs, how replicas slow each other.

    batches of one length, short to long, few to many    ->  ServiceTime, padded
    batches of mixed lengths                             ->  ServiceTime, packed, if the engine packs
    the same batch in 1, 2, ... processes at once        ->  slowdown

Seconds are those on a core: what other processes took of the machine meanwhile is left out, and told (measure/load).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from shoestring.core.errors import Mistake
from shoestring.core.workers.link import Link
from shoestring.measure.load import Timing, believed_timings, busy_share, effort, timing
from shoestring.processes.task import Task, Tell
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.onnx_engine import MARGIN, OnnxEngine
from shoestring.serving.engines.signature import ModelInterface
from shoestring.serving.engines.torch_engine import TorchEngine
from shoestring.serving.loading import LoadedModel, ServedSource, opened_model, several
from shoestring.serving.measuring.evidence import ONNX, ONNX_INT8, TORCH, EngineEvidence, ServingEvidence
from shoestring.serving.measuring.service_time import MeasuredBatch, fit_service_time
from shoestring.serving.sample import Sample

REPEATS = 3  # of a batch that is timed
MOST_LENGTHS = 2000  # lengths that are kept of the job's samples
ROWS = (1, 4, 16)  # of batches of one length
MIXED = ((2, 4), (8, 12), (24, 32))  # rows of batches of mixed lengths
EXACT = 1e-3  # largest relative difference that is rounding
AT_ONCE, AT_LEAST = 4, 0.1  # times, and seconds, that processes compute the same batch at once
SHORTEST = 1e-4  # seconds that the kernel's count of a process is right to
FRONT_SECONDS = 4e-4  # CPU time of a request in the front: an estimate, nothing measures it yet


@dataclass(frozen=True)
class CalibrateTask(Task[ServingEvidence]):
    """Measure what a user named."""

    room: ClassVar[str] = "serving"
    kind: ClassVar[str] = "calibrate"
    result: ClassVar[type[Any]] = ServingEvidence

    path: str
    job: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    newest: bool = False
    cores: int = 1

    def perform(self, tell: Tell, link: Link | None) -> ServingEvidence:
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        return measure_service(ServedSource(self.path, self.job, self.flags, self.newest), self.cores)


def measure_service(source: ServedSource, cores: int) -> ServingEvidence:
    imported = held_bytes()
    found = opened_model(source)
    interface = found.interface()
    mixed = several(interface.samples, 4)
    timings: list[Timing] = []
    known, missing, slowdown = {}, {}, {1: 1.0}
    with TemporaryDirectory(prefix="shoestring-serving-") as folder:
        for name, make in makers(found, interface, Path(folder)):
            try:
                engine = make()
            except Mistake as error:
                if name == TORCH:
                    raise
                missing[name] = str(error)
                continue
            seconds, replica = together_from_one(partial(engine.answers, mixed), cores)
            known[name] = engine_evidence(engine, interface.samples, timings, replica)
            slower = {count: max(one / seconds[1], 1.0) for count, one in seconds.items()}
            slowdown = {count: max(one, slowdown.get(count, 1.0)) for count, one in slower.items()}
    return ServingEvidence(
        known,
        missing,
        tuple(one.length for one in interface.samples[:MOST_LENGTHS]),
        FRONT_SECONDS,
        imported.all + imported.written,  # what two processes import is in memory once, what they write twice
        slowdown,
        cores,
        busy_share(timings),
    )


def makers(
    found: LoadedModel, interface: ModelInterface, folder: Path
) -> Iterator[tuple[str, Callable[[], ServingEngine]]]:
    """The engines by name. Torch's comes last: it shares the weights of the module that the others export."""
    model, forward = found.model, found.job.forward
    for name, fast in ((ONNX, False), (ONNX_INT8, True)):
        yield name, partial(OnnxEngine, model, forward, interface, folder / f"{name}.onnx", fast=fast)
    yield TORCH, partial(TorchEngine, model, forward, interface)


def engine_evidence(
    engine: ServingEngine, samples: Sequence[Sample], timings: list[Timing], replica: int
) -> EngineEvidence:
    """What one engine takes; `timings` collects all that were timed."""
    answer = engine.answers
    padded = [MeasuredBatch(lengths(batch), batch_seconds(answer, batch, timings)) for batch in equal_batches(samples)]
    mixed = list(mixed_batches(samples)) if engine.packs else []
    packed = [*padded, *(MeasuredBatch(lengths(batch), batch_seconds(answer, batch, timings)) for batch in mixed)]
    size, changed = kept_and_changed(engine)
    return EngineEvidence(
        fit_service_time(padded, packed=False),
        fit_service_time(packed, packed=True) if engine.packs else None,
        engine.why_not_packed,
        shared_bytes=size,
        replica_bytes=replica,
        size_bytes=size,
        quality=1.0 - changed,
        tolerance=engine.tolerance,
    )


def kept_and_changed(engine: ServingEngine) -> tuple[int, float]:
    """Bytes on disk, and by how much answers differ from the model's, where that is more than rounding."""
    if isinstance(engine, OnnxEngine):
        return engine.exported.path.stat().st_size, engine.tolerance / MARGIN if engine.tolerance > EXACT else 0.0
    assert isinstance(engine, TorchEngine), "there are two kinds"
    # those with several names once, as they are stored; a state_dict has them under each
    return sum(one.nbytes for one in (*engine.model.parameters(), *engine.model.buffers())), 0.0


def lengths(batch: Sequence[Sample]) -> tuple[int, ...]:
    return tuple(one.length for one in batch)


def equal_batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Batches of one length each: the shortest, the middle one, the longest."""
    for sample in unique_lengths(several(samples, 3)):
        for rows in ROWS:
            yield [sample] * rows


def mixed_batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    for few, many in MIXED:
        yield several(samples, few)
        yield several(samples, many)


def unique_lengths(samples: Sequence[Sample]) -> list[Sample]:
    return list({one.length: one for one in samples}.values())


def batch_seconds(answer: Callable[[Sequence[Sample]], Any], batch: Sequence[Sample], timings: list[Timing]) -> float:
    """Seconds of a batch on a core, the median of some, after one that is not counted."""
    answer(batch)
    found = []
    for _ in range(REPEATS):
        before, began = effort(), time.perf_counter()
        answer(batch)
        found.append(timing(time.perf_counter() - began, before, effort()))
    timings += found
    counted = sorted(found[place].alone for place in believed_timings(found))
    return counted[len(counted) // 2]


def together_from_one(compute: Callable[[], Any], cores: int) -> tuple[dict[int, float], int]:
    """Seconds of a batch while 1, 2, ... processes compute: they share caches and memory bandwidth. And the bytes of each."""
    found = {count: together(compute, count) for count in range(1, cores + 1)}
    seconds = {count: sum(one.seconds for one in several) / count for count, several in found.items()}
    return seconds, max(one.bytes for several in found.values() for one in several)


class Computed(NamedTuple):
    """What a process says that computed."""

    seconds: float  # on a core, of one computation
    bytes: int  # that it shares with nobody


def together(compute: Callable[[], Any], count: int) -> list[Computed]:
    """So many forked processes that compute the same at once."""
    go_read, go_write = os.pipe()
    ends, begun = [], []
    for _ in range(count):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            compute_when_told(compute, go_read, go_write, write)
        os.close(write)
        ends.append(read)
        begun.append(child)
    for end in ends:
        os.read(end, 1)  # it is ready
    os.close(go_read)
    os.close(go_write)  # all begin
    texts = [read_all(end) for end in ends]
    for child in begun:
        os.waitpid(child, 0)
    assert all(texts), "a process that computes says what it took"
    return [Computed(*json.loads(text)) for text in texts]


def compute_when_told(compute: Callable[[], Any], go_read: int, go_write: int, write: int) -> NoReturn:
    code = 1
    try:
        os.close(go_write)
        compute()
        os.write(write, b"r")
        os.read(go_read, 1)
        before, began, count = effort(), time.perf_counter(), 0
        while count < AT_ONCE or time.perf_counter() < began + AT_LEAST:
            compute()
            count += 1
        seconds = max(effort().ran - before.ran, SHORTEST) / count
        os.write(write, json.dumps([seconds, held_bytes().all]).encode())
        code = 0
    finally:
        os._exit(code)


def read_all(end: int) -> bytes:
    with os.fdopen(end, "rb") as file:
        return file.read()


class HeldBytes(NamedTuple):
    """Memory of this process that no other one shares."""

    all: int
    written: int  # of it, what it has written itself


def held_bytes() -> HeldBytes:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        found = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in file)
            if rest.endswith("kB\n")
        }
    return HeldBytes(found["Private_Clean"] + found["Private_Dirty"], found["Private_Dirty"])
