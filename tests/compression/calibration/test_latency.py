"""Latencies by a clock and a scheduler that are handed in: what others do to a machine is taken off, and told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoestring.compression.calibration.latency import (
    Latency,
    difference_of,
    taking_turns,
    time_interleaved,
    timings_in_turns,
)
from shoestring.measure.load import Effort


class Machine:
    """A clock, and the kernel's counts; `waits`: seconds that the n-th call waits for a core."""

    def __init__(self, waits: Callable[[int], float]) -> None:
        self.now = self.ran = self.waited = 0.0
        self.calls, self.waits = 0, waits
        self.order: list[float] = []

    def call(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            late = self.waits(self.calls)
            self.calls += 1
            self.order.append(seconds)
            self.now += seconds + late
            self.ran += seconds
            self.waited += late

        return work

    def timed(self, *seconds: float) -> list[Latency]:
        return time_interleaved(
            [self.call(one) for one in seconds], 0.02, lambda: self.now, lambda: Effort(self.ran, self.waited)
        )


def test_on_a_quiet_machine_every_call_counts() -> None:
    (found,) = Machine(lambda call: 0.0).timed(0.001)
    assert (found.p50, found.p99, found.busy) == pytest.approx((0.001, 0.001, 0.0)) and not found.warning


def test_calls_that_waited_for_a_core_are_not_counted() -> None:
    """An answer of 0.12 ms on a machine where most calls wait 4 ms is one of 0.12 ms, by the median and by 99 of 100."""
    (found,) = Machine(lambda call: 0.004 if call % 4 else 0.0).timed(0.00012)
    assert (found.p50, found.p99) == pytest.approx((0.00012, 0.00012)) and found.busy > 0.5
    assert "busy" in found.warning and not found.is_estimate


def test_where_every_call_waits_the_waiting_is_taken_off_and_told() -> None:
    (found,) = Machine(lambda call: 0.15).timed(0.05)
    assert (found.p50, found.p99, found.busy) == pytest.approx((0.05, 0.05, 1.0))
    assert found.is_estimate and "estimates" in found.warning


def test_models_that_are_compared_take_turns() -> None:
    machine = Machine(lambda call: 0.0)
    small, plain = machine.timed(0.001, 0.002)
    assert machine.order[6:10] == [0.001, 0.002, 0.001, 0.002] and small.p50 / plain.p50 == pytest.approx(0.5)


@pytest.mark.parametrize(("packed", "extra"), [(0.003, 0.002), (0.001, 0.0), (0.0002, -0.0008)])
def test_what_a_packed_weight_adds_is_a_difference_of_calls_in_turns(packed: float, extra: float) -> None:
    """Every other pair waits for a core: 150 ms, which would be a hundred times the difference."""
    machine = Machine(lambda call: 0.15 if call % 4 == 0 else 0.0)
    calls = [machine.call(one) for one in (packed, 0.001)]
    pairs = timings_in_turns(calls, 0.02, 5, lambda: machine.now, lambda: Effort(machine.ran, machine.waited))
    assert difference_of(*pairs) == pytest.approx(extra, abs=1e-9)


def test_a_difference_below_the_noise_is_none() -> None:
    machine = Machine(lambda call: 0.0)
    both = [taking_turns([machine.call(one) for one in some]) for some in ((0.001, 0.0011), (0.00101, 0.00108))]
    pairs = timings_in_turns(both, 0.02, 5, lambda: machine.now, lambda: Effort(machine.ran, machine.waited))
    assert difference_of(*pairs) == 0
