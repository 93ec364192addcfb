from __future__ import annotations

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import Objective, Order
from shoestring.federated.techniques.local_training.fedprox import FedProx
from tests.federated.techniques.local_training.toy import (
    COST,
    LOCAL,
    SEED,
    START,
    Run,
    device_of,
    mean_of,
    means,
    plain,
)


def test_devices_minimise_their_loss_and_the_papers_proximal_term() -> None:
    run, weights = Run((FedProx(0.7),)), START.clone()
    for number in range(3):
        played, found = run.round(), {}
        for name in played.participants:
            w = weights.clone().requires_grad_()
            for mean in means(name, number):
                loss = (w - mean).square().sum() / 2 + 0.7 / 2 * (w - weights).square().sum()
                w = (w - LOCAL.lr * torch.autograd.grad(loss, w)[0]).detach().requires_grad_()
            found[name] = w.detach() - weights
        weights = weights + mean_of(found)
        assert torch.allclose(run.server.weights, weights, atol=1e-6)


def test_without_a_pull_it_changes_no_bit_and_with_one_it_does() -> None:
    runs = [Run(()), Run((FedProx(0.0),)), Run((FedProx(0.01),))]
    for run in runs:
        run.round()
    assert torch.equal(runs[0].server.weights, runs[1].server.weights)
    assert not torch.equal(runs[0].server.weights, runs[2].server.weights)
    assert FedProx(0.0).exactness(COST) is Exactness.BITS and FedProx(0.1).exactness(COST) is Exactness.CHANGED


def test_a_work_that_begins_elsewhere_is_left_as_it_is() -> None:
    order, start = Order(SEED, 0, START), (START + 1).expand(1, -1)
    beside = FedProx(1.0).apply(plain()).work(order, [device_of("bob")], Objective(LOCAL, start))
    assert torch.equal(beside.rows, plain().work(order, [device_of("bob")], Objective(LOCAL, start)).rows)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_pull_that_is_no_number_from_0_on_is_refused(mu: float) -> None:
    with pytest.raises(Mistake, match="FedProx"):
        FedProx(mu)
