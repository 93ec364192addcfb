from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.playing.plain import VALUES
from shoestring.federated.playing.play import play
from shoestring.federated.round import EncodedUpdates, Objective, Order
from shoestring.federated.techniques.local_training.ditto import Ditto
from shoestring.federated.techniques.local_training.fedper import PERSONAL, FedPer, split_layers
from tests.federated.techniques.local_training import toy
from tests.federated.techniques.local_training.toy import (
    COST,
    COUNTS,
    LAYOUT,
    LOCAL,
    SEED,
    START,
    Run,
    device_of,
    distance,
    mean_of,
    means,
    plain,
)

HEAD, BODY = slice(4, 7), slice(0, 4)


def test_three_rounds_share_the_body_and_every_device_has_a_head_of_its_own() -> None:
    run, server = Run((FedPer("head.*"),)), START.clone()
    heads = {name: START[HEAD].clone() for name in COUNTS}
    for number in range(3):
        played, found = run.round(), {}
        for name in played.participants:
            w = torch.cat([server[BODY], heads[name]])
            for mean in means(name, number):
                w = w - LOCAL.lr * (w - mean)
            heads[name] = w[HEAD]
            found[name] = torch.cat([w[BODY] - server[BODY], torch.zeros(3)])
        server = server + mean_of(found)
        assert torch.allclose(run.server.weights, server, atol=1e-6)
        assert torch.equal(run.server.weights[HEAD], START[HEAD])
        for name in played.participants:
            assert torch.allclose(run.devices.states[name][PERSONAL], heads[name], atol=1e-6)
    assert len({tuple(head.tolist()) for head in heads.values()}) == len(heads)


def test_the_bytes_are_those_that_are_predicted() -> None:
    technique = FedPer("head.*")
    run, cost = Run((technique,)), technique.cost(replace(COST, evidence=UpdateEvidence.of(START[None])))
    played = run.round()
    assert (played.up, played.down) == (3 * cost.up, 3 * cost.down) and (cost.size, cost.values) == (4, 4)
    assert cost.evidence is not None and torch.equal(cost.evidence.exact[0], START[BODY])
    assert cost.device_bytes == 4 * run.devices.states[played.participants[0]][PERSONAL].numel()


def test_devices_are_judged_with_their_own_heads() -> None:
    run = Run((FedPer("head.*"),), per_round=4)
    run.round()
    given, heads = run.server.weights.clone(), {name: run.devices.states[name][PERSONAL].clone() for name in COUNTS}
    played = run.round(judges=True)
    before = after = 0.0
    for name, head in heads.items():
        w = torch.cat([given[BODY], head])
        before += distance(w, name)
        for mean in means(name, 1):
            w = w - LOCAL.lr * (w - mean)
        after += distance(w, name)
    assert (played.before["distance"][0], played.after["distance"][0]) == (
        pytest.approx(before, rel=1e-5),
        pytest.approx(after, rel=1e-5),
    )


def test_nothing_said_is_the_last_layer_that_has_weights() -> None:
    assert (
        split_layers(LAYOUT, "").personal.tolist()
        == [4, 5, 6]
        == split_layers(LAYOUT, "head.weight, head.b*").personal.tolist()
    )


@given(st.sets(st.sampled_from([entry.name for entry in LAYOUT.entries]), min_size=1))
def test_a_row_is_divided_into_what_is_shared_and_what_stays(names: set[str]) -> None:
    if {"body.weight", "head.weight", "head.bias"} <= names:
        with pytest.raises(Mistake, match="nothing would be learned together"):
            split_layers(LAYOUT, ",".join(names))
        return
    shared, personal = split_layers(LAYOUT, ",".join(names))
    assert sorted(shared.tolist() + personal.tolist()) == list(range(LAYOUT.size))
    assert len(personal) == sum(entry.stop - entry.start for entry in LAYOUT.entries if entry.name in names)


def test_a_device_finds_the_same_bits_alone_and_among_others() -> None:
    parts = FedPer("head.*").apply(plain())
    order = Order(SEED, 0, START[split_layers(LAYOUT, "head.*").shared])
    together, alone = [device_of(name) for name in COUNTS], [device_of(name) for name in COUNTS]
    for _ in range(2):
        found = parts.work(order, together, Objective(LOCAL))
        for place, device in enumerate(alone):
            assert torch.equal(parts.work(order, [device], Objective(LOCAL)).rows[0], found.rows[place])
            assert torch.equal(device.state[PERSONAL], together[place].state[PERSONAL])


def test_a_name_that_matches_nothing_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Mistake, match=r"'tail\.\*'; it has body\.weight, head\.weight"):
        FedPer("head.*,tail.*").apply(plain())
    assert "tail" in FedPer("tail.*").refusal(COST) and not FedPer("head.*").refusal(COST)


def test_an_update_of_another_shape_is_rejected_even_if_it_is_as_long_as_the_whole_row() -> None:
    parts = FedPer("head.*").apply(plain())

    def longer(order, devices, updates):
        sent = plain().encode(order, devices, updates)
        return EncodedUpdates(sent.header, {VALUES: torch.ones(len(devices), LAYOUT.size)})

    parts = parts.with_(encode=longer)
    played = play(parts, Run(()).server, toy.Here(parts), toy.population(), strict=False)
    assert not played.participants and len(played.rejected) == 3 and torch.equal(played.server.weights, START)


def test_a_pull_towards_common_weights_is_refused() -> None:
    run = Run((FedPer("head.*"), Ditto()))
    with pytest.raises(Mistake, match="Ditto"):
        run.round()
