"""FedBuff against a naive event simulation, and against the paper's formula."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import exp, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.playing.play import play
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import Objective, Order, Round, ServerState
from shoestring.federated.techniques.combine.arrivals import BufferRules, DeviceAtWork, draw_idle_device, fill_buffer
from shoestring.federated.techniques.combine.by_coordinate import CoordinateMedian
from shoestring.federated.techniques.combine.fed_buff import FedBuff
from tests.federated.techniques.combine.toy import (
    COST,
    SIZE,
    ToyDevices,
    device,
    in_chunks,
    new_server,
    population,
    random_rows,
    round_with,
    same_state,
    saved_and_restored,
    updates_of,
    work,
)

PEOPLE = population(count=30, per_round=8)
After = tuple[torch.Tensor, float, list[tuple[int, int]]]  # a round: weights, clock, [(device, age)]


def seconds(seed: int, name: str, spread: float = 1.0) -> float:
    return exp(spread * float(torch.randn((), dtype=torch.float64, generator=generator_of(seed, "speed", name))))


def reference(seed: int, rounds: int, slots: int, buffer: int, start: torch.Tensor) -> list[After]:
    """Nguyen et al. 2022, algorithm 1, one event after the other."""
    weights, clock, at_work, found = [start], 0.0, [], []
    for now in range(rounds):
        generator, buffered, total, samples = generator_of(seed, "FedBuff", now), [], torch.zeros(SIZE), 0.0
        while len(buffered) < buffer:
            while len(at_work) < slots:
                busy = {number for _, number, _ in at_work} | {number for number, _ in buffered}
                number = draw_idle_device(PEOPLE.count, busy, generator)
                at_work.append((clock + seconds(seed, str(number)), number, now))
            clock, number, begun = min(at_work)
            at_work.remove((clock, number, begun))
            buffered.append((number, now - begun))
        for number, age in buffered:
            updates = work(Order(seed, 0, weights[now - age]), [device(number)], Objective(round_with().local))
            total += float(updates.counts[0]) / sqrt(1 + age) * updates.rows[0]
            samples += float(updates.counts[0])
        weights.append(weights[-1] + total / samples)
        found.append((weights[-1], clock, sorted(buffered)))
    return found


def ages_of(server: ServerState) -> list[tuple[int, int]]:
    """(device, age) of those that arrived in the last round."""
    return sorted((number, server.round - 1 - version) for number, version in server.state["FedBuff.arrived"].tolist())


def rounds_of(parts: Round, count: int, restart: bool = False, chunk: int = 3) -> list[ServerState]:
    found = [new_server(parts)]
    for _ in range(count):
        begun = saved_and_restored(found[-1]) if restart else found[-1]
        found.append(play(parts, begun, ToyDevices(parts, chunk), PEOPLE).server)
    return found


def test_weights_time_and_who_takes_part_are_those_of_the_paper_s_algorithm() -> None:
    servers = rounds_of(round_with(FedBuff(buffer=3)), 12)
    expected = reference(3, 12, slots=8, buffer=3, start=servers[0].weights)
    for server, (weights, clock, taking_part) in zip(servers[1:], expected, strict=True):
        assert ages_of(server) == taking_part
        assert float(server.state["FedBuff.clock"]) == clock
        assert torch.allclose(server.weights, weights, atol=1e-5)
    assert max(age for server in servers[1:] for _, age in ages_of(server)) >= 3


def test_a_run_that_is_killed_after_every_round_goes_on_with_the_same_bits() -> None:
    parts = round_with(FedBuff(buffer=3, oldest=4))
    assert all(
        same_state(one, other)
        for one, other in zip(rounds_of(parts, 8), rounds_of(parts, 8, restart=True), strict=True)
    )


def test_chunks_do_not_matter_beyond_rounding() -> None:
    parts = round_with(FedBuff(buffer=5))
    assert torch.allclose(rounds_of(parts, 6, chunk=1)[-1].weights, rounds_of(parts, 6, chunk=5)[-1].weights, atol=1e-5)


@pytest.mark.parametrize(("staleness", "share"), [("sqrt", 0.5), ("none", 1.0)])
def test_an_older_update_weighs_less(staleness: str, share: float) -> None:
    parts = round_with(FedBuff(buffer=2, staleness=staleness, oldest=5))
    server = replace(new_server(parts), round=9)
    fresh, stale = in_chunks(updates_of(random_rows(3), [1.0, 5.0, 2.0]), 2, 1)
    update = parts.combine(server, [fresh, replace(stale, age=3)]).update
    rows = torch.cat([fresh.rows, share * stale.rows])
    assert torch.allclose(update, torch.tensor([1.0, 5.0, 2.0]) @ rows / 8.0, atol=1e-5)


def test_a_device_is_given_the_weights_that_were_the_newest_when_it_began() -> None:
    parts, servers = round_with(FedBuff(buffer=2, oldest=6)), []
    server = new_server(parts)
    for _ in range(15):
        begun = parts.begin(server, PEOPLE)
        servers.append(begun)
        for group in parts.choose(begun, PEOPLE):
            order = parts.order(begun, group)
            assert (
                torch.equal(order.weights, servers[-1 - group.age].weights) and order.round == begun.round - group.age
            )
            assert not order.extras
        server = play(parts, server, ToyDevices(parts), PEOPLE).server


def test_devices_that_would_be_too_old_are_given_up_and_counted() -> None:
    patient, strict = (
        rounds_of(round_with(FedBuff(buffer=2, oldest=20)), 20),
        rounds_of(round_with(FedBuff(buffer=2, oldest=2)), 20),
    )
    assert (
        max(age for server in strict[1:] for _, age in ages_of(server))
        == 2
        < max(age for one in patient[1:] for _, age in ages_of(one))
    )
    assert int(strict[-1].state["FedBuff.dropped"]) > 0 == int(patient[-1].state["FedBuff.dropped"])
    assert strict[-1].state["FedBuff.versions"].shape == (3, 10)
    given_up = [int(server.state["FedBuff.dropped"]) for server in strict]
    assert given_up == sorted(given_up) and len(set(given_up)) > 2


def test_with_everybody_at_work_and_a_buffer_of_all_it_is_the_plain_round_of_all() -> None:
    plain, parts = round_with(), round_with(FedBuff(buffer=6))
    few = population(count=6, per_round=6)
    one, other = new_server(plain), new_server(parts)
    for _ in range(3):
        one = play(plain, one, ToyDevices(plain), few).server
        other = play(parts, other, ToyDevices(parts), few).server
        assert torch.equal(one.weights, other.weights)


def test_one_device_at_a_time_works() -> None:
    parts, alone = round_with(FedBuff(buffer=1)), population(count=1, per_round=1)
    server = new_server(parts)
    for _ in range(3):
        played = play(parts, server, ToyDevices(parts), alone)
        assert played.participants == ("0",)
        server = played.server
    assert float(server.state["FedBuff.clock"]) == pytest.approx(3 * seconds(3, "0"))


def test_other_rules_are_given_the_faded_updates() -> None:
    parts = round_with(FedBuff(buffer=3), CoordinateMedian())
    server = replace(new_server(parts), round=4)
    rows = random_rows(3)
    update = parts.combine(server, [replace(updates_of(rows), age=3)]).update
    assert torch.allclose(update, 0.5 * rows.median(0).values)


def test_bytes_are_those_of_the_buffer_s_devices() -> None:
    technique = FedBuff(buffer=3)
    parts = round_with(technique)
    server, cost = new_server(parts), technique.cost(COST)
    for _ in range(5):
        played = play(parts, server, ToyDevices(parts), PEOPLE)
        assert (played.up, played.down) == (
            cost.per_round * cost.up,
            cost.per_round * cost.down,
        ) and cost.per_round == 3
        server = played.server


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    slots=st.integers(1, 12),
    buffer=st.integers(1, 12),
    oldest=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_nobody_works_twice_at_once_and_time_never_goes_back(
    count: int, slots: int, buffer: int, oldest: int, seed: int
) -> None:
    slots = min(slots, count)
    buffer = min(buffer, slots)
    flying: tuple[DeviceAtWork, ...] = ()
    clock = 0.0
    for version in range(8):
        generator = generator_of(seed, version)

        def draw(busy: Collection[int], generator: torch.Generator = generator) -> int | None:
            return draw_idle_device(count, busy, generator)

        before, (arrived, flying, after, dropped) = (
            flying,
            fill_buffer(
                flying, clock, version, BufferRules(slots, buffer, oldest), draw, lambda number: 1.0 + number % 3
            ),
        )
        assert len(arrived) == buffer and len({one.number for one in (*arrived, *flying)}) == len(arrived) + len(flying)
        times = [one.done for one in arrived]
        assert times == sorted(times) and clock <= times[0] and times[-1] == after
        assert all(one.done >= after for one in flying) and len(flying) <= slots
        assert all(0 <= version - one.version <= oldest for one in arrived)
        assert dropped == sum(version - one.version > oldest for one in before)
        clock = after


def test_free_devices_are_drawn_alike() -> None:
    generator, found = generator_of("draws"), [0] * 6
    for _ in range(3000):
        found[draw_idle_device(6, {1, 4}, generator) or 0] += 1
    assert found[1] == found[4] == 0 and all(650 < found[number] < 850 for number in (0, 2, 3, 5))
    assert draw_idle_device(2, {0, 1}, generator) is None


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (FedBuff(buffer=13), "buffer=12"),
        (FedBuff(concurrency=101), "there are 100"),
        (FedBuff(buffer=5, concurrency=4), "concurrency=5"),
    ],
)
def test_what_can_not_work_is_refused_before_and_when_a_round_begins(technique: FedBuff, words: str) -> None:
    assert words in technique.refusal(COST)
    parts = round_with(technique)
    with pytest.raises(Mistake, match=words):
        parts.begin(new_server(parts), population(count=100, per_round=12))


def test_wrong_knobs_and_an_epsilon_are_told() -> None:
    for knobs in ({"buffer": 0}, {"concurrency": -1}, {"oldest": -1}, {"staleness": "cubic"}, {"spread": float("nan")}):
        with pytest.raises(Mistake, match=str(next(iter(knobs)))):
            FedBuff(**knobs)  # type: ignore[arg-type]
    assert "epsilon" in FedBuff().refusal(replace(COST, delta=1e-6)) and not FedBuff().refusal(COST)
    assert FedBuff().exactness(COST) is Exactness.CHANGED and FedBuff.choices(COST) == ()
