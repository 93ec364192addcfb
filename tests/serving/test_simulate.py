"""The simulated queue, where theory knows the answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.serving.batching.policy import Batching
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.simulate import Servers, answer_times, capacity, most_rate, percentile, waits

ALONE = Batching(tokens=1)


def test_mean_wait_of_one_at_a_time_is_that_of_queueing_theory() -> None:
    """M/D/1: the mean time in the system is s + rho s / (2 (1 - rho)) (Pollaczek, Khinchine)."""
    servers, service = Servers(ServiceTime(0.01, 0, 0, 0, True), ALONE), 0.01
    for load in (0.3, 0.6, 0.8):
        found = waits(servers, [1], load / service, 20_000)[2000:].mean()
        assert found == pytest.approx(service + load * service / (2 * (1 - load)), rel=0.05)


def test_replicas_add_up_and_batches_share_what_a_batch_costs() -> None:
    alone = Servers(ServiceTime(0.01, 0, 0.001, 0, True), ALONE)
    assert capacity(Servers(alone.time, ALONE, replicas=2), [5]) == pytest.approx(2 * capacity(alone, [5]), rel=0.01)
    packed = Servers(alone.time, Batching(tokens=100, packed=True))
    assert capacity(packed, [5]) == pytest.approx(20 / (0.01 + 0.1), rel=0.01)


def test_padding_costs_where_lengths_are_mixed() -> None:
    lengths = [10, 20, 40, 80, 160]
    padded = Servers(ServiceTime(0, 0, 1e-3, 0, False), Batching(tokens=320))
    packed = Servers(ServiceTime(0, 0, 1e-3, 0, True), Batching(tokens=320, packed=True))
    assert capacity(padded, lengths) <= capacity(packed, lengths) * 1.001


def test_the_highest_rate_keeps_the_target_and_a_higher_one_breaks_it() -> None:
    servers = Servers(ServiceTime(0.004, 0, 1e-4, 0, True), Batching(tokens=256, packed=True), 2)
    lengths, target = (10, 30, 90), 0.05
    rate = most_rate(servers, lengths, target, 0.99)
    assert percentile(waits(servers, lengths, rate), 0.99) <= target
    assert rate > 0.95 * capacity(servers, lengths) or percentile(waits(servers, lengths, 1.05 * rate), 0.99) > target
    assert most_rate(servers, lengths, 0.001, 0.99) == 0.0, "a request alone takes longer"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60)), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 200),
    st.booleans(),
)
def test_every_request_is_answered_after_it_came_and_took_its_time(
    came: list[tuple[float, int]], replicas: int, tokens: int, packed: bool
) -> None:
    arrivals, lengths = sorted(one for one, _ in came), [length for _, length in came]
    time = ServiceTime(0.01, 0.001, 0.001, 0, packed)
    done = answer_times(Servers(time, Batching(tokens, packed=packed), replicas), arrivals, lengths)
    alone = np.array([time.seconds([length]) for length in lengths])
    assert (done - np.array(arrivals) >= alone - 1e-9).all()
