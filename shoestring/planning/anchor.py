"""The anchor: one real step, measured, to which all predicted times and process sizes are relative.

Run in a child process. Times come from clocks at the borders of the blocks, forward and (by the gradients that pass there)
backward. Memory comes from the kernel's own high-water mark, read and reset at every moment of a tracked step: what it
exceeds the tensors by is the base of the process plus the scratch memory of that moment's kernels.
"""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from torch import Tensor, nn

from shoestring.core.batch import Batch, split
from shoestring.core.job import Job
from shoestring.core.private import tree_leaves
from shoestring.core.run import Run
from shoestring.core.technique import Technique
from shoestring.loop import steps
from shoestring.measure.process import forget_peak, status
from shoestring.measure.timeline import stretches
from shoestring.measure.tracker import Tracker, watched
from shoestring.memory.fused import HAS_KERNEL, Fused
from shoestring.planning.rehearse import prepared

TIMED = 3        # steps whose median counts
LONG = 0.7       # seconds: of steps longer than this, two are enough
ENDLESS = 4.0    # seconds: of steps longer than this, the first one is enough


class Clock:
    """Seconds that each block takes forward and backward; what lies between blocks goes to the place after the block."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.now = time.perf_counter()
        self.place = "(start)"

    def lap(self, phase: str, place: str) -> None:
        before, self.now = self.now, time.perf_counter()
        self.spans[phase, self.place].append(self.now - before)
        self.place = place


def timed(run: Run, clock: Clock) -> Run:
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


def step_times(run: Run, batches: Iterable[Batch], count: int) -> dict[str, float]:
    """Median seconds by "phase place", and of the whole step as "step"."""
    clock = Clock()
    whole = []
    feed = iter(batches)
    watch = timed(run, clock)
    for _ in range(count):
        batch = next(feed)
        start = time.perf_counter()
        for _ in steps(watch, [batch]):
            pass
        whole.append(time.perf_counter() - start)
    per = {f"{phase} {place}": median(spans) for (phase, place), spans in clock.spans.items()}
    return per | {"step": median(whole)}


def overheads(run: Run, batches: Iterable[Batch]) -> dict[str, int]:
    """By "phase place": bytes that the process has above its tensors at the highest point of that moment."""
    found: dict[str, int] = {}
    marks: list[int] = []

    class Gauge(Tracker):
        def mark(self, phase: str, block: str = "") -> None:
            marks.append(status("VmHWM"))
            forget_peak()
            super().mark(phase, block)

    gauge = Gauge()
    watch = watched(run, gauge)
    forget_peak()
    with gauge:
        for _ in steps(watch, islice(batches, 1)):
            pass
    marks.append(status("VmHWM"))
    for stretch, most in zip(stretches(gauge.log, paged), marks, strict=True):
        if stretch.moment.phase:
            name = " ".join(stretch.moment)
            found[name] = max(found.get(name, -(1 << 62)), most - stretch.top)
    return found


def paged(size: int) -> int:
    """Bytes that a tensor's storage takes of the process: pinned malloc maps large ones by whole pages, with a header."""
    return size if size < 65536 else -(-(size + 64 + 16) // 4096) * 4096


def anchored(job: Job, techniques: tuple[Technique, ...], model: nn.Module, memory: bool) -> dict[str, Any]:
    """One step of the job under these techniques, measured."""
    batches = list(islice(job.batches(), 2))
    feed = [batches[k % len(batches)] for k in range(TIMED + 2)]
    run = prepared(job, techniques, model)
    times = step_times(run, feed[:1], 1)
    endless = times["step"] > ENDLESS
    if not endless:
        times = step_times(run, feed, TIMED if times["step"] < LONG else 2)
    if memory:
        return {"times": times, "overheads": overheads(run, feed)}
    result: dict[str, Any] = {"times": times, "process": status("VmHWM")}
    if not endless:
        with suppress(ValueError):   # a batch of one sample, or one that can't be split: all time counts as shrinking with it
            result["half"] = step_times(run, [split(batch, 2)[0] for batch in feed], TIMED if times["step"] < LONG else 2)
    if isinstance(run.optimizer, HAS_KERNEL) and not any(isinstance(technique, Fused) for technique in techniques):
        result["fused"] = update_time(Fused().apply(run))
    return result


def update_time(run: Run) -> float:
    """Seconds of the update alone, with the gradients that are there."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        run.update(run)
        times.append(time.perf_counter() - start)
    return min(times)
