"""Techniques of local training with real models, against plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.federated.devices.records import records_of
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.simulation.cohort.schedule import batches
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.local_training.ditto import PERSONAL, Ditto
from shoestring.federated.techniques.local_training.fedper import FedPer
from shoestring.federated.techniques.local_training.fedprox import FedProx
from shoestring.federated.techniques.local_training.finetune import FineTune
from shoestring.federated.techniques.local_training.scaffold import CONTROL, Scaffold
from tests.federated.techniques.behaviour.small import COUNTS, SEED, Small, clients, model


def worked(
    small: Small,
    start: Tensor,
    name: str,
    number: int,
    mu: float = 0.0,
    anchor: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, int]:
    """The row after the work of one device, and its steps."""
    net, local, steps = model().train(), small.job.local, 0
    small.layout.load(net, start)
    records = records_of(small.job, name, clients()[name], SEED)
    inputs, targets = clients()[name].tensors
    for places in batches(records.count, local, seed_of(SEED, "batches", number, name)):
        chosen = records.trained[places]
        flat = torch.cat([one.flatten() for one in net.parameters()])
        loss = nn.functional.cross_entropy(net(inputs[chosen]), targets[chosen])
        if anchor is not None:
            loss = loss + mu / 2 * (flat - anchor[: len(flat)]).square().sum()
        if correction is not None:
            loss = loss + correction @ flat
        for one, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            one.data -= local.rate * gradient
        steps += 1
    return small.layout.row(net), steps


def test_fedprox_scaffold_and_ditto_are_the_papers_equations() -> None:
    prox, scaffold, ditto = (
        Small((FedProx(0.3),), per_round=6),
        Small((Scaffold(),), per_round=6),
        Small((Ditto(0.5),), per_round=6),
    )
    trained = prox.layout.trained_count
    own, personal = {name: torch.zeros(trained) for name in COUNTS}, dict.fromkeys(COUNTS, ditto.start)
    for number in range(2):
        at_prox, at_scaffold, at_ditto = prox.server.row, scaffold.server.row, ditto.server.row
        control = scaffold.server.state[CONTROL]
        count = {name: records_of(prox.job, name, clients()[name], SEED).count for name in COUNTS}
        one, other, change = torch.zeros_like(at_prox), torch.zeros_like(at_prox), torch.zeros(trained)
        for name in COUNTS:
            one += count[name] / sum(count.values()) * worked(prox, at_prox, name, number, 0.3, at_prox)[0]
            y, steps = worked(scaffold, at_scaffold, name, number, correction=control - own[name])
            other += count[name] / sum(count.values()) * y
            after = own[name] - control + (at_scaffold - y)[:trained] / (steps * 0.1)
            change, own[name] = change + after - own[name], after
            personal[name] = worked(ditto, personal[name], name, number, 0.5, at_ditto)[0]
        prox.round(), scaffold.round(), ditto.round()
        one[-1], other[-1] = one[-1].round(), other[-1].round()  # a batch norm's counter
        assert torch.allclose(prox.server.row, one, atol=1e-5)
        assert torch.allclose(scaffold.server.row, other, atol=1e-5)
        assert torch.allclose(scaffold.server.state[CONTROL], control + change / len(COUNTS), atol=1e-4)
        for name in COUNTS:
            kept = ditto.devices.states[name]
            assert torch.allclose(
                torch.cat([kept[PERSONAL], kept[f"{PERSONAL}.statistics"]]), personal[name], atol=1e-5
            )


def test_judging_and_what_is_beside_the_rounds_own_work_change_no_bit() -> None:
    plain = Small()
    plain.round(), plain.round()
    for beside in (Ditto(), FineTune(2)):
        run = Small((beside,))
        judged = run.round(judges=True)
        run.round()
        assert torch.equal(run.server.weights, plain.server.weights)
        assert judged.before["loss"][1] == judged.after["loss"][1] > 0


def test_personal_layers_are_never_sent_and_devices_with_them_learn_their_own_records_better() -> None:
    techniques: tuple[tuple[FederatedTechnique, ...], ...] = ((), (FedPer(),))
    losses = []
    for some in techniques:
        run = Small(some, per_round=6)
        for _ in range(8):
            played = run.round()
        losses.append(played.loss)
    assert losses[1] < losses[0]
    head = 3 * 8 * 4 - 2 * 8 * 4 + 4  # numbers of Linear(8, 4)
    assert run.devices.states["device 0"]["FedPer.personal"].numel() == head == 36
    assert played.down == 6 * 4 * (run.layout.size - head)
    assert torch.equal(run.layout.views(run.server.row)["3.weight"], run.layout.views(run.start)["3.weight"])
