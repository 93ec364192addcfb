"""The allocator's own count of bytes: a witness that knows nothing of the tracker.

torch's profiler notes every allocation and every free of the CPU allocator, whoever asks for it: an operation, a kernel for itself, Python.
Between operations no kernel runs, so what is alive at the moments that the tracker marks must be what its log says, to the byte.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoestring.measure.timeline import peak, stretches
from shoestring.measure.tracker import Log, Moment, Tracker

MARK = "a moment begins"
# No tracker sees these, as no operation makes them: copies of a random state, and lone numbers (8 bytes) that autograd keeps of `x * 2.0`
STATE, NUMBERS = torch.get_rng_state().nbytes, 512


@dataclass(frozen=True)
class Account:
    """Bytes alive when each moment begins, by the allocator and by the log; and the most that ever were."""

    moments: tuple[tuple[Moment, int, int], ...]
    allocated: int  # the most, with what kernels take for themselves while they run
    tracked: int  # the peak of the log

    @property
    def unseen(self) -> dict[str, int]:
        """Bytes that the log does not have, or has too many, by moment; beside what no operation makes."""
        return {
            f"{number} {' '.join(moment)}": allocated - logged
            for number, (moment, allocated, logged) in enumerate(self.moments)
            if (allocated - logged) % STATE > NUMBERS or not 0 <= allocated - logged < 40 * STATE
        }


def account(work: Callable[[], Log]) -> Account:
    """What both say of the same work, which makes everything that it uses."""
    own = Tracker.mark

    def mark(tracker: Tracker, phase: str, block: str = "") -> None:
        with record_function(MARK):
            pass
        own(tracker, phase, block)

    gc.collect()
    with patch.object(Tracker, "mark", mark), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        log = work()
    assert found.profiler is not None and found.profiler.kineto_results is not None, "it has ended"
    events = found.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    alive, times = [0, *accumulate(size for _, size in changes)], [time for time, _ in changes]
    marks = sorted(one.start_ns() for one in events if one.name() == MARK)
    logged = [stretch.end for stretch in stretches(log)][:-1]
    return Account(
        tuple(
            (moment, alive[bisect_right(times, time)], size)
            for time, size, (_, moment) in zip(marks, logged, log.marks, strict=True)
        ),
        max(alive),
        peak(log).bytes,
    )
