"""Norm-layer statistics: techniques for weights don't see them, and each rule does what it says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.technique import in_order, parse_technique
from shoestring.federated.catalogue import CATALOGUE
from shoestring.federated.model.combined_statistics import median_statistics, statistics_problems
from shoestring.federated.model.layout import layout_of
from shoestring.federated.model.statistics import KEPT
from shoestring.federated.planning.prepare import Prepared, parts_of, plain_cost
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.room import FederatedRoom, plan_federation
from shoestring.federated.round import ServerState, Updates
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.sampling import with_equal_weights
from shoestring.planning.choose import requested_candidate
from tests.federated.test_matrix import ONCE_EACH
from tests.federated.toys import CLASSES, WIDTH, toy, toy_job


class Scaled(nn.Module):
    """Large inputs, so that statistics are far larger than what training does to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(100 * self.body(x))))


LOCAL = Local(epochs=2, batch=0, lr=0.1, held_out=0.25)
GENTLE = replace(
    LOCAL, lr=1e-5
)  # where the norm is frozen at mean 0 and variance 1, what follows it is a hundred times as large


@cache
def normed(**asked: Any) -> Prepared:
    local = GENTLE if asked.get("statistics") == "frozen" else LOCAL
    return toy(toy_job(model=Scaled, local=local), **{"per_round": 8, **asked})


def made(written: str) -> tuple[FederatedTechnique, ...]:
    return in_order(parse_technique(one, CATALOGUE) for one in written.split(" + ") if one)


def played(
    given: Prepared, written: str = "", rounds: int = 2
) -> tuple[list[RoundResult], dict[str, dict[str, torch.Tensor]]]:
    parts = parts_of(given, made(written))
    devices, server, found = given.devices(parts), given.server(parts), []
    try:
        for _ in range(rounds):
            found.append(play(parts, server, devices, given.population, judges=True))
            server = found[-1].server
        return found, devices.states
    finally:
        devices.close()


def statistics(server: ServerState, given: Prepared) -> dict[str, torch.Tensor]:
    return given.layout.statistics.views(server.statistics)


@pytest.mark.parametrize(
    "written", ["", *ONCE_EACH, "Rotate() + QuantizeUpdates(bits=4)", "TopK(share=0.2) + QuantizeUpdates()"]
)
@pytest.mark.parametrize("rule", ["averaged", "local"])
def test_every_technique_with_statistics_is_predicted_to_the_byte_and_has_no_negative_variance(
    written: str, rule: str
) -> None:
    if "Noise" in written:
        pytest.skip("never sent under an epsilon, tested below")
    given, techniques = normed(statistics=rule), made(written)
    if any(one.needs and not set(one.needs) & {type(other).__name__ for other in techniques} for one in techniques):
        pytest.skip("of no use alone")
    cost = plain_cost(given)
    candidate = requested_candidate(techniques, cost)
    confirmed = FederatedRoom(given, cost).confirm(candidate).predicted
    assert (confirmed["up_bytes"], confirmed["down_bytes"]) == (candidate.cost.up, candidate.cost.down)
    for one in played(given, written)[0]:
        assert one.up == candidate.cost.up * one.senders and one.down == candidate.cost.down * one.ordered
        assert not one.rejected
        assert bool((statistics(one.server, given)["norm.running_var"] >= 0).all()) and bool(
            one.server.row.isfinite().all()
        )


def test_top_k_sends_weights_and_not_statistics() -> None:
    given = normed()
    parts = parts_of(given, made("TopK(share=0.1)"))
    assert parts.layout.size == given.layout.trained_count == parts.layout.trained_count
    before, (first, *_) = given.server(parts), played(given, "TopK(share=0.1)")[0]
    assert not torch.equal(first.server.weights, before.weights)
    plain = played(given)[0][0].server
    assert torch.equal(first.server.statistics, plain.statistics), "they arrive as they are, whatever codes the weights"
    assert float((plain.statistics - before.statistics).norm()) > 100 * float((plain.weights - before.weights).norm())


def test_averaged_statistics_are_the_mean_by_samples_of_what_devices_have() -> None:
    given = normed()
    parts, names = given.plain, given.plain.choose(given.server(given.plain), given.population)[0].names
    devices = given.devices(parts)
    arrived = [
        one.sent
        for one in devices.work(
            parts.order(given.server(parts), parts.choose(given.server(parts), given.population)[0]), names
        )
        if one.sent is not None
    ]
    rows = torch.cat([one.header.statistics for one in arrived if one.header.statistics is not None]).double()
    counts = torch.cat([one.header.counts for one in arrived])
    expected = (counts[:, None] * rows).sum(0) / counts.sum()
    expected[-1] = expected[-1].round()  # the counter
    found = played(given)[0][0].server.statistics
    assert torch.allclose(found.double(), expected, rtol=1e-6)
    assert not torch.equal(found, given.server(parts).statistics)


def test_local_statistics_stay_on_their_devices_and_go_on_there() -> None:
    given = normed(statistics="local")
    rounds, states = played(given, rounds=3)
    assert torch.equal(rounds[-1].server.statistics, given.row[given.layout.trained_count :]), (
        "the server's stay as the model began"
    )
    assert {name for one in rounds for name in one.participants} == {name for name in states if KEPT in states[name]}
    assert len({tuple(state[KEPT].tolist()) for state in states.values()}) == len(states)
    counters = {name: float(state[KEPT][-1]) for name, state in states.items()}
    took_part = {name: sum(name in one.participants for one in rounds) for name in states}
    assert counters == {name: 2.0 * rounds for name, rounds in took_part.items()}, (
        "two steps a round, counted over all rounds"
    )
    assert rounds[0].up == 4 * given.layout.trained_count * 8 + 16 * 8


