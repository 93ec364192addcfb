"""FedAvgM, FedAdagrad, FedAdam, FedYogi and FedSGD, against the equations of their papers, over several rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.technique import parse_technique, text
from shoestring.federated.playing.play import play
from shoestring.federated.round import Combined
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.advance.adaptive import FedAdagrad, FedAdam, FedYogi
from shoestring.federated.techniques.advance.fed_sgd import FedSGD
from shoestring.federated.techniques.advance.momentum import FedAvgM
from shoestring.federated.techniques.combine.by_coordinate import CoordinateMedian
from shoestring.federated.techniques.combine.krum import Krum
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
)

Numbers = np.ndarray
STEPPED = (
    FedAvgM(),
    FedAvgM(0.5, 0.3),
    FedAvgM(0.0, 0.5),
    FedAdagrad(),
    FedAdagrad(0.1, 0.9, 1e-2),
    FedAdam(),
    FedAdam(0.3, 0.5, 0.9, 1e-2),
    FedYogi(),
    FedYogi(0.3, 0.5, 0.9, 1e-2),
)


def reference(technique: FederatedTechnique) -> Callable[[Numbers, list[Numbers]], Numbers]:
    """The papers' loops in 64 bits: the weights after updates d, from weights w."""

    def steps(w: Numbers, updates: list[Numbers]) -> Numbers:
        m, v = np.zeros_like(w), np.full_like(w, getattr(technique, "tau", 0.0) ** 2)
        for d in updates:
            if isinstance(technique, FedAvgM):  # Hsu et al. 2019, section 4.3
                m = technique.momentum * m + d
                w = w + technique.lr * m
                continue
            assert isinstance(technique, (FedAdagrad, FedAdam, FedYogi))
            m = technique.beta1 * m + (1 - technique.beta1) * d  # Reddi et al. 2021, algorithm 2
            if isinstance(technique, FedAdagrad):
                v = v + d**2
            elif isinstance(technique, FedAdam):
                v = technique.beta2 * v + (1 - technique.beta2) * d**2
            else:
                v = v - (1 - technique.beta2) * d**2 * np.sign(v - d**2)
            w = w + technique.lr * m / (np.sqrt(v) + technique.tau)
        return w

    return steps


