from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.federated.playing.plain import mean
from shoestring.federated.round import Combined, Objective, Order
from shoestring.federated.techniques.local_training.scaffold import CONTROL, Scaffold
from tests.federated.techniques.local_training.toy import (
    COST,
    COUNTS,
    LAYOUT,
    LOCAL,
    SEED,
    START,
    Run,
    device_of,
    mean_of,
    means,
    plain,
)

T = LAYOUT.trained_count


@pytest.mark.parametrize("lr", [1.0, 0.6])
def test_three_rounds_are_those_of_the_papers_algorithm(lr: float) -> None:
    run, x, c = Run((Scaffold(lr),)), START.clone(), torch.zeros(T)
    own = {name: torch.zeros(T) for name in COUNTS}
    for number in range(3):
        played, found, changes = run.round(), {}, []
        for name in played.participants:
            y, steps = x[:T].clone(), list(means(name, number))
            for mean_of_step in steps:
                y = y - LOCAL.lr * ((y - mean_of_step) - own[name] + c)
            after = own[name] - c + (x[:T] - y) / (len(steps) * LOCAL.lr)
            changes.append(after - own[name])
            own[name] = after
            found[name] = y - x[:T]
        step = mean_of(found)
        x = x + lr * step
        c = c + sum(changes) / len(COUNTS)
        assert torch.allclose(run.server.weights, x, atol=1e-5)
        assert torch.allclose(run.server.state[CONTROL], c, atol=1e-5)
        for name in played.participants:
            assert torch.allclose(run.devices.states[name][CONTROL], own[name], atol=1e-5)
    assert float(c.norm()) > 0.1


def test_the_bytes_are_those_that_are_predicted() -> None:
    run, cost = Run((Scaffold(),)), Scaffold().cost(COST)
    played = run.round()
    assert (played.up, played.down) == (3 * cost.up, 3 * cost.down)
    assert cost.device_bytes == 4 * run.devices.states[played.participants[0]][CONTROL].numel()


def test_a_device_finds_the_same_bits_alone_and_among_others() -> None:
    parts = Scaffold().apply(plain())
    order = Order(SEED, 0, START, {CONTROL: torch.linspace(0, 1, T)})
    together, alone = [device_of(name) for name in COUNTS], [device_of(name) for name in COUNTS]
    for _ in range(2):  # the second time with control variates of their own
        found = parts.work(order, together, Objective(LOCAL))
        for place, device in enumerate(alone):
            one = parts.work(order, [device], Objective(LOCAL))
            assert torch.equal(one.rows[0], found.rows[place]) and torch.equal(
                one.extras[CONTROL][0], found.extras[CONTROL][place]
            )
            assert torch.equal(device.state[CONTROL], together[place].state[CONTROL])


def test_state_that_is_taken_out_and_put_back_goes_on_with_the_same_bits() -> None:
    through, stopped = Run((Scaffold(),)), Run((Scaffold(),))
    through.round(), stopped.round()
    again = Run((Scaffold(),))
    again.server = replace(stopped.server, state={name: value.clone() for name, value in stopped.server.state.items()})
    again.devices.states = {
        name: {key: value.clone() for key, value in state.items()} for name, state in stopped.devices.states.items()
    }
    through.round(), again.round()
    assert torch.equal(through.server.weights, again.server.weights)
    assert torch.equal(through.server.state[CONTROL], again.server.state[CONTROL])


def test_the_control_variate_moves_whatever_combines_the_updates() -> None:
    def median(parts):
        def combine(server, arriving):
            rows = torch.cat([updates.rows for updates in arriving])
            return Combined(rows.median(0).values)

        return parts.with_(combine=combine)

    run, usual = Run((Scaffold(),), changed=median), Run((Scaffold(),))
    run.round(), usual.round()
    assert run.parts.combine is not mean and torch.equal(run.server.state[CONTROL], usual.server.state[CONTROL])


def test_a_round_in_which_nobody_answers_leaves_the_control_variate() -> None:
    run = Run((Scaffold(),), per_round=0)
    run.round()
    assert torch.equal(run.server.state[CONTROL], torch.zeros(T)) and torch.equal(run.server.weights, START)


def test_an_optimizer_has_no_step_size_and_is_refused() -> None:
    with pytest.raises(Mistake, match="plain SGD"):
        Scaffold().apply(replace(plain(), local=Local(optimizer=torch.optim.Adam)))
    with pytest.raises(Mistake, match="lr=0"):
        Scaffold(0.0)
