"""The ledger of a job's plain step: bytes and operations from fake tensors, seconds and process size from the
anchor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Block, Ledger, interpolate
from shoestring.core.costs.ledger_parts import (
    Allocation,
    AllocatorRates,
    Findings,
    Machine,
    Splitting,
    StandingBytes,
    Trait,
    UpdateCost,
    ValidationCost,
    Workers,
)
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.units import seconds_text
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh, imagined_mesh, on_one_axis, rank_at
from shoestring.data.feed import NO_BATCH
from shoestring.data.lengths import planned_batches
from shoestring.measure.timeline import blocks_of, last_step, peak, validation, with_filled_workspaces
from shoestring.measure.tracker import VALIDATE, Log
from shoestring.training.evidence.held_out import looked_through, without_validation
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.evidence.tasks import SampleResult
from shoestring.training.group_technique import mesh_sizes, uniting
from shoestring.training.technique import TrainingTechnique as Technique

CAUTION = 1.1  # safety factor on memory that the allocator keeps: the ledger should not promise too little

NOTABLE = 0.25  # share of a step: data that take longer are worth a word


@dataclass(frozen=True)
class Anchor:
    """The measurements of one real step; times in seconds by "phase place"."""

    times: Mapping[str, float]
    paces: tuple[tuple[float, float], ...]  # (n, time in n micro-batches / time at once)
    adding: float  # seconds to add all gradients to a sum
    probes: Mapping[
        str, float
    ]  # seconds of techniques' probes: "call": the update of one small weight; "fused": by the fused kernel
    following: float  # seconds of the whole step under the allocator that follows the tensors
    process: int  # bytes of the process under the default allocator
    tensors: int  # bytes of tensors at its peak
    overheads: Mapping[str, int]  # bytes above the tensors by "phase place", under the allocator that follows them
    filled: float = 1.0  # fraction of libraries' workspaces that is written to
    pieces: int = 1  # micro-batches of the anchor step, where the whole batch was too large
    eased: bool = False  # whether it needed techniques to fit this machine
    sampled: bool = False  # whether it was put together from one block of each kind
    validation_seconds: float = 0.0  # of the job's own validation, where it has one,
    validation_bytes: int = 0  # and the most bytes of tensors that it makes
    spread: float = 0.0  # mean deviation of steps from the median, relative to it
    busy: float = 0.0  # fraction of the time that other processes slowed down even the best step
    waiting: float = 0.0  # seconds that a step waits for its batch


def plain_ledger(
    job: Job, log: Log, half: Log | None, hardware: Hardware, anchor: Anchor | None, traits: Iterable[str]
) -> Ledger:
    """The ledger of the step in `log`; `half` is the log of the same step with half the batch."""
    if anchor is not None:
        log, half = with_filled_workspaces(log, anchor.filled), half and with_filled_workspaces(half, anchor.filled)
    blocks = tuple(
        block for block in blocks_of(log) if block.inside or any((block.kept, block.rise, block.spike, block.flops))
    )
    batch = first_batch(job)
    count = job.count(batch) if Trait.UNSPLITTABLE not in traits else 1
    part = {block.name: block for block in blocks_of(half)} if half is not None else {}
    parted = job.count(job.pieces(batch, 2)[0]) if half is not None else 0
    blocks = tuple(with_seconds(block, hardware, anchor) for block in blocks)
    at_zero_batch = tuple(
        extrapolate_to_zero_batch(block, part[block.name], parted / count)
        if block.name in part
        else Block(block.name, block.inside)
        for block in blocks
    )
    parts = standing(log)
    step, born = last_step(log)
    update_top = max(stretch.top for stretch in step if stretch.moment.phase == "update")
    tensors = sum(parts.values())
    per_byte_sent, per_message, _ = hardware.links.get(str(job.link.world), (0.0, 0.0, 0.0))
    update = UpdateCost(
        update_seconds(anchor, tensors - parts["constants"], hardware),
        rise=update_top - tensors - sum(block.gradient for block in blocks),
        fused_seconds=anchor.probes.get("fused") if anchor else None,
        call_seconds=anchor.probes.get("call", 0.0) * sum(role == "parameters" for role in log.roles.values())
        if anchor
        else 0.0,
    )
    basis = "measured on fake tensors, times " + (
        "from operations at the machine's speed"
        if anchor is None
        else "from one real block of each kind"
        if anchor.sampled
        else "relative to one real step"
    )
    waiting = anchor.waiting if anchor is not None else 0.0
    if anchor is not None and waiting > NOTABLE * anchor.times["step"]:
        basis += f", and {seconds_text(waiting)} of every step is waiting for its batch"
    ledger = Ledger(
        blocks,
        at_zero_batch,
        count,
        standing=StandingBytes(**parts),
        update=update,
        splitting=Splitting(((1.0, 1.0), *anchor.paces), anchor.adding) if anchor else Splitting(),
        machine=machine_of(hardware),
        allocation=Allocation(allocated=float(sum(size for _, size in born.values()))),
        workers=Workers(
            job.link.world,
            per_byte_sent,
            per_message,
            hardware.device != "cpu",
            samples=whole_count(job) if job.link.world > 1 else count,
            own=count,
        ),
        findings=Findings(frozenset(traits), basis=basis),
        validation=validation_part(job, log, blocks, hardware, anchor),
        waiting=waiting,
    )
    return with_process(ledger, peak(log).bytes, hardware, anchor)


def machine_of(hardware: Hardware) -> Machine:
    """The machine's cost of moving bytes; zero for a disk that nobody described, because nothing may use it."""
    if not hardware.disk:
        return Machine(cores=hardware.cores)
    return Machine(1 / hardware.disk, 1 / (hardware.direct or hardware.disk), hardware.moving, hardware.cores)


