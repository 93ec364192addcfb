"""Federated averaging written by hand, without any code of the engine, which must agree with it.

Only the order of a device's samples and its seed are the project's own, because they are part of what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import prepare_federation
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.simulation.simulation import Simulation
from shoestring.runs.weights.initial_weights import fresh_model

Steps = Callable[
    [nn.Module, Job], Any
]  # of a model: an object with `step()` that moves it once its gradients are there


class PlainSteps:
    def __init__(self, model: nn.Module, job: Job) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=job.local.rate)

    def step(self) -> None:
        self.optimizer.step()


def batches(count: int, job: Job, seed: int) -> list[Tensor]:
    found = []
    for epoch in range(job.local.epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(seed, "epoch", epoch)))
        found += list(order.split(job.local.batch or count))
    return found


def by_hand(job: Job, rounds: int, steps: Steps = PlainSteps) -> Tensor:
    """The trained weights after some rounds of all clients; one whose work fails, or whose weights are not finite, is left out."""
    clients: Mapping[str, TensorDataset] = job.clients()  # type: ignore[operator, misc]
    weights = [one.detach().clone() for one in fresh_model(job).parameters()]
    for number in range(rounds):
        total, samples = [torch.zeros_like(one) for one in weights], 0
        for name, data in clients.items():
            model, seed = fresh_model(job).train(), seed_of(job.seed, "batches", number, name)
            for one, value in zip(model.parameters(), weights, strict=True):
                one.data.copy_(value)
            random_state.seed(seed)
            try:
                work(model, data, job, seed, steps)
            except ValueError:
                continue
            for place, one in enumerate(model.parameters()):
                total[place] += (one.detach() - weights[place]) * len(data)
            samples += len(data)
        weights = [one + change / samples for one, change in zip(weights, total, strict=True)]
    return torch.cat([one.flatten() for one in weights])


def work(model: nn.Module, data: TensorDataset, job: Job, seed: int, steps: Steps) -> None:
    stepping = steps(model, job)
    for places in batches(len(data), job, seed):
        batch = [one[places] for one in data.tensors]
        model.zero_grad()
        loss = job.loss(job.forward(model, batch), batch)
        loss.backward()
        stepping.step()
    if not all(bool(one.isfinite().all()) for one in model.parameters()):
        raise ValueError("the device diverged")


def by_shoestring(job: Job, rounds: int, processes: int = 1) -> tuple[Tensor, Simulation]:
    clients = job.clients()  # type: ignore[operator, misc]
    given = prepare_federation(job, FederateOptions(per_round=len(clients), rounds=rounds, processes=processes))
    found = Simulation(given, ())
    server = given.server(found.parts)
    try:
        for _ in range(rounds):
            server = found.play(server).server
    finally:
        found.close()
    return server.weights, found


def initial(job: Job) -> Tensor:
    return torch.cat([one.detach().flatten() for one in fresh_model(job).parameters()])


def draw() -> float:
    return float(np.random.rand())
