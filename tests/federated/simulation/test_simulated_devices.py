"""Simulated devices: the result is the same with any number of processes, even if some of them die."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.budget import Budget
from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.federated.planning.prepare import Prepared, parts_of
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.room import plan_federation
from shoestring.federated.round import (
    Combined,
    DeviceGroup,
    DeviceView,
    Objective,
    Order,
    Population,
    Round,
    ServerState,
    Tensors,
    Updates,
)
from shoestring.federated.simulation.cohort import MethodChoice
from shoestring.federated.simulation.shared_buffer import SharedBuffer
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.combine.by_coordinate import CoordinateMedian
from shoestring.federated.techniques.combine.fed_buff import FedBuff
from shoestring.federated.techniques.local_training.ditto import Ditto
from shoestring.federated.techniques.local_training.fedper import FedPer
from shoestring.federated.techniques.local_training.scaffold import Scaffold
from shoestring.federated.techniques.send.top_k import TopK
from tests.federated.toys import CLASSES, WIDTH, records, toy, toy_job

CHUNKED = MethodChoice("sequential", 2, "two at once")


def rounds_of(given: Prepared, techniques: Sequence[FederatedTechnique] = (), count: int = 2) -> list[RoundResult]:
    parts = parts_of(given, techniques)
    server, devices, found = given.server(parts), given.devices(parts), []
    try:
        for _ in range(count):
            found.append(play(parts, server, devices, given.population))
            server = found[-1].server
    finally:
        devices.close()
    return found


def weights(given: Prepared, techniques: Sequence[FederatedTechnique] = ()) -> Tensor:
    return rounds_of(given, techniques)[-1].server.weights


@pytest.mark.parametrize("techniques", [(), (Scaffold(),)], ids=["plain", "with state on devices"])
def test_any_number_of_processes_gives_the_same_bits(techniques: tuple[FederatedTechnique, ...]) -> None:
    alone = weights(toy(how=CHUNKED), techniques)
    for processes in (2, 3):
        assert torch.equal(weights(toy(how=CHUNKED, processes=processes), techniques), alone)


@dataclass(frozen=True)
class TwoGroups(FederatedTechnique):
    """Gives its orders to two groups of devices, one after the other."""

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, subject: Round) -> Round:
        def choose(server: ServerState, population: Population) -> list[DeviceGroup]:
            (group,) = subject.choose(server, population)
            return [DeviceGroup(group.names[:4]), DeviceGroup(group.names[4:])]

        return subject.with_(choose=choose)


@dataclass(frozen=True)
class NotesLast(FederatedTechnique):
    """Keeps the last update of a round, and adds it to the next one."""

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, subject: Round) -> Round:
        def note(state: Tensors, updates: Updates, population: Population) -> Tensors:
            return {**state, "last": updates.rows[-1]}

        def advance(server: ServerState, combined: Combined) -> ServerState:
            return subject.advance(replace(server, weights=server.weights + 0.1 * before(server)), combined)

        def begin(server: ServerState, population: Population) -> ServerState:
            return replace(server, state={**server.state, "before": before(server, "last")})

        def before(server: ServerState, name: str = "before") -> Tensor:
            return server.state.get(name, torch.zeros_like(server.weights))

        return subject.with_(note=note, advance=advance, begin=begin)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    "techniques",
    [(TwoGroups(),), (TwoGroups(), CoordinateMedian()), (FedBuff(buffer=8),), (NotesLast(),)],
    ids=["statistics", "rows", "stale", "noted"],
)
def test_what_outlives_an_order_does_not_lie_in_memory_that_processes_use_again(
    techniques: tuple[FederatedTechnique, ...],
) -> None:
    job = toy_job(model=with_batch_norm, local=Local(batch=0, lr=0.1, epochs=2))
    alone, several = (
        rounds_of(toy(job, how=CHUNKED, per_round=8, processes=processes), techniques, 4)[-1].server.row
        for processes in (1, 3)
    )
    assert torch.equal(alone, several)


def test_a_process_that_is_killed_is_replaced_and_nothing_changes() -> None:
    given = toy(how=CHUNKED, processes=2)
    parts = given.plain
    server, devices = given.server(parts), given.devices(parts)
    assert devices.pool is not None
    try:
        first = play(parts, server, devices, given.population)
        os.kill(devices.pool.processes[0].process.pid, signal.SIGKILL)
        second = play(parts, first.server, devices, given.population)
    finally:
        devices.close()
    assert torch.equal(second.server.weights, weights(toy(how=CHUNKED)))


def test_an_empty_client_is_named_and_the_round_goes_on() -> None:
    job = toy_job(clients=lambda: {"full": records(1), "empty": [], "other": records(2)})
    played = rounds_of(toy(job, per_round=3), count=1)[0]
    assert set(played.participants) == {"full", "other"}
    assert [(one.name, "has no records" in one.why) for one in played.rejected] == [("empty", True)]


def test_a_client_that_fails_while_it_works_is_named_and_the_others_work_on() -> None:
    odd = [(torch.zeros(2), torch.tensor(0))] * 4  # inputs of another width
    job = toy_job(clients=lambda: {"a": records(1), "odd": odd, "b": records(2), "c": records(3)})
    for processes in (1, 2):
        played = rounds_of(toy(job, how=CHUNKED, per_round=4, processes=processes), count=1)[0]
        assert set(played.participants) == {"a", "b", "c"} and [one.name for one in played.rejected] == ["odd"]
        assert "RuntimeError" in played.rejected[0].why


def test_an_update_that_is_not_a_number_is_rejected_by_name() -> None:
    bad = [(torch.full((6,), float("inf")), torch.tensor(0))] * 4
    job = toy_job(clients=lambda: {"a": records(1), "bad": bad})
    played = rounds_of(toy(job, per_round=2), count=1)[0]
    assert played.participants == ("a",) and played.rejected[0].name == "bad" and "not finite" in played.rejected[0].why
    assert bool(played.server.weights.isfinite().all())


def test_a_failure_of_everybody_is_a_mistake_that_says_what_failed() -> None:
    def broken(model: object, batch: object) -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(
        Mistake, match=r"all 2 devices of round 1 failed: 2 x RuntimeError in test_simulated_devices.py line \d+$"
    ):
        rounds_of(toy(toy_job(forward=broken, clients=lambda: {"a": records(1), "b": records(2)}), per_round=2))


def test_devices_of_like_size_work_together_and_everybody_once() -> None:
    devices = toy(how=CHUNKED).devices(toy().plain)
    names = [f"d{number}" for number in range(12)]
    chunks = devices.chunks(names)
    assert sorted(name for chunk in chunks for name in chunk) == sorted(names)
    sizes = [devices.count(name) for chunk in chunks for name in chunk]
    assert sizes == sorted(sizes)


def test_what_does_not_fit_into_shared_memory_goes_through_the_pipe() -> None:
    value = {"small": torch.arange(4), "large": torch.arange(1000.0), "words": ("a", 1), "none": torch.zeros(0)}
    for size in (64, 1 << 16):
        buffer = SharedBuffer(size)
        found = buffer.unpack(buffer.pack(value))
        assert found["words"] == ("a", 1)
        assert all(torch.equal(found[name], value[name]) for name in ("small", "large", "none"))


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_client_of_another_shape_does_not_end_planning_wherever_it_stands(place: int) -> None:
    def clients() -> dict[str, object]:
        found: list[tuple[str, object]] = [(f"d{number}", records(number)) for number in range(6)]
        found.insert(place, ("odd", [(torch.zeros(2), torch.tensor(0))] * 6))
        return dict(found)

    given = toy(toy_job(clients=clients), how=None, per_round=7)
    assert plan_federation(given, Budget()).outcome.chosen is not None and "odd" not in [
        device.name for device in given.sample
    ]
    played = rounds_of(given, count=1)[0]
    assert [one.name for one in played.rejected] == ["odd"] and len(played.participants) == 6


def test_what_a_device_says_of_its_failure_has_no_record_in_it() -> None:
    class Secret(dict):  # type: ignore[type-arg]
        def __missing__(self, key: object) -> object:
            raise KeyError("the secret of ada")

    def forward(model: torch.nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]) if len(batch[0]) != 3 else Secret()["x"]

    job = toy_job(
        forward=forward,
        clients=lambda: {"a": records(1), "ada": records(0, 3), "b": records(2)},
        local=replace(toy_job().local, batch=0, held_out=0.0),
    )
    rejected = rounds_of(toy(job, per_round=3), count=1)[0].rejected
    assert (
        [one.name for one in rejected] == ["ada"] and "KeyError" in rejected[0].why and "secret" not in rejected[0].why
    )


@pytest.mark.parametrize("technique", [Scaffold(), FedPer(), Ditto(), TopK(0.2)], ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_one_round_that_is_not_finite_leaves_a_device_its_state_and_it_goes_on(
    technique: FederatedTechnique, processes: int
) -> None:
    """Its records are as they should be again in the next round."""
    healthy = {f"d{number}": records(number) for number in range(4)}
    given = toy(toy_job(clients=lambda: healthy), per_round=4, how=CHUNKED)
    parts = parts_of(given, (technique,))

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        """In the second round the weights of one device explode."""
        found = given.plain.work(order, devices, objective)
        rows = found.rows.clone()
        for place, name in enumerate(found.names):
            if order.round == 1 and name == "d1":
                rows[place] = torch.nan
        return replace(found, rows=rows)

    parts = technique.apply(given.plain.with_(work=work))
    server, devices = given.server(parts), given.devices(parts)
    if processes == 2:
        devices.close()
        devices = replace(given, processes=2).devices(parts)
    try:
        first = play(parts, server, devices, given.population)
        kept = {name: value.clone() for name, value in devices.states["d1"].items()}
        second = play(parts, first.server, devices, given.population)
        assert [one.name for one in second.rejected] == ["d1"] and second.restored == ("d1",)
        assert devices.states["d1"].keys() == kept.keys() and all(
            torch.equal(devices.states["d1"][key], kept[key]) for key in kept
        )
        third = play(parts, second.server, devices, given.population)
        assert set(third.participants) == set(healthy) and not third.restored
    finally:
        devices.close()


def test_a_personal_model_that_is_not_finite_is_restored_although_the_update_is_used() -> None:
    given = toy(toy_job(clients=lambda: {f"d{number}": records(number) for number in range(3)}), per_round=3)

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        found = given.plain.work(order, devices, objective)
        beside = bool(objective.model) and order.round == 1
        return replace(found, rows=torch.full_like(found.rows, torch.nan)) if beside else found

    parts = Ditto().apply(given.plain.with_(work=work))
    devices, server = given.devices(parts), given.server(parts)
    first = play(parts, server, devices, given.population)
    second = play(parts, first.server, devices, given.population)
    assert len(second.participants) == 3 and sorted(second.restored) == ["d0", "d1", "d2"]
    assert all(bool(value.isfinite().all()) for state in devices.states.values() for value in state.values())
