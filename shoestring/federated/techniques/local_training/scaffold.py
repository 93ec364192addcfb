"""SCAFFOLD: control variates correct every device's steps by how its gradients differ from the average of all devices.

    device i    y  <-  y - eta (grad F_i(y) - c_i + c)               K steps, from y = x
                c_i+  =  c_i - c + (x - y) / (K eta)                 option II of the paper: the mean gradient of its own steps
    server      x  <-  x + lr mean_i (y_i - x)
                c  <-  c + 1/N sum_i (c_i+ - c_i)                    over the cohort, of N devices in the population

The mean over devices is the round's (weighted by samples by default); the paper weights devices equally. Control
variates are sent uncompressed both ways, whatever codec the weights have. Rules that leave devices out of the mean
don't leave them out of c.
Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
arXiv 1910.06378.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
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
from shoestring.federated.simulation.cohort.schedule import step_sizes
from shoestring.federated.technique import FederatedTechnique, RoundCost

CONTROL = "Scaffold.control"  # key of c in the server's state, of c_i in a device's (size), and of the change of c_i when sent (k, size)


@dataclass(frozen=True)
class Scaffold(FederatedTechnique):
    """Correct every device's steps by how its gradients differ from those of all devices.

    Costs: twice the bytes in both directions, and a row of numbers that every device keeps.

    Not for: populations in which a device takes part once or twice: its correction is missing or old. Nor for
    robust rules or private noise.
    """

    lr: float = 1.0  # learning rate of the server's step

    why: ClassVar[str] = "control variates correct the drift of unlike devices"
    seam: ClassVar[str] = "work"
    slot: ClassVar[str] = "work"
    order: ClassVar[int] = 12
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.lr < inf:
            raise Mistake(
                f"lr={self.lr} in Scaffold: it is the server's learning rate, 1 for the plain mean; give a number above 0"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        assert cost.layout is not None, "the room says what the row of the model is"
        control = 4 * cost.layout.size
        return replace(cost, up=cost.up + control, down=cost.down + control, device_bytes=cost.device_bytes + control)

    def apply(self, subject: Round, /) -> Round:
        if subject.local.optimizer is not None:
            raise Mistake(
                "Scaffold with an optimizer on devices (the Job's or its Local's): its formula needs the step size of plain SGD; "
                "give Local(lr=...) without an optimizer, or leave out Scaffold"
            )
        if subject.local.clip or subject.local.schedule is not None:
            raise Mistake(
                "Scaffold with clipped gradients or a schedule on devices (clip or schedule of the Job or its Local): its formula "
                "needs a constant step size; leave them out, or leave out Scaffold"
            )
        size = subject.layout.size

        def initial(server: ServerState) -> ServerState:
            server = subject.initial(server)
            return replace(server, state={**server.state, CONTROL: torch.zeros(size)})

        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, extras={**made.extras, CONTROL: server.state[CONTROL]})

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            if objective.start is not None:
                return subject.work(order, devices, objective)
            common = order.extras[CONTROL]
            own = torch.stack([device.state.get(CONTROL, torch.zeros(size)) for device in devices])
            found = subject.work(order, devices, replace(objective, correction=common - own))
            change = -found.rows / step_lengths(devices, objective) - common  # (k, size)
            for device, control in zip(devices, own + change, strict=True):
                device.state[CONTROL] = control.clone()
            return replace(found, extras={**found.extras, CONTROL: change})

        def note(state: Tensors, updates: Updates, population: Population) -> Tensors:
            state = subject.note(state, updates, population)
            return {**state, CONTROL: state[CONTROL] + updates.extras[CONTROL].sum(0) / population.count}

        def advance(server: ServerState, combined: Combined) -> ServerState:
            return subject.advance(server, replace(combined, update=self.lr * combined.update))

        return subject.with_(
            initial=initial, order=order, work=work, note=note, advance=subject.advance if self.lr == 1 else advance
        )


def step_lengths(devices: Sequence[DeviceView], objective: Objective) -> Tensor:
    """K eta of every device (k, 1): number of steps times learning rate."""
    local = objective.local
    return torch.tensor(
        [[len(step_sizes(device.records.count, local)) * local.rate] for device in devices], dtype=torch.float32
    )
