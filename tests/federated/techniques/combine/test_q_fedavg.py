"""q-FedAvg against algorithm 2 of its paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.playing.plain import mean
from shoestring.federated.playing.play import play
from shoestring.federated.round import DeviceView, Objective, Order, Updates
from shoestring.federated.techniques.advance.fed_sgd import FedSGD
from shoestring.federated.techniques.combine.q_fedavg import LOSS, QFedAvg
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

COUNTS = [3.0, 40.0, 1.0, 7.0, 12.0, 5.0]
LOSSES = torch.tensor([0.3, 2.5, 1.0, 0.01, 4.0, 0.7], dtype=torch.float64)


def reference(rows: Tensor, counts: Sequence[float], losses: Tensor, q: float, lipschitz: float) -> Tensor:
    """Li et al. 2020, algorithm 2, with the samples as weights of the two sums."""
    above, below = torch.zeros(SIZE, dtype=torch.float64), 0.0
    for row, p, loss in zip(rows.double(), counts, losses.tolist(), strict=True):
        g = lipschitz * -row  # L (w - w_i)
        above += p * loss**q * g
        below += p * (q * loss ** (q - 1) * float(g @ g) + lipschitz * loss**q)
    return -above / below


def combined(technique: QFedAvg, *chunks: Updates) -> Tensor:
    parts = round_with(technique)
    return parts.combine(new_server(parts), iter(chunks)).update


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("lipschitz", [0.0, 3.0])
def test_the_update_is_that_of_the_paper(q: float, lipschitz: float) -> None:
    rows = random_rows(6)
    found = combined(QFedAvg(q, lipschitz), updates_of(rows, COUNTS, QFedAvg_loss=LOSSES))
    expected = reference(rows, COUNTS, LOSSES, q, lipschitz or 1 / 0.1)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_chunks_do_not_matter_beyond_rounding_and_one_device_is_enough() -> None:
    rows = random_rows(6)
    updates = updates_of(rows, COUNTS, QFedAvg_loss=LOSSES)
    whole = combined(QFedAvg(2.0), updates)
    for sizes in ((1,) * 6, (5, 1), (2, 4)):
        assert torch.allclose(combined(QFedAvg(2.0), *in_chunks(updates, *sizes)), whole, rtol=1e-5, atol=1e-7)
    alone = updates.select([1])
    assert torch.allclose(
        combined(QFedAvg(2.0), alone).double(), reference(rows[1:2], COUNTS[1:2], LOSSES[1:2], 2.0, 10.0), rtol=1e-5
    )


def test_q_0_is_the_mean_by_samples() -> None:
    updates = updates_of(random_rows(6), COUNTS, QFedAvg_loss=LOSSES)
    plain = mean(new_server(round_with()), [updates]).update
    assert torch.allclose(combined(QFedAvg(0.0), updates), plain, rtol=1e-5, atol=1e-7)
    assert QFedAvg(0.0).exactness(COST) is Exactness.ROUNDING and QFedAvg(0.1).exactness(COST) is Exactness.CHANGED


def test_powers_that_32_bits_do_not_hold_are_no_problem_and_those_that_64_do_not_hold_are_told() -> None:
    rows = random_rows(6)
    losses = LOSSES * 1e8
    found = combined(QFedAvg(6.0), updates_of(rows, COUNTS, QFedAvg_loss=losses))
    assert torch.allclose(found.double(), reference(rows, COUNTS, losses, 6.0, 10.0), rtol=1e-5, atol=1e-6)
    with pytest.raises(Mistake, match="smaller q"):
        combined(QFedAvg(60.0), updates_of(rows, COUNTS, QFedAvg_loss=losses))


def test_a_loss_of_0_is_no_problem_and_a_negative_one_is_told() -> None:
    rows = random_rows(6)
    for q in (0.0, 0.5, 1.0):
        none = LOSSES.clone()
        none[2] = 0.0
        assert bool(torch.isfinite(combined(QFedAvg(q), updates_of(rows, COUNTS, QFedAvg_loss=none))).all())
    with pytest.raises(Mistake, match="client '3' has a loss of -1"):
        combined(
            QFedAvg(), updates_of(rows, COUNTS, QFedAvg_loss=torch.tensor([1.0, 1, 1, -1, 1, 1], dtype=torch.float64))
        )


def test_nobody_makes_no_update() -> None:
    parts = round_with(QFedAvg())
    found = parts.combine(new_server(parts), [])
    assert found.weight == 0 and not bool(found.update.any())


def test_the_loss_that_is_sent_is_that_of_the_given_weights_before_the_work() -> None:
    parts, devices = round_with(QFedAvg(), local=Local(epochs=4, lr=0.3)), [device(number) for number in range(5)]
    order = Order(0, 0, torch.linspace(-1, 1, 10))
    updates = parts.work(order, devices, Objective(parts.local))
    expected = [0.5 * float((order.weights - one.records.data).square().sum(1).mean()) for one in devices]
    assert updates.extras[LOSS].tolist() == pytest.approx(expected, rel=1e-6)
    plain = work(order, devices, Objective(parts.local))
    assert torch.equal(updates.rows, plain.rows) and torch.equal(updates.losses, plain.losses)
    assert not torch.allclose(updates.losses, updates.extras[LOSS])


def test_measuring_the_loss_leaves_what_techniques_keep_on_devices_alone() -> None:
    def counting(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        for one in devices:
            one.state["works"] += 1
        return work(order, devices, objective)

    parts = QFedAvg().apply(round_with().with_(work=counting))
    one = replace(device(1), state={"works": torch.zeros(())})
    parts.work(Order(0, 0, torch.zeros(10)), [one], Objective(parts.local))
    assert float(one.state["works"]) == 1


def test_the_predicted_bytes_are_those_that_are_sent() -> None:
    parts = round_with(QFedAvg())
    played = play(parts, new_server(parts), ToyDevices(parts), population(per_round=8))
    assert played.up == 8 * QFedAvg().cost(COST).up


def test_whole_rounds_are_those_of_the_paper_also_with_a_restart_between_them() -> None:
    parts = round_with(QFedAvg(2.0))
    server = killed = new_server(parts)
    for _ in range(4):
        played = play(parts, server, ToyDevices(parts), population())
        devices = [device(int(name)) for name in played.participants]
        order = Order(server.seed, server.round, server.weights)
        updates = work(order, devices, Objective(parts.local))
        before = work(order, devices, Objective(Local(epochs=1))).losses
        expected = server.weights + reference(updates.rows, updates.counts.tolist(), before, 2.0, 10.0)
        assert torch.allclose(played.server.weights.double(), expected, atol=1e-5)
        killed = play(parts, saved_and_restored(killed), ToyDevices(parts), population()).server
        server = played.server
    assert same_state(server, killed)


def test_with_fedsgd_it_is_q_fedsgd() -> None:
    """Li et al. 2020, algorithm 1: gradients instead of L (w - w_i)."""
    parts = round_with(QFedAvg(1.0), FedSGD(), local=Local(epochs=3, lr=0.2))
    server = new_server(parts)
    played = play(parts, server, ToyDevices(parts), population())
    above, below = torch.zeros(SIZE), 0.0
    for one in map(device, map(int, played.participants)):
        apart = server.weights - one.records.data
        p, loss, gradient = one.records.count, 0.5 * float(apart.square().sum(1).mean()), apart.mean(0)
        above += p * loss * gradient
        below += p * (float(gradient @ gradient) + loss / 0.2)
    assert torch.allclose(played.server.weights, server.weights - above / below, atol=1e-5)


def test_what_can_not_work_is_told() -> None:
    with pytest.raises(Mistake, match="lipschitz"):
        round_with(QFedAvg(), local=Local(optimizer=torch.optim.Adam))
    round_with(QFedAvg(lipschitz=10.0), local=Local(optimizer=torch.optim.Adam))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(Mistake):
            QFedAvg(q=wrong)
    assert (
        "epsilon" in QFedAvg().refusal(replace(COST, delta=1e-6))
        and not QFedAvg().refusal(COST)
        and QFedAvg.choices(COST) == ()
    )
