"""The anchor: one measured real step; all predicted times and process sizes are relative to it.

It runs in a child process. Times come from clocks at the borders of blocks, in forward and (by gradients that pass
there) in backward.
Memory comes from the kernel's high-water mark, read and reset at every moment of a tracked step: what exceeds the
tensors is the base of the process plus the scratch memory of that moment's kernels.
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
from shoestring.core.errors import Mistake, reason_text
from shoestring.core.job import Job
from shoestring.core.private import tree_leaves
from shoestring.core.running.run import Run
from shoestring.data.lengths import planned_batches
from shoestring.measure.holdings import Holders
from shoestring.measure.load import HELD_UP, Timing, believed_timings, busy_share, effort, enough, timing
from shoestring.measure.process import forget_peak, status, touched_bytes
from shoestring.measure.timeline import stretches, with_filled_workspaces
from shoestring.measure.tracker import Tracker, watch_run
from shoestring.training.catalogue import ALL_BLOCKS_AGAIN, CATALOGUE
from shoestring.training.evidence.held_out import Watching, looked_through, own_validation
from shoestring.training.evidence.rehearse import build_run, planned_data
from shoestring.training.loop import steps
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.validation import SilentObserver, check_goal, run_validation

TIMED = 5  # at most so many steps are timed; their median counts
ENOUGH = 1.5  # seconds of timed steps; if steps are long, two are enough
VARIED = 8  # number of timed steps if batches differ in size
MORE = 4  # time up to so many times as many steps while other processes slow them down,
LONGEST = 8.0  # but for no more seconds than this
ENDLESS = 4.0  # seconds: if a step takes longer, one is enough


class BlockTimer:
    """Seconds of each block, forward and backward; time between blocks is counted for the place after the block."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.now = time.perf_counter()
        self.place = "(start)"

    def lap(self, phase: str, place: str) -> None:
        before, self.now = self.now, time.perf_counter()
        self.spans[phase, self.place].append(self.now - before)
        self.place = place


def with_clock(run: Run, clock: BlockTimer) -> Run:
    """The run with a clock at the borders of its blocks."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        clock.now, clock.place = time.perf_counter(), "(start)"
        hooks = []
        for name, block in run.blocks.items():

            def enter(module: nn.Module, args: Any, name: str = name) -> None:
                before = clock.place
                clock.lap("forward", name)
                # If the previous block's output is an input here, its clock has been read already.
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
    """Call `lap` when the gradient arrives of the first tensor among `values` that needs one."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda gradient: lap())
            return


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, over the timings that other processes did not slow down."""

    times: Mapping[str, float]  # medians by "phase place", and of the whole step as "step"
    spread: float  # mean deviation of steps from the median, relative to it
    busy: float  # fraction of the time that threads waited for a core: above HELD_UP, the machine was never quiet

    @property
    def step(self) -> float:
        return self.times["step"]

    @property
    def by_clock(self) -> float:
        """Wall-clock seconds of such a step here and now, including the time spent waiting for a core."""
        return self.step / max(1 - self.busy, 1e-3)


def step_times(
    run: Run, feeds: Sequence[Sequence[Batch]], count: int, most: int = 0, alone: bool = True
) -> list[StepTimes]:
    """Times of `count` steps with each feed, or of up to `most` while other processes slow them down. Feeds alternate,
    so that a slow moment of the machine hits all of them. `alone`: whether this is our only process; workers of a group
    slow each other down, as they also do in training, so that is no disturbance."""
    clock = BlockTimer()
    watch = with_clock(run, clock)
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
    """Summary of timed steps; `spans`: the parts of each step."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    counted = believed_timings(timings)
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
    """Mean deviation of the times from their median, relative to it.

    >>> spread([1.0, 1.0, 1.3])
    0.1
    """
    middle = median(times)
    return round(sum(abs(one - middle) for one in times) / len(times) / middle, 9) if middle else 0.0


def validate_largest(run: Run, job: Job, watch: SilentObserver | None = None) -> None:
    """Validate on the largest held-out batch, as training would, so that its memory counts. A job's own `validate` runs
    as it is."""
    if job.validate is not None:
        check_goal(job, run_validation(run, job, watch))
    elif job.held_out is not None:
        found = looked_through(job)
        check_goal(job, run_validation(run, job, watch, [(found.largest, True)]))


def overheads(run: Run, batches: Iterable[Batch], job: Job, holders: Holders) -> tuple[dict[str, int], float, int]:
    """Three figures: bytes by "phase place" that the process exceeds its tensors by at that moment's peak; the fraction
    of libraries' workspaces that was written to (only written pages count); and bytes of tensors that the job's own
    validation makes."""
    found: dict[str, int] = {}
    marks: list[int] = []
    written = whole = 0  # bytes of workspaces, written and in total

    class Gauge(Tracker):
        def mark(self, phase: str, block: str = "") -> None:
            marks.append(status("VmHWM"))
            forget_peak()
            super().mark(phase, block)

        def workspace(self, tensor: Tensor) -> None:
            nonlocal written, whole
            written += touched_bytes(tensor)
            whole += tensor.nbytes
            super().workspace(tensor)

    gauge = Gauge()
    watch = watch_run(run, gauge, holders)
    forget_peak()
    with gauge:
        for _ in steps(watch, islice(batches, 1)):
            pass
    validate_largest(run, job, Watching(run, gauge, holders))
    marks.append(status("VmHWM"))
    share = written / whole if whole else 1.0
    for stretch, most in zip(stretches(with_filled_workspaces(gauge.log, share), resident_bytes), marks, strict=True):
        if stretch.moment.phase:
            name = " ".join(stretch.moment)
            found[name] = max(found.get(name, -(1 << 62)), most - stretch.top)
    return found, share, own_validation(gauge.log) if job.validate is not None else 0


