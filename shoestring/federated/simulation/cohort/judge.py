"""How good weights are on what devices hold out: sums, which add up over devices to what one pool of all their samples would give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.job import Job
from shoestring.core.seams import calls_user
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.round import Sums
from shoestring.federated.simulation.cohort.sequential import Beside, load
from shoestring.training.memory.block_state import put_back

LOSS = "loss"  # the metric that is always there
AT_ONCE = 256  # samples of a forward


def judged(
    job: Job, layout: Layout, model: nn.Module, beside: Beside, rows: Tensor, records: Sequence[Records]
) -> tuple[Sums, ...]:
    """Of every device, the metrics of one row for all of them or of a row each; nothing for a device that holds out nothing."""
    found: list[Sums] = []
    with random_state.kept(), torch.no_grad():
        for place, one in enumerate(records):
            load(layout, model, rows if rows.dim() == 1 else rows[place], beside)
            model.eval()
            found.append(device_sums(job, model, one))
    put_back(beside.picture)
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