def test_frozen_statistics_are_those_of_the_beginning_in_training_too() -> None:
    given = normed(statistics="frozen")
    rounds, states = played(given)
    assert torch.equal(rounds[-1].server.statistics, given.row[given.layout.trained_count :]) and not states
    assert rounds[0].up == 4 * given.layout.trained_count * 8 + 16 * 8
    model, device = Scaled(), given.sample[0]
    given.layout.load(model, given.row)
    model.eval()  # one step with all records, by hand, normalised by the initial statistics
    parts = parts_of(given, made("FedSGD()"))
    sent = parts.work(
        parts.order(given.server(parts), parts.choose(given.server(parts), given.population)[0]),
        (device,),
        replace_local(parts),
    )
    inputs, targets = zip(*(device.records.data[int(number)] for number in device.records.trained), strict=True)
    nn.functional.cross_entropy(model(torch.stack(inputs)), torch.stack(targets)).backward()
    expected = -GENTLE.lr * torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    assert torch.allclose(sent.rows[0], expected, rtol=1e-3, atol=1e-7)


def replace_local(parts: Any) -> Any:
    from shoestring.federated.round import Objective

    return Objective(parts.local)


def test_under_an_epsilon_statistics_never_leave_a_device() -> None:
    given = normed(epsilon=5.0, delta=1e-3)
    assert given.statistics.value == "frozen" and plain_cost(given).statistics == 0
    with pytest.raises(Mistake, match="no noise covers them"):
        normed(epsilon=5.0, delta=1e-3, statistics="averaged")
    with pytest.raises(Mistake, match="no noise covers them"):
        toy(toy_job(model=Scaled, local=replace(LOCAL, statistics="averaged")), epsilon=5.0, delta=1e-3)
    assert normed(epsilon=5.0, delta=1e-3, statistics="local").statistics.value == "local"
    with pytest.raises(
        Mistake, match="statistics of norm layers, which no noise covers"
    ):  # whoever comes past the two above
        list(
            with_equal_weights(
                [Updates(("a",), torch.ones(1, 2), torch.ones(1), torch.ones(1), statistics=torch.ones(1, 2))]
            )
        )
    cost = replace(plain_cost(normed()), delta=1e-3, clip=1.0)
    assert "statistics of norm layers" in made("GaussianNoise()")[0].refusal(cost)


def test_statistics_that_make_no_sense_are_rejected_with_their_device() -> None:
    given = normed()
    layout = given.layout.statistics
    good = given.row[given.layout.trained_count :].repeat(3, 1)
    good[1, 8] = -1.0  # a variance
    good[2, 0] = torch.nan  # a mean
    assert [bool(why) for why in statistics_problems(layout, good, 3)] == [False, True, True]
    assert "negative variance" in statistics_problems(layout, good, 3)[1]
    assert all(statistics_problems(layout, None, 3)) and all(statistics_problems(layout, good[:, :3], 3))


@pytest.mark.parametrize(
    "written", ["Krum(malicious=1)", "CoordinateMedian()", "NormBound(norm=1.0)", "TrimmedMean(share=0.2)"]
)
def test_robust_rules_take_the_median_of_statistics(written: str) -> None:
    parts = parts_of(normed(), made(written))
    rows = torch.tensor([[1.0], [2.0], [1e30]])
    layout = layout_of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))).statistics
    assert parts.settle is median_statistics
    assert median_statistics(layout, rows.repeat(1, 3), torch.tensor([1.0, 1.0, 1e6])).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("rule", ["averaged", "local", "frozen"])
@pytest.mark.parametrize("written", ["", "FedBuff(buffer=3, concurrency=6)", "Ditto()", "Scaffold()"])
def test_two_processes_give_the_bits_of_one(rule: str, written: str) -> None:
    (one, states), (other, others) = (played(normed(statistics=rule, processes=count), written, 3) for count in (1, 2))
    assert torch.equal(one[-1].server.row, other[-1].server.row)
    assert states.keys() == others.keys()
    assert all(torch.equal(value, others[name][key]) for name, state in states.items() for key, value in state.items())


def test_personal_models_have_statistics_of_their_own() -> None:
    given = normed()
    _, states = played(given, "Ditto()", 3)
    key = "Ditto.personal.statistics"
    assert len({tuple(state[key].tolist()) for state in states.values()}) == len(states)


def test_a_word_that_is_no_rule_is_refused() -> None:
    with pytest.raises(Mistake, match="averaged, local, frozen"):
        Local(statistics="shared")


def test_a_plan_says_what_becomes_of_statistics() -> None:
    from shoestring.core.budget import Budget
    from shoestring.core.clients.statistics import StatisticsRule

    assert (
        plan_federation(normed(statistics="local"), Budget()).outcome.chosen.details.statistics is StatisticsRule.LOCAL
    )


def test_a_budget_that_statistics_alone_exceed_says_what_sends_none() -> None:
    job = toy_job(model=Scaled, local=LOCAL)
    with pytest.raises(OverBudget, match=r'68 B each way are statistics.*statistics="local"'):
        shoestring.federate(job, rounds=1, per_round=8, processes=1, upload=40)
    assert shoestring.federate(job, rounds=1, per_round=8, processes=1, upload=40, statistics="local").losses
