"""FedPer: personal layers stay on each device, and all devices learn the other layers together.

    row of device i  =  (shared, personal_i)        only the shared part is sent and aggregated

Every device makes its initial personal weights from the job and its seed, so personal weights are never sent, not even
at first. In the server's row, the initial weights stand in place of the personal ones.
Arivazhagan, Aggarwal, Singh, Choudhary 2019, Federated Learning with Personalization Layers, arXiv 1912.00818.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.model.layout import Layout, LayoutEntry
from shoestring.federated.round import (
    DeviceGroup,
    DeviceView,
    EncodedUpdates,
    Objective,
    Order,
    Round,
    ServerState,
    Updates,
)
from shoestring.federated.technique import FederatedTechnique, RoundCost

PERSONAL = "FedPer.personal"  # key in a device's state: its personal numbers, in the order of the row


class LayerSplit(NamedTuple):
    """Indices into a row."""

    shared: Tensor
    personal: Tensor


@dataclass(frozen=True)
class FedPer(FederatedTechnique):
    """Keep some layers on the device.

    Costs: the common model has no use for those layers elsewhere: a new device has to train them first.

    Not for: a model that has to work on devices that never took part.
    """

    layers: str = ""  # patterns of personal weights, such as "head.*,norm.weight"; "": the last layer that has weights

    why: ClassVar[str] = "some layers stay on the device and are its own"
    seam: ClassVar[str] = "work"
    slot: ClassVar[str] = "work"
    order: ClassVar[int] = 14
    on_request: ClassVar[bool] = True

    def cost(self, cost: RoundCost, /) -> RoundCost:
        assert cost.layout is not None, "the room says what the row of the model is"
        shared, personal = split_layers(cost.layout, self.layers)
        fewer = len(personal)
        evidence = cost.evidence and cost.evidence.select(shared)
        return replace(
            cost,
            size=cost.size - fewer,
            values=cost.values - fewer,
            up=cost.up - 4 * fewer,
            down=cost.down - 4 * fewer,
            device_bytes=cost.device_bytes + 4 * fewer,
            evidence=evidence,
        )

    def refusal(self, cost: RoundCost, /) -> str:
        return layers_problem(cost.layout, self.layers) if cost.layout is not None else ""

    def apply(self, subject: Round, /) -> Round:
        shared, personal = split_layers(subject.layout, self.layers)
        initial, size = subject.initial_weights, subject.layout.size
        assert initial is not None, "the room says what the job's initial weights are"

        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, weights=made.weights[shared])

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            if objective.anchor is not None:
                raise Mistake(
                    "FedPer with a technique that pulls weights towards the shared ones (Ditto): personal layers have no shared "
                    "weights; use one of the two"
                )
            given = order.weights if objective.start is None else objective.start
            start = torch.empty(len(devices), size)
            start[:, shared] = given
            start[:, personal] = torch.stack([device.state.get(PERSONAL, initial[personal]) for device in devices])
            whole = initial.index_copy(0, shared, order.weights)
            found = subject.work(replace(order, weights=whole), devices, replace(objective, start=start))
            for device, own in zip(devices, (start + found.rows)[:, personal], strict=True):
                device.state[PERSONAL] = own.clone()
            return replace(found, rows=found.rows[:, shared])

        def decode(order: Order, sent: EncodedUpdates) -> Updates:
            found = subject.decode(order, sent)
            if found.rows.shape[1] != len(shared):  # a wrong shape: `play` will reject this update
                return replace(found, rows=found.rows[:, :0])
            return replace(found, rows=found.rows.new_zeros(len(found.rows), size).index_copy(1, shared, found.rows))

        return subject.with_(order=order, work=work, decode=decode)


def split_layers(layout: Layout, layers: str) -> LayerSplit:
    """Split a row into shared and personal indices; a Mistake if `layers` fits no or every weight."""
    if why := layers_problem(layout, layers):
        raise Mistake(why)
    mine = personal_entries(layout, layers)
    stays = torch.zeros(layout.size, dtype=torch.bool)
    for entry in mine:
        stays[entry.start : entry.stop] = True
    return LayerSplit((~stays).nonzero().flatten(), stays.nonzero().flatten())


def personal_entries(layout: Layout, layers: str) -> list[LayoutEntry]:
    patterns = [one.strip() for one in layers.split(",") if one.strip()] or [last_layer(layout)]
    return [entry for entry in layout.entries if any(fnmatchcase(entry.name, one) for one in patterns)]


def last_layer(layout: Layout) -> str:
    """A pattern for the names of the last layer's weights."""
    name = [entry.name for entry in layout.entries if entry.trained][-1]
    module = name.rpartition(".")[0]
    return f"{module}.*" if module else name


def layers_problem(layout: Layout, layers: str) -> str:
    """Why these layers can't be personal; empty if they can."""
    names = [entry.name for entry in layout.entries]
    there = f"it has {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
    for one in (one.strip() for one in layers.split(",")):
        if one and not any(fnmatchcase(name, one) for name in names):
            return f"FedPer(layers={layers!r}): no weight of the model is called {one!r}; {there}"
    if not any(entry.trained and entry not in personal_entries(layout, layers) for entry in layout.entries):
        return (
            f"FedPer(layers={layers!r}): every trained weight would be personal, and nothing would be learned together; "
            f"name fewer of them; {there}"
        )
    return ""
