"""Evaluates weights on the devices' held-out records, as sums that add up over devices to the metrics of all samples
pooled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.user_code.seams import calls_user
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout
from shoestring.federated.round import Sums
from shoestring.federated.simulation.cohort.sequential import StateOutsideRow, load_device
from shoestring.training.memory.recompute.block_state import put_back

LOSS = "loss"  # a metric that always exists
AT_ONCE = 256  # samples per forward


def held_out_metrics(
    job: Job, layout: Layout, model: nn.Module, outside: StateOutsideRow, rows: Tensor, records: Sequence[Records]
) -> tuple[Sums, ...]:
    """Every device's metrics. `rows`: one model for all devices, or one for each. Empty for a device without held-out
    records."""
    found: list[Sums] = []
    with random_state.fork_rng(), torch.no_grad():
        for place, one in enumerate(records):
            load_device(layout, model, rows if rows.dim() == 1 else rows[place], outside)
            model.eval()
            found.append(device_sums(job, model, one))
    put_back(outside.picture)
    model.train()
    return tuple(found)


@calls_user("model, loss or metrics")
def device_sums(job: Job, model: nn.Module, records: Records) -> Sums:
    sums: dict[str, tuple[float, float]] = {}
    for numbers in records.held_out.split(AT_ONCE) if len(records.held_out) else ():
        batch = records.batch(numbers)
        output, weight = job.forward(model, batch), float(job.weight(batch))
        means = {**(job.metrics(output, batch) if job.metrics is not None else {}), LOSS: job.loss(output, batch)}
        for name, value in means.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + float(value) * weight, before[1] + weight)
    return sums
