"""The anchor: one real step, measured, to which all predicted times and process sizes are relative.

Run in a child process. Times come from clocks at the borders of the blocks, forward and (by the gradients that pass there)
backward. Memory comes from the kernel's own high-water mark, read and reset at every moment of a tracked step: what it
exceeds the tensors by is the base of the process plus the scratch memory of that moment's kernels.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import median
from typing import Any

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.private import tree_leaves
from shoestring.core.run import Run
from shoestring.data.lengths import planned_batches
from shoestring.measure.holdings import Holders
from shoestring.measure.load import HELD_UP, Timing, believed, busy_share, effort, enough, timing
from shoestring.measure.process import forget_peak, status, touched
from shoestring.measure.timeline import filled, stretches
from shoestring.measure.tracker import Tracker, watched
from shoestring.training.catalogue import ALL_BLOCKS_AGAIN, CATALOGUE
from shoestring.training.evidence.held_out import Watching, looked_through, own_validation
from shoestring.training.evidence.rehearse import planned_data, prepared
from shoestring.training.loop import steps
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.validation import SilentObserver, check_goal, validated

TIMED = 5  # steps whose median counts, at most
ENOUGH = 1.5  # seconds of such steps; of long ones, two are enough
VARIED = 8  # steps with batches as they come, where they are of several sizes
MORE = 4  # times as many steps, while other processes hold them up,
LONGEST = 8.0  # seconds of them
ENDLESS = 4.0  # seconds: of steps longer than this, the first one is enough


class BlockTimer:
    """Seconds that each block takes forward and backward; what lies between blocks goes to the place after the block."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.now = time.perf_counter()
        self.place = "(start)"

    def lap(self, phase: str, place: str) -> None:
        before, self.now = self.now, time.perf_counter()
        self.spans[phase, self.place].append(self.now - before)
        self.place = place


def timed(run: Run, clock: BlockTimer) -> Run:
    """The run with a clock at the borders of its blocks."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        clock.now, clock.place = time.perf_counter(), "(start)"
        hooks = []
        for name, block in run.blocks.items():

            def enter(module: nn.Module, args: Any, name: str = name) -> None:
                before = clock.place
                clock.lap("forward", name)
                # The block before may have its output here too, and then its clock has rung already.
                on_gradient(args, lambda: clock.lap("backward", before) if clock.place == name else None)

            def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                clock.lap("forward", f"(after {name})")
                on_gradient(output, lambda: clock.lap("backward", name))

            hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        try:
            return run.forward(model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    def loss(output: Any, batch: Batch) -> Tensor:
        value = run.loss(output, batch)
        clock.lap("forward", clock.place)
        return value

    def gradients(now: Run, batch: Batch) -> Tensor:
        value = run.gradients(now, batch)
        clock.lap("backward", "(update)")
        return value

    def update(now: Run) -> None:
        run.update(now)
        clock.lap("update", "(start)")

    return replace(run, forward=forward, loss=loss, gradients=gradients, update=update)


def on_gradient(values: Any, lap: Callable[[], None]) -> None:
    """Call `lap` when the gradient of the first tensor among values that has one arrives."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda gradient: lap())
            return


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, of the timings that were not held up by other processes."""

    times: Mapping[str, float]  # median by "phase place", and of the whole step as "step"
    spread: float  # how far steps are from that, in the mean, as a share of it
    busy: float  # share of the time that threads had no core: above HELD_UP, the machine was never quiet

    @property
    def step(self) -> float:
        return self.times["step"]

    @property
    def by_clock(self) -> float:
        """Seconds that such a step takes here and now, with the time in the queue."""
        return self.step / max(1 - self.busy, 1e-3)


def step_times(
    run: Run, feeds: Sequence[Sequence[Batch]], count: int, most: int = 0, alone: bool = True
) -> list[StepTimes]:
    """Times of `count` steps with each feed, or up to `most` while other processes hold them up. Feeds take turns, so that a slow moment
    of the machine meets all of them. `alone`: nobody of ours works beside this process; of a group, workers hold up each other when they
    train too, and that is no disturbance."""
    clock = BlockTimer()
    watch = timed(run, clock)
    timings: list[list[Timing]] = [[] for _ in feeds]
    spans: list[list[dict[tuple[str, str], list[float]]]] = [[] for _ in feeds]
    number = 0
    while number < count or not enough(timings, count, most):
        for feed, times, parts in zip(feeds, timings, spans, strict=True):
            clock.spans, before, start = defaultdict(list), effort(), time.perf_counter()
            for _ in steps(watch, [feed[number % len(feed)]]):
                pass
            seconds = time.perf_counter() - start
            times.append(timing(seconds, before, effort()) if alone else Timing(seconds, seconds))
            parts.append(clock.spans)
        number += 1
    return [typical(times, parts) for times, parts in zip(timings, spans, strict=True)]


def typical(timings: Sequence[Timing], spans: Sequence[Mapping[tuple[str, str], Sequence[float]]]) -> StepTimes:
    """What timed steps say together; `spans`: the parts of each."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    counted = believed(timings)
    for number in counted:
        for place, times in spans[number].items():
            found[place] += [one * (1 - timings[number].held_up) for one in times]
    whole = [timings[number].alone for number in counted]
    return StepTimes(
        {f"{phase} {place}": median(times) for (phase, place), times in found.items()} | {"step": median(whole)},
        spread(whole),
        busy_share(timings),
    )