def validation_part(
    job: Job, log: Log, blocks: Iterable[Block], hardware: Hardware, anchor: Anchor | None
) -> ValidationCost | None:
    """The cost of a validation: its bytes from the log, its seconds at the speed of the step's forward."""
    found = validation(log)
    if not found:
        return None
    forward, flops = sum(block.forward for block in blocks), sum(block.flops for block in blocks)
    speed = flops / forward if forward and flops else hardware.flops
    held_out = looked_through(job) if job.held_out is not None else None
    much = held_out.all if held_out is not None else 1.0
    own = anchor if job.validate is not None else None
    base = min(anchor.overheads.values()) if anchor is not None else 0
    above = (
        max((size for name, size in anchor.overheads.items() if name.startswith(f"{VALIDATE} ")), default=base)
        if anchor
        else 0
    )
    top = max(stretch.top for stretch in found) if own is None else found[0].end + own.validation_bytes
    seconds = (
        log.validation_flops / speed * much + (held_out.seconds if held_out else 0.0)
        if own is None
        else own.validation_seconds
    )
    return ValidationCost(top - sum(standing(log).values()), max(above - base, 0), seconds, much)


def with_process(ledger: Ledger, tensors: int, hardware: Hardware, anchor: Anchor | None) -> Ledger:
    """The ledger with the process's memory above its tensors, and the cost of each allocator."""
    base, price, retention = hardware.base, hardware.fault, 0.0 if hardware.described else 0.25
    if anchor is not None:
        base = min(anchor.overheads.values())
        blocks = tuple(
            replace(
                block,
                scratch=scratch(anchor, "forward", block.name, base),
                backward_scratch=scratch(anchor, "backward", block.name, base),
            )
            for block in ledger.blocks
        )
        ledger = replace(
            ledger, blocks=blocks, update=replace(ledger.update, scratch=scratch(anchor, "update", "", base))
        )
        allocated = ledger.allocation.allocated
        retention = CAUTION * max(anchor.process - base - anchor.tensors, 0) / max(allocated / anchor.pieces, 1.0)
        price = max(anchor.following - anchor.times["step"], 0.0) / max(allocated, 1.0)
    default, follows = AllocatorRates(retention=retention), AllocatorRates(slack=0.01, per_byte_allocated=price)
    kinds = {
        "default": default,
        "pinned": follows,
        "huge": follows,
        "jemalloc": AllocatorRates(0.0, retention / 2, price / 2),
        "mimalloc": AllocatorRates(0.0, retention / 2, price / 4),
    }
    base += hardware.links.get(str(ledger.workers.world), (0.0, 0.0, 0.0))[2]
    return replace(ledger, allocation=replace(ledger.allocation, base=base, rates=default, kinds=kinds))


def anchor_of_sample(found: SampleResult, log: Log) -> Anchor:
    """An anchor from a sample of the blocks; code between blocks is timed by its operations at the blocks' speed."""
    steps = sum(moment.phase == "update" for _, moment in log.marks)
    flops = {(moment.phase, moment.block): count / steps for moment, count in log.flops.items()}
    times = {}
    for number, phase in enumerate(("forward", "backward")):
        for name, seconds in found.blocks.items():
            times[f"{phase} {name}"] = seconds[number]
        spent = sum(seconds[number] for seconds in found.blocks.values())
        speed = sum(flops.get((phase, name), 0.0) for name in found.blocks) / max(spent, 1e-9)
        for (other, place), count in flops.items():
            if other == phase and place not in found.blocks:
                times[f"{phase} {place}"] = count / max(speed, 1.0)
    parameters = standing(log)["parameters"]
    times["update (update)"] = found.update * parameters
    times["step"] = sum(times.values())
    return Anchor(
        times,
        (),
        0.0,
        {"fused": found.fused * parameters},
        times["step"],
        0,
        0,
        {"": found.overhead},
        sampled=True,
        busy=found.held_up,
    )


def scratch(anchor: Anchor, phase: str, place: str, base: float) -> float:
    return max(anchor.overheads.get(f"{phase} {place}", base) - base, 0.0)


