"""Client dropout and stragglers."""

from __future__ import annotations

from math import erf, inf, log, sqrt

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import DeviceGroup, Order
from shoestring.federated.techniques.behaviour.dropout import DropOut
from shoestring.federated.techniques.behaviour.slow import Slow
from tests.federated.techniques.behaviour.small import Small
from tests.federated.techniques.local_training.toy import COST, plain

NAMES = [f"n{number}" for number in range(2000)]


def order(number: int = 0, seed: int = 1) -> Order:
    return Order(seed, number, torch.zeros(1))


def test_as_many_drop_out_as_is_said_and_others_in_every_round() -> None:
    answers = DropOut(0.3).apply(plain()).answers
    first, second = ([answers(order(number), name) for name in NAMES] for number in (0, 1))
    for round in (first, second):
        assert sum(round) / len(NAMES) == pytest.approx(0.7, abs=0.04)
    both = sum(a and b for a, b in zip(first, second, strict=True)) / len(NAMES)
    assert both == pytest.approx(0.49, abs=0.04)


def test_who_drops_out_is_missing_from_the_round_and_the_others_are_combined_as_if_they_alone_were_chosen() -> None:
    run, whole = Small((DropOut(0.5),), chunk=1, per_round=6), Small(chunk=1, per_round=6)
    played, all_of_them = run.round(), whole.round()
    assert played.missing and played.participants
    assert set(played.participants) | set(played.missing) == set(all_of_them.participants)
    answered = set(played.participants)
    alone = Small(chunk=1, per_round=6)
    alone.parts = alone.parts.with_(choose=lambda server, population: [DeviceGroup(tuple(sorted(answered)))])
    assert torch.equal(alone.round().server.weights, played.server.weights)


def test_times_are_log_normal_around_the_median_device_and_the_same_in_every_round() -> None:
    parts = Slow(0.8).apply(plain())
    times = torch.tensor([parts.duration(order(), name) for name in NAMES], dtype=torch.float64)
    assert float(times.median()) == pytest.approx(1.0, abs=0.08)
    assert float(times.log().std()) == pytest.approx(0.8, abs=0.05)
    assert times.tolist() == [parts.duration(order(7), name) for name in NAMES]
    assert all(parts.answers(order(), name) for name in NAMES[:100])


def test_who_takes_longer_than_the_deadline_is_missing() -> None:
    parts = Slow(1.0, deadline=2.0).apply(plain())
    late = [parts.duration(order(), name) > 2.0 for name in NAMES]
    assert [not parts.answers(order(), name) for name in NAMES] == late
    assert sum(late) / len(NAMES) == pytest.approx(0.5 * (1 - erf(log(2.0) / sqrt(2))), abs=0.04)


def test_simulated_rounds_take_as_long_as_their_slowest_device_and_no_longer_than_the_deadline() -> None:
    slow, bounded = Small((Slow(1.0),), per_round=6), Small((Slow(1.0, deadline=1.5),), per_round=6)
    times = {name: slow.parts.duration(order(seed=3), name) for name in slow.round().participants}
    assert Small((Slow(1.0),), per_round=6).round().seconds == max(times.values()) > 1.5
    played = bounded.round()
    assert played.seconds == max(time for time in times.values() if time <= 1.5)
    assert set(played.missing) == {name for name, time in times.items() if time > 1.5}


def test_both_together_lose_whoever_either_loses() -> None:
    out, slow = DropOut(0.3).apply(plain()), Slow(1.0, 2.0).apply(plain())
    both, other_way = Slow(1.0, 2.0).apply(out), DropOut(0.3).apply(slow)
    for name in NAMES[:200]:
        expected = out.answers(order(), name) and slow.answers(order(), name)
        assert both.answers(order(), name) == other_way.answers(order(), name) == expected


def test_nobody_lost_is_the_same_bits() -> None:
    runs = [Small(), Small((DropOut(0.0), Slow(2.0)))]
    for run in runs:
        run.round()
    assert torch.equal(runs[0].server.weights, runs[1].server.weights)
    levels = [one.exactness(COST) for one in (DropOut(0.0), Slow(), DropOut(), Slow(deadline=3.0))]
    assert levels == [Exactness.BITS, Exactness.BITS, Exactness.CHANGED, Exactness.CHANGED]


def test_rates_that_mean_nothing_are_refused() -> None:
    for make in (
        lambda: DropOut(1.0),
        lambda: DropOut(-0.1),
        lambda: DropOut(float("nan")),
        lambda: Slow(-1.0),
        lambda: Slow(inf),
        lambda: Slow(1.0, -0.5),
        lambda: Slow(1.0, float("nan")),
    ):
        with pytest.raises(Mistake, match=r"in (DropOut|Slow)"):
            make()