def spread(times: Sequence[float]) -> float:
    """How far these are from their median, in the mean, as a share of it.

    >>> spread([1.0, 1.0, 1.3])
    0.1
    """
    middle = median(times)
    return round(sum(abs(one - middle) for one in times) / len(times) / middle, 9) if middle else 0.0


def validate_largest(run: Run, job: Job, watch: SilentObserver | None = None) -> None:
    """Validate as training would, on the largest held-out batch: what the process needs for that counts. The job's own does as it likes."""
    if job.validate is not None:
        check_goal(job, validated(run, job, watch))
    elif job.held_out is not None:
        found = looked_through(job)
        check_goal(job, validated(run, job, watch, [(found.largest, True)]))


def overheads(run: Run, batches: Iterable[Batch], job: Job, holders: Holders) -> tuple[dict[str, int], float, int]:
    """By "phase place": bytes that the process has above its tensors at the highest point of that moment; the share of libraries'
    workspaces that was written to, which is all of them that counts; and bytes of tensors that the job's own validation makes."""
    found: dict[str, int] = {}
    marks: list[int] = []
    written = whole = 0  # bytes of workspaces

    class Gauge(Tracker):
        def mark(self, phase: str, block: str = "") -> None:
            marks.append(status("VmHWM"))
            forget_peak()
            super().mark(phase, block)

        def workspace(self, tensor: Tensor) -> None:
            nonlocal written, whole
            written += touched(tensor)
            whole += tensor.nbytes
            super().workspace(tensor)

    gauge = Gauge()
    watch = watched(run, gauge, holders)
    forget_peak()
    with gauge:
        for _ in steps(watch, islice(batches, 1)):
            pass
    validate_largest(run, job, Watching(run, gauge, holders))
    marks.append(status("VmHWM"))
    share = written / whole if whole else 1.0
    for stretch, most in zip(stretches(filled(gauge.log, share), paged), marks, strict=True):
        if stretch.moment.phase:
            name = " ".join(stretch.moment)
            found[name] = max(found.get(name, -(1 << 62)), most - stretch.top)
    return found, share, own_validation(gauge.log) if job.validate is not None else 0


