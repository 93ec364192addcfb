"""Ditto and FineTune: updates and shared weights have the same bits as without them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import DeviceView, Objective, Order, Updates
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.local_training.ditto import PERSONAL, Ditto
from shoestring.federated.techniques.local_training.fedper import FedPer
from shoestring.federated.techniques.local_training.fedprox import FedProx
from shoestring.federated.techniques.local_training.finetune import FineTune
from shoestring.federated.techniques.local_training.scaffold import Scaffold
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
    means,
    plain,
    quadratic,
)


def test_dittos_personal_models_are_those_of_the_paper_and_devices_are_judged_by_them() -> None:
    run, personal = Run((Ditto(0.4),), per_round=4), {name: START.clone() for name in COUNTS}
    for number in range(3):
        given = run.server.weights.clone()
        played = run.round(judges=True)
        for name in COUNTS:
            v = personal[name].clone()
            for mean in means(name, number):
                v = v - LOCAL.lr * (v - mean + 0.4 * (v - given))
            personal[name] = v
            assert torch.allclose(run.devices.states[name][PERSONAL], v, atol=1e-5)
        assert played.before["distance"][0] == pytest.approx(sum(distance(given, name) for name in COUNTS), rel=1e-5)
        assert played.after["distance"][0] == pytest.approx(
            sum(distance(personal[name], name) for name in COUNTS), rel=1e-5
        )


def test_fine_tuning_judges_the_given_weights_after_so_many_epochs() -> None:
    run = Run((FineTune(epochs=5),), per_round=4)
    for number in range(2):
        given, expected = run.server.weights.clone(), 0.0
        played = run.round(judges=True)
        for name in COUNTS:
            w = given.clone()
            for mean in means(name, number, Local(epochs=5, batch=LOCAL.batch, lr=LOCAL.lr)):
                w -= LOCAL.lr * (w - mean)
            expected += distance(w, name)
        assert played.after["distance"][0] == pytest.approx(expected, rel=1e-5)
        assert played.before["distance"][0] == pytest.approx(sum(distance(given, name) for name in COUNTS), rel=1e-5)


@pytest.mark.parametrize("beside", [Ditto(0.4), FineTune(3)])
@pytest.mark.parametrize("own", [(), (FedProx(0.5),), (Scaffold(),), (FedPer("head.*"),)], ids=str)
def test_the_rounds_own_work_and_what_others_keep_stay_the_same_bits(
    beside: FederatedTechnique, own: tuple[FederatedTechnique, ...]
) -> None:
    if own == (FedPer("head.*"),) and isinstance(beside, Ditto):
        return  # refused: test_fedper.py
    without, with_it = Run(own), Run((*own, beside))
    for _ in range(2):
        usual, more = without.round(), with_it.round(judges=True)
        assert torch.equal(usual.server.weights, more.server.weights)
        assert (usual.up, usual.down, usual.participants) == (more.up, more.down, more.participants)
    for name, state in without.devices.states.items():
        for key, value in state.items():
            assert torch.equal(with_it.devices.states[name][key], value)
    assert beside.exactness(COST) is Exactness.BITS


def test_personal_models_are_the_same_whatever_technique_changes_the_rounds_own_work() -> None:
    personal = []
    for own in ((), (FedProx(0.5),), (Scaffold(),)):
        run = Run((*own, Ditto(0.4)), per_round=4)
        run.round()
        personal.append(torch.stack([run.devices.states[name][PERSONAL] for name in COUNTS]))
    assert torch.equal(personal[0], personal[1]) and torch.equal(personal[0], personal[2])


def test_fine_tuning_is_plain_training_whatever_technique_changes_the_rounds_own_work() -> None:
    judged = [Run((*own, FineTune(2)), per_round=4).round(judges=True) for own in ((), (FedProx(0.9),))]
    assert judged[0].after == judged[1].after and not torch.equal(judged[0].server.weights, judged[1].server.weights)


@pytest.mark.parametrize("beside", [Ditto(), FineTune()])
def test_what_a_technique_keeps_of_every_work_is_kept_of_the_rounds_own_alone(beside: FederatedTechnique) -> None:
    def counting(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        for device in devices:
            device.state["works"] = device.state.get("works", torch.zeros(())) + 1
        return quadratic(order, devices, objective)

    device = device_of("bob")
    work = beside.apply(plain().with_(work=counting)).work
    for number in range(2):
        work(Order(SEED, number, START, judges=True), [device], Objective(LOCAL))
    assert float(device.state["works"]) == 2


def test_personal_models_that_are_taken_out_and_put_back_go_on_with_the_same_bits_in_chunks_of_one_too() -> None:
    through, again = Run((Ditto(),)), Run((Ditto(),), chunk=1)
    through.round()
    again.server = through.server
    again.devices.states = {
        name: {key: value.clone() for key, value in state.items()} for name, state in through.devices.states.items()
    }
    through.round(), again.round()
    assert through.devices.states.keys() == again.devices.states.keys()
    for name, state in through.devices.states.items():
        assert torch.equal(state[PERSONAL], again.devices.states[name][PERSONAL])


def test_ditto_costs_the_work_twice_and_a_row_on_the_device() -> None:
    cost = Ditto().cost(COST)
    assert (cost.device_seconds, cost.device_bytes, cost.up, cost.down) == (2.0, 4 * LAYOUT.size, COST.up, COST.down)
    assert FineTune().cost(COST) == COST


def test_knobs_that_mean_nothing_are_refused() -> None:
    for make in (lambda: Ditto(-1.0), lambda: Ditto(float("nan")), lambda: FineTune(0), lambda: FineTune(1.5)):  # type: ignore[arg-type]
        with pytest.raises(Mistake, match=r"in (Ditto|FineTune)"):
            make()
