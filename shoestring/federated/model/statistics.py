"""Norm-layer statistics (a batch norm's running mean and variance), which no gradient trains: averaged, local or
frozen.

    averaged   devices receive the server's statistics and send theirs back; the server takes the mean, weighted by samples
    local      every device keeps its own, and nothing is sent; the server keeps the model's initial ones
    frozen     nobody changes them: training and evaluation normalise by the model's initial statistics

Techniques don't see statistics: codecs, clipping, robust rules, noise and the server optimizer act on trained weights
only. Statistics are sent uncompressed, 4 bytes a number. Under a robust rule the server takes their median, number by
number, because one malicious device can move a mean anywhere. With an epsilon they are never sent, because no noise
covers them. `local` together with personal norm weights, FedPer(layers="*norm*"), is FedBN: Li, Jiang, Zhang, Kamp, Dou
2021, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoestring.core.clients.local import Local
from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.errors import Mistake
from shoestring.federated.model.layout import Layout, is_running_norm
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Order, Round, ServerState, Updates

KEPT = "statistics"  # key of a device's own statistics in its state; a personal model has its own under f"{name}.statistics"


def statistics_rule(asked: str, private: bool) -> StatisticsRule:
    """The rule that was asked for, or the default: averaged, or frozen if `private` (with an epsilon)."""
    if asked == StatisticsRule.AVERAGED and private:
        raise Mistake(
            "statistics averaged with an epsilon: running statistics are sums over a device's records, and no noise "
            "covers them; give --statistics frozen or local, or leave out --epsilon and --delta"
        )
    return StatisticsRule(asked) if asked else StatisticsRule.FROZEN if private else StatisticsRule.AVERAGED


def with_statistics(subject: Round, layout: Layout, rule: StatisticsRule, initial: Tensor) -> Round:
    """Hide statistics from techniques: they see rounds of trained weights only, while `subject.work` trains whole rows.

    `layout` and `initial` describe the whole row. Every device can make its initial numbers itself, from the job and
    its seed.
    """
    trained, own = layout.trained_count, initial[layout.trained_count :]
    parts = subject.with_(layout=layout.weights, initial_weights=initial[:trained])
    if layout.size == trained:
        return parts

    def order(server: ServerState, group: DeviceGroup) -> Order:
        return replace(
            subject.order(server, group), statistics=server.statistics if rule is StatisticsRule.AVERAGED else None
        )

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        given = own if order.statistics is None else order.statistics
        whole = replace(order, weights=torch.cat([order.weights, given]), statistics=None)
        keeps = rule is not StatisticsRule.FROZEN and (rule is StatisticsRule.LOCAL or bool(objective.model))
        key, begun = f"{objective.model}.{KEPT}" if objective.model else KEPT, given.expand(len(devices), -1)
        if keeps:
            begun = torch.stack([device.state.get(key, given) for device in devices])
        found = subject.work(whole, devices, whole_objective(order, objective, begun, rule, keeps))
        after = begun + found.rows[:, trained:]
        if keeps:
            for device, kept in zip(devices, after, strict=True):
                device.state[key] = kept.clone()
        sent = after if rule is StatisticsRule.AVERAGED else None
        return replace(found, rows=found.rows[:, :trained].contiguous(), statistics=sent)

    sends = layout.statistics if rule is StatisticsRule.AVERAGED else Layout(())
    return parts.with_(order=order, work=work, statistics=sends)


def whole_objective(order: Order, objective: Objective, begun: Tensor, rule: StatisticsRule, keeps: bool) -> Objective:
    """Extend an objective for trained weights to whole rows; `begun`: the statistics that devices begin with."""
    start, anchor = objective.start, objective.anchor
    if start is not None or keeps:
        start = torch.cat([order.weights.expand(len(begun), -1) if start is None else start, begun], 1)
    if anchor is not None:
        anchor = torch.cat([anchor, torch.zeros(begun.shape[1])])  # no pull on statistics
    return replace(objective, local=replace(objective.local, statistics=rule.value), start=start, anchor=anchor)


def train_mode(model: nn.Module, local: Local) -> None:
    """Put a model into training mode, except that norm layers with frozen statistics stay in evaluation mode."""
    model.train()
    if local.statistics == StatisticsRule.FROZEN:
        for module in model.modules():
            if is_running_norm(module):
                module.eval()