def paged(size: int) -> int:
    """Bytes that a tensor's storage takes of the process: pinned malloc maps large ones by whole pages, with a header."""
    return size if size < 65536 else -(-(size + 64 + 16) // 4096) * 4096


def anchored(
    job: Job, techniques: tuple[Technique, ...], model: nn.Module, memory: bool, usual: Sequence[Batch] = ()
) -> dict[str, Any]:
    """One step of the job under these techniques, measured: its memory with the largest batch, its time with `usual` ones, if those are
    others."""
    with planned_data(job) as (batches, held):  # what the data keep is there in training too
        return anchored_on(list(islice(batches, 2)), job, techniques, model, memory, usual, Holders(job, held))


def anchored_on(
    largest: list[Batch],
    job: Job,
    techniques: tuple[Technique, ...],
    model: nn.Module,
    memory: bool,
    usual: Sequence[Batch],
    holders: Holders,
) -> dict[str, Any]:
    """The same with these batches as the largest."""
    feed = list(usual) or largest
    run, alone = prepared(job, techniques, model), job.link.world == 1
    times = step_times(run, [feed], 1, alone=alone)[0]
    endless = times.step > ENDLESS and times.busy <= HELD_UP
    count = min(max(int(ENOUGH / times.step), 2), TIMED)
    most = max(count, min(MORE * count, int(LONGEST / times.by_clock)))
    if memory:
        times = times if endless else step_times(run, [feed], count, most, alone)[0]
        if usual:
            step_times(run, [largest], 1)
        above, share, own = overheads(run, largest, job, holders)
        return {
            "times": times.times,
            "spread": times.spread,
            "busy": times.busy,
            "overheads": above,
            "filled": share,
            "validation_bytes": own,
        }
    smaller = {} if times.by_clock > ENDLESS or any(one.splits_batch for one in techniques) else pieces_of(job, feed)
    smaller = {number: part for number, part in smaller.items() if can_run(run, part)}
    if not endless:
        times, *others = step_times(run, [feed, *smaller.values()], count, most, alone)
    if usual:  # the largest among others: what the allocator keeps back of those is there too
        for _ in steps(run, chain(islice(planned_batches(replace(job, largest=None)), VARIED), largest)):
            pass
    result: dict[str, Any] = {
        "times": times.times,
        "spread": times.spread,
        "busy": times.busy,
        "process": status("VmHWM"),
        "reserved": status("VmPeak") - status("VmHWM"),
    }
    result["paces"] = (
        [(number, pace(times, other, number)) for number, other in zip(smaller, others, strict=True)] if smaller else []
    )
    result["adding"] = fastest(
        lambda: [p.grad.add_(p.grad) for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    )
    result["probes"] = probed(run)
    if job.validates:  # at the end: it takes the gradients away
        forget_peak()
        begun = time.perf_counter()
        validate_largest(run, job)
        result["validation_seconds"] = time.perf_counter() - begun if job.validate is not None else 0.0
        result["process"] = max(result["process"], status("VmHWM"))
    return result


def probed(run: Run) -> dict[str, float]:
    """Seconds of what techniques want to know of a plain run; some of it can't be done with every model."""
    found = {}
    for name, probe in ((name, probe) for kind in CATALOGUE for name, probe in kind.probes(run).items()):
        with suppress(RuntimeError), probe as work:  # kernels are not for all weights: of complex ones there are none
            found[name] = fastest(work)
    return found


def why_not_again(job: Job, model: nn.Module) -> str:
    """Why blocks of a model can't be computed again; empty if they can: a step in which all of them are compares every one."""
    try:
        for _ in steps(prepared(job, (ALL_BLOCKS_AGAIN,), model), islice(planned_batches(job), 1)):
            pass
    except Mistake as error:
        return str(error)
    return ""


def pieces_of(job: Job, feed: Sequence[Batch]) -> dict[float, list[Batch]]:
    """A half and a small part of every batch, by how many of them make the whole; none where a batch can't be split."""
    try:
        count = job.count(feed[0])
        return {
            count / job.count(job.pieces(feed[0], parts)[0]): [job.pieces(batch, parts)[0] for batch in feed]
            for parts in (2, 8)
            if parts <= count
        }
    except Mistake:
        return {}


def can_run(run: Run, feed: Sequence[Batch]) -> bool:
    """Whether a step can be done with such batches; batch norm can't with a lone sample."""
    try:
        step_times(run, [feed], 1)
    except Exception:
        return False
    return True


def pace(whole: StepTimes, piece: StepTimes, number: float) -> float:
    """Seconds that the batch takes in so many pieces, per second that it takes at once. If other processes held up either, pieces
    are not taken to be faster than the whole: the difference may be theirs.

    >>> def took(step, busy): return StepTimes({"step": step + 1.0, "update (update)": 1.0}, 0.0, busy)
    >>> pace(took(4.0, 0.0), took(1.5, 0.0), 2), pace(took(4.0, 0.5), took(1.5, 0.0), 2), pace(took(4.0, 0.5), took(3.0, 0.0), 2)
    (0.75, 1.0, 1.5)
    """
    found = number * (piece.step - piece.times["update (update)"]) / (whole.step - whole.times["update (update)"])
    return found if max(whole.busy, piece.busy) <= HELD_UP else max(found, 1.0)


def fastest(work: Callable[[], object]) -> float:
    """Least seconds of a few tries."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