@pytest.mark.parametrize("technique", STEPPED, ids=text)
def test_the_weights_after_several_rounds_are_those_of_the_paper(technique: FederatedTechnique) -> None:
    parts, begun = round_with(technique), new_server(round_with())
    server, killed, seen = parts.initial(begun), parts.initial(begun), []
    for number in range(6):
        updates = updates_of(0.1 * random_rows(5, seed=number), [1.0, 9.0, 4.0, 30.0, 2.0])
        mean = (updates.counts[:, None] * updates.rows).sum(0) / updates.counts.sum()
        seen.append(mean.numpy())
        server = parts.advance(server, parts.combine(server, [updates]))
        killed = saved_and_restored(killed)
        killed = parts.advance(killed, parts.combine(killed, [updates]))
    expected = reference(technique)(begun.weights.double().numpy(), seen)
    assert np.allclose(server.weights.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert same_state(server, killed)
    assert all(value.shape == (SIZE,) for value in server.state.values()) and server.state


@pytest.mark.parametrize("technique", STEPPED, ids=text)
def test_chunks_do_not_matter_beyond_rounding_and_one_device_is_enough(technique: FederatedTechnique) -> None:
    parts = round_with(technique)
    updates = updates_of(random_rows(5, seed=1), [1.0, 9.0, 4.0, 30.0, 2.0])
    server = new_server(parts)
    whole = parts.advance(server, parts.combine(server, [updates])).weights
    apart = parts.advance(server, parts.combine(server, in_chunks(updates, 1, 3, 1))).weights
    assert torch.allclose(whole, apart, atol=1e-5)
    alone = parts.advance(server, parts.combine(server, [updates.select([2])])).weights
    expected = reference(technique)(server.weights.double().numpy(), [updates.rows[2].double().numpy()])
    assert np.allclose(alone.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("technique", STEPPED, ids=text)
def test_a_round_into_which_nothing_came_is_no_step(technique: FederatedTechnique) -> None:
    parts = round_with(technique)
    server = new_server(parts)
    server = parts.advance(server, parts.combine(server, [updates_of(random_rows(3))]))
    after = parts.advance(server, parts.combine(server, []))
    assert same_state(server, after)


@pytest.mark.parametrize("technique", STEPPED, ids=text)
def test_zero_and_huge_updates_give_finite_weights(technique: FederatedTechnique) -> None:
    parts = round_with(technique)
    for value in (0.0, 1e18):
        server = new_server(parts)
        for _ in range(2):
            server = parts.advance(server, Combined(torch.full((SIZE,), value), weight=1.0))
        assert bool(torch.isfinite(server.weights).all())


def test_state_that_a_rule_keeps_is_kept() -> None:
    parts = round_with(FedAdam(), Krum(1))
    server = new_server(parts)
    after = parts.advance(server, parts.combine(server, [updates_of(random_rows(3))]))
    assert int(after.state["Krum.skipped"]) == 1
    assert same_state(replace(after, state={**after.state, "Krum.skipped": torch.tensor(0)}), server)
    stepped = parts.advance(server, Combined(torch.ones(SIZE), {"another rule's": torch.ones(2)}, weight=1.0))
    assert torch.equal(stepped.state["another rule's"], torch.ones(2)) and bool(stepped.state["FedAdam.m"].all())


def test_without_momentum_and_with_a_rate_of_1_it_is_plain_averaging_to_the_bit() -> None:
    plain, parts = round_with(), round_with(FedAvgM(momentum=0.0, lr=1.0))
    one, other = new_server(plain), new_server(parts)
    for _ in range(3):
        one = play(plain, one, ToyDevices(plain), population()).server
        other = play(parts, other, ToyDevices(parts), population()).server
    assert same_state(one, other)
    assert (
        FedAvgM(0.0, 1.0).exactness(COST) is Exactness.BITS and FedAvgM(0.0, 0.9).exactness(COST) is Exactness.CHANGED
    )


def test_fedsgd_beside_an_optimizer_is_refused() -> None:
    with pytest.raises(Mistake, match="plain SGD"):
        round_with(FedSGD(), local=Local(optimizer=torch.optim.Adam))


@pytest.mark.parametrize("local", [Local(epochs=5, batch=2, lr=0.2), Local(lr=0.2, steps=7)])
def test_fedsgd_is_one_step_of_sgd_with_the_samples_of_all_devices(local: Local) -> None:
    parts = round_with(FedSGD(), local=local)
    assert parts.local == Local(epochs=1, batch=0, steps=1, lr=0.2)
    server = new_server(parts)
    for _ in range(3):
        played = play(parts, server, ToyDevices(parts), population())
        samples = torch.cat([device(int(name)).records.data for name in played.participants])
        expected = server.weights - 0.2 * (server.weights - samples).mean(0)
        assert torch.allclose(played.server.weights, expected, atol=1e-6)
        server = played.server


def test_a_server_optimizer_follows_any_rule() -> None:
    parts = round_with(FedAdam(), CoordinateMedian(), FedSGD())
    server = new_server(parts)
    played = play(parts, server, ToyDevices(parts), population())
    begun = server.weights
    rows = torch.stack([0.1 * (device(int(name)).records.data.mean(0) - begun) for name in played.participants])
    median = np.median(rows.double().numpy(), axis=0)
    assert np.allclose(played.server.weights, reference(FedAdam())(begun.double().numpy(), [median]), atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        "FedAvgM(momentum=1.0)",
        "FedAvgM(lr=0.0)",
        "FedAdam(tau=0.0)",
        "FedAdam(beta2=1.0)",
        "FedYogi(beta1=-0.1)",
        "FedAdagrad(lr=-1)",
        "FedAdam(lr=1e999)",
    ],
)
def test_wrong_knobs_are_told(wrong: str) -> None:
    with pytest.raises(Mistake, match=wrong.split("(", maxsplit=1)[0]):
        parse_technique(wrong, (FedAvgM, FedAdam, FedYogi, FedAdagrad))


@pytest.mark.parametrize("technique", (*STEPPED, FedSGD()), ids=text)
def test_they_cost_no_bytes_and_are_only_for_who_asks(technique: FederatedTechnique) -> None:
    assert technique.cost(COST) == COST and type(technique).choices(COST) == () and not technique.refusal(COST)
    assert technique.exactness(COST) is Exactness.CHANGED and technique.drift(COST) == float("inf")