def resident_bytes(size: int) -> int:
    """Bytes of the process that a tensor's storage takes: pinned malloc maps large ones in whole pages, with a
    header."""
    return size if size < 65536 else -(-(size + 64 + 16) // 4096) * 4096


def measure_anchor(
    job: Job,
    techniques: tuple[Technique, ...],
    model: nn.Module,
    memory: bool,
    usual: Sequence[Batch] = (),
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """One measured step of the job under these techniques: memory with the largest batch, time with the `usual` batches
    if those are others. `alone`: without what only techniques' figures are made of, and with no more steps while other
    processes slow them down."""
    with planned_data(job) as (batches, held):  # what the data source keeps is in memory in training too
        largest = list(islice(batches, 2))
        return measure_anchor_on(largest, job, techniques, model, memory, usual, Holders(job, held), alone)


def measure_anchor_on(
    largest: list[Batch],
    job: Job,
    techniques: tuple[Technique, ...],
    model: nn.Module,
    memory: bool,
    usual: Sequence[Batch],
    holders: Holders,
    alone: bool,
) -> dict[str, Any]:
    """The same, given the largest batches."""
    feed = list(usual) or largest
    run, one_worker = build_run(job, techniques, model), job.link.world == 1
    times = step_times(run, [feed], 1, alone=one_worker)[0]
    endless = times.step > ENDLESS and times.busy <= HELD_UP
    count = min(max(int(ENOUGH / times.step), 2), TIMED)
    most = 0 if alone else max(count, min(MORE * count, int(LONGEST / times.by_clock)))
    if memory:
        times = times if endless else step_times(run, [feed], count, most, one_worker)[0]
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
    whole = alone or times.by_clock > ENDLESS or any(one.splits_batch for one in techniques)
    smaller = {} if whole else pieces_of(job, feed)
    smaller = {number: part for number, part in smaller.items() if can_run(run, part)}
    if not endless:
        times, *others = step_times(run, [feed, *smaller.values()], count, most, one_worker)
    if usual:  # run the largest batch among the others, because the allocator keeps memory of those too
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
    if not alone:
        result["adding"] = fastest(
            lambda: [p.grad.add_(p.grad) for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
        )
        result["probes"] = run_probes(run)
    if job.validates:  # last, because it frees the gradients
        forget_peak()
        begun = time.perf_counter()
        validate_largest(run, job)
        result["validation_seconds"] = time.perf_counter() - begun if job.validate is not None else 0.0
        result["process"] = max(result["process"], status("VmHWM"))
    return result


def run_probes(run: Run) -> dict[str, float]:
    """Seconds of the probes that techniques ask for; some are impossible with some models."""
    found = {}
    for name, probe in ((name, probe) for kind in CATALOGUE for name, probe in kind.probes(run).items()):
        with suppress(RuntimeError), probe as work:  # a kernel may not exist for some weights, such as complex ones
            found[name] = fastest(work)
    return found


def why_not_again(job: Job, model: nn.Module) -> str:
    """Why blocks of a model can't be recomputed; empty if they can. Runs a step that recomputes every block and
    compares each."""
    try:
        for _ in steps(build_run(job, (ALL_BLOCKS_AGAIN,), model), islice(planned_batches(job), 1)):
            pass
    except Mistake as error:
        return str(error)
    except Exception as error:  # a plain step ran, and one by other techniques may
        return f"a step that computes blocks again fails: {reason_text(error)}"
    return ""


def pieces_of(job: Job, feed: Sequence[Batch]) -> dict[float, list[Batch]]:
    """A half and a smaller part of every batch, by the number of such parts in a batch; empty if a batch can't be
    split."""
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
    """Whether a step can run on such batches; batch norm can't with a single sample."""
    try:
        step_times(run, [feed], 1)
    except Exception:
        return False
    return True


def pace(whole: StepTimes, piece: StepTimes, number: float) -> float:
    """Seconds of the batch in `number` micro-batches, per second of the batch at once. If other processes slowed down
    either timing, micro-batches are not assumed to be faster than the whole: the difference may be theirs.

    >>> def took(step, busy): return StepTimes({"step": step + 1.0, "update (update)": 1.0}, 0.0, busy)
    >>> pace(took(4.0, 0.0), took(1.5, 0.0), 2), pace(took(4.0, 0.5), took(1.5, 0.0), 2), pace(took(4.0, 0.5), took(3.0, 0.0), 2)
    (0.75, 1.0, 1.5)
    """
    found = number * (piece.step - piece.times["update (update)"]) / (whole.step - whole.times["update (update)"])
    return found if max(whole.busy, piece.busy) <= HELD_UP else max(found, 1.0)


def fastest(work: Callable[[], object]) -> float:
    """The shortest time of several tries, in seconds."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