def standing(log: Log) -> dict[str, int]:
    """Bytes by role that stand when the last step begins."""
    alive: Counter[int] = Counter()
    updates = [position for position, moment in log.marks if moment.phase == "update"]
    begin = next(
        position
        for position, moment in log.marks
        if moment.phase == "forward" and (len(updates) < 2 or position >= updates[-2])
    )
    for event in log.events[:begin]:
        alive[event.storage] += event.bytes
    parts = dict.fromkeys(("parameters", "buffers", "inputs", "optimizer", "constants"), 0)
    for storage, size in alive.items():
        role = log.roles.get(storage, "inputs")
        role = "constants" if role == "data" else role
        parts[role if role in parts else "inputs"] += size
    return parts


def with_seconds(block: Block, hardware: Hardware, anchor: Anchor | None) -> Block:
    if anchor is None:
        return replace(block, forward=block.flops / hardware.flops, backward=block.backward_flops / hardware.flops)
    return replace(
        block,
        forward=anchor.pieces * time_of(anchor.times, "forward", block.name),
        backward=anchor.pieces * time_of(anchor.times, "backward", block.name),
    )


def time_of(times: Mapping[str, float], phase: str, place: str) -> float:
    """Seconds of a place; several visits of one block are not told apart."""
    return times.get(f"{phase} {re.sub('#[0-9]+', '', place)}", 0.0)


def extrapolate_to_zero_batch(full: Block, part: Block, share: float) -> Block:
    """The block at batch size zero, extrapolated from a part of the batch and the whole."""
    return interpolate(part, full, -share / (1 - share)) if share < 1 else Block(full.name, full.inside)


def update_seconds(anchor: Anchor | None, tensors: float, hardware: Hardware) -> float:
    if anchor is None:
        return tensors / hardware.bandwidth  # the update reads and writes every number once or twice
    return anchor.times.get("update (update)", 0.0)


def first_batch(job: Job) -> Any:
    """The first planned batch: the largest if it is known, else the first of the data."""
    batch = next(planned_batches(job), None)
    if batch is None:
        raise Mistake(NO_BATCH)
    return batch


def whole_count(job: Job) -> int:
    """Samples of a batch over all workers; 1 if it can't be divided."""
    whole = replace(job, mesh=on_one_axis())
    return 1 if unsplittable(whole) else job.count(first_batch(whole))


def workers_per_copy(job: Job, devices: int) -> int:
    """The least number of workers that must share one replica so that each replica has a sample of every batch."""
    count = whole_count(job)
    return next(number for number in range(1, devices + 1) if devices % number == 0 and devices // number <= count)


def mesh_of_largest(job: Job, techniques: Iterable[Technique], place: Link) -> Mesh:
    """The imagined mesh of the worker with the largest part of a batch; if several workers share that part, of the
    first."""
    techniques = tuple(techniques)
    united = bool(uniting(techniques))
    sizes = mesh_sizes(techniques, place.world, 1 if united else workers_per_copy(job, place.world))
    rank = rank_at(sizes, {"data": largest_worker(job, sizes["data"]), "stage": 0, "tensor": 0})
    return imagined_mesh(sizes, rank, place.same_machine, place.speeds)


def largest_worker(job: Job, devices: int) -> int:
    """The rank of the worker that needs most: the last, with the largest part of a batch; or the first if parts are
    equal."""
    whole = replace(job, mesh=on_one_axis())
    count = whole_count(job)
    if job.split is not None and count >= devices > 1:
        parts = [float(job.weight(piece)) for piece in job.pieces(first_batch(whole), devices)]
        return parts.index(max(parts))
    return devices - 1 if count % devices else 0


def unsplittable(job: Job) -> str:
    """Why the job's batches can't be split; empty if they can."""
    batch = first_batch(job)
    try:
        if job.count(batch) > 1:
            job.pieces(batch, 2)
    except Mistake as error:
        hint = "" if job.split is not None else "; or say how with split=lambda batch, pieces: [...] in the Job"
        return f"{error}{hint}"
    return ""


def traits_of(job: Job, log: Log, own_process: bool) -> set[str]:
    """Traits of the model and the job that techniques depend on."""
    traits = set[str]()
    if log.draws:
        traits.add(Trait.DRAWS)
    if log.mixes:
        traits.add(Trait.MIXES_SAMPLES)
    traits |= log.traits
    if log.blocks and not set(log.blocks) & set(log.outputs):
        traits.add(Trait.NO_BLOCK_RUNS)
    if job.clip:
        traits.add(Trait.CLIPS)
    if own_process:
        traits.add(Trait.OWN_PROCESS)
    if torch.cuda.is_available():
        traits.add(Trait.ON_A_GPU)
    if unsplittable(job):
        traits.add(Trait.UNSPLITTABLE)
    return traits


def half_log(job: Job, techniques: tuple[Technique, ...] = (), model: nn.Module | None = None) -> Log:
    """The rehearsal of one step of the same job with half its batch."""
    return rehearse(
        without_validation(job),
        techniques,
        [job.pieces(batch, 2)[0] for batch in islice(planned_batches(job), 1)],
        model,
    )
