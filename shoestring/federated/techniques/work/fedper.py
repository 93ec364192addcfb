"""FedPer: some layers stay on the device, each device has its own, and the others are learned by all together.

    row of device i  =  (shared, personal_i)        shared is given, sent and combined; personal_i begins as the job's model does

A device makes the job's initial weights itself, from the job and its seed, so nothing personal is ever sent, not even at first. The
server's own row keeps the initial weights in place of the personal ones.
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
from shoestring.federated.layout import Layout, LayoutEntry
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Order, Round, Sent, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost

PERSONAL = "FedPer.personal"  # of a device: its own numbers, in the order of the row


class LayerSplit(NamedTuple):
    """Places in a row."""

    shared: Tensor
    personal: Tensor


@dataclass(frozen=True)
class FedPer(FederatedTechnique):
    """Keep some layers on the device.

    Costs: the common model has no use for those layers elsewhere: a new device has to train them first.

    Not for: a model that has to work on devices that never took part.
    """

    layers: str = ""  # names of weights that stay, such as "head.*,norm.weight"; "": the last layer that has weights

    why: ClassVar[str] = "some layers stay on the device and are its own"
    seam: ClassVar[str] = "work"
    slot: ClassVar[str] = "work"
    order: ClassVar[int] = 14

    def cost(self, cost: RoundCost, /) -> RoundCost:
        assert cost.layout is not None, "the room says what the row of the model is"
        shared, personal = divided(cost.layout, self.layers)
        fewer = len(personal)
        evidence = cost.evidence and cost.evidence.some(shared)
        return replace(
            cost,
            size=cost.size - fewer,
            values=cost.values - fewer,
            up=cost.up - 4 * fewer,
            down=cost.down - 4 * fewer,
            device_bytes=cost.device_bytes + 4 * fewer,
            evidence=evidence,
        )

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[FedPer, ...]:
        return ()

    def refusal(self, cost: RoundCost, /) -> str:
        return problem(cost.layout, self.layers) if cost.layout is not None else ""

    def apply(self, subject: Round, /) -> Round:
        shared, personal = divided(subject.layout, self.layers)
        initial, size = subject.initial_weights, subject.layout.size
        assert initial is not None, "the room says what the job's initial weights are"

        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, weights=made.weights[shared])

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            if objective.anchor is not None:
                raise Mistake(
                    "FedPer beside a technique that pulls weights towards common ones (Ditto): personal layers have no common "
                    "ones; use one of the two"
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

        def decode(order: Order, sent: Sent) -> Updates:
            found = subject.decode(order, sent)
            if found.rows.shape[1] != len(shared):  # an update of another shape: who counts them will reject it
                return replace(found, rows=found.rows[:, :0])
            return replace(found, rows=found.rows.new_zeros(len(found.rows), size).index_copy(1, shared, found.rows))

        return subject.with_(order=order, work=work, decode=decode)


def divided(layout: Layout, layers: str) -> LayerSplit:
    """What is shared and what stays."""
    if why := problem(layout, layers):
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
    """The pattern of its names."""
    name = [entry.name for entry in layout.entries if entry.trained][-1]
    module = name.rpartition(".")[0]
    return f"{module}.*" if module else name


def problem(layout: Layout, layers: str) -> str:
    """Why these layers can't stay; empty if they can."""
    names = [entry.name for entry in layout.entries]
    there = f"it has {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
    for one in (one.strip() for one in layers.split(",")):
        if one and not any(fnmatchcase(name, one) for name in names):
            return f"FedPer(layers={layers!r}): no weight of the model is called {one!r}; {there}"
    if not any(entry.trained and entry not in personal_entries(layout, layers) for entry in layout.entries):
        return (
            f"FedPer(layers={layers!r}): every trained weight would stay on its device, and nothing would be learned together; "
            f"name fewer of them; {there}"
        )
    return ""
