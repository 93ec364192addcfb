"""What a federation is made of before its first round: the job's clients, its model as a row, and how devices are simulated."""
from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.technique import applied
from shoestring.data.clients import clients_of
from shoestring.federated.cohort import Engine, How, how_to_work, work_of
from shoestring.federated.layout import Layout, layout_of
from shoestring.federated.local_steps import not_on_devices, on_devices
from shoestring.federated.plain import plain_round
from shoestring.federated.records import records_of
from shoestring.federated.round import Device, Group, Population, Round, Server
from shoestring.federated.simulate import SimulatedDevices, States, Workshop
from shoestring.federated.technique import Evidence, FederatedTechnique, RoundCost
from shoestring.runs.initial_weights import fresh_model

ROUNDS = 20         # if nobody says how many
PER_ROUND = 10
SAMPLE = 3          # devices on which ways to work are tried
TIMED = 2           # chunks a process that are timed
PARTS = 4           # chunks of a round, at least
TRIES = 20          # clients that are looked at to find such a sample: some may be empty or broken


@dataclass(frozen=True)
class Asked:
    """What a user asks of a federation; None: whatever is usual."""

    clients: int | None = None      # devices
    per_round: int | None = None    # that take part in a round
    rounds: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    processes: int | None = None    # that simulate devices here


@dataclass(frozen=True)
class Prepared:
    job: Job
    clients: Mapping[str, Any]
    population: Population
    rounds: int
    layout: Layout
    row: Tensor                     # the job's model as it begins
    how: How
    processes: int
    sample: tuple[Device, ...]
    asked: Asked

    @property
    def plain(self) -> Round:
        """The round without techniques, as it is simulated here."""
        return plain_round(self.layout, self.job.local, work_of(Engine(self.job, self.layout, self.how))).with_(initial_weights=self.row)

    def server(self, parts: Round) -> Server:
        """The server before the first round."""
        return parts.initial(Server(self.job.seed, 0, self.row))

    def devices(self, parts: Round, states: States | None = None) -> SimulatedDevices:
        return SimulatedDevices(Workshop(parts, self.job, self.clients, self.job.seed), self.how.chunk, self.processes, states)


def prepared(job: Job, asked: Asked, model: nn.Module | None = None, how: How | None = None) -> Prepared:
    """Everything but the plan. `model`: what to begin from instead of the job's own; `how`: how devices worked in the run that goes on."""
    torch.set_num_threads(1)   # processes are what uses several cores, and sums of one thread are the same bits everywhere
    said, job = not_on_devices(job), on_devices(job)
    clients = clients_of(job, asked.clients, job.seed)
    population = population_of(clients, asked.per_round)
    rounds = ROUNDS if asked.rounds is None else asked.rounds
    if rounds < 1:
        raise Mistake(f"--rounds {rounds}: give 1 or more")
    model = fresh_model(job) if model is None else model
    layout = layout_of(model)
    sample = sample_of(job, clients, population)
    if how is None:
        how = several(how_to_work(job, layout, [device.records for device in sample]), population.per_round)
        how = replace(how, why="; ".join([how.why, *said]))
    processes = min(asked.processes or len(os.sched_getaffinity(0)), -(-population.per_round // how.chunk))
    return Prepared(job, clients, population, rounds, layout, layout.row(model).cpu(), how, max(processes, 1), sample, asked)


def several(how: How, per_round: int) -> How:
    """So many devices at once that a round has PARTS chunks, which several processes can share; however many those are, the chunks, and
    with them the bits, are the same."""
    return replace(how, chunk=max(min(how.chunk, -(-per_round // PARTS)), 1))


def population_of(clients: Mapping[str, Any], per_round: int | None) -> Population:
    count, wanted = len(clients), PER_ROUND if per_round is None else per_round
    if wanted < 1:
        raise Mistake(f"--per-round {wanted}: a round needs a device; give 1 or more")
    if wanted > count and per_round is not None:
        raise Mistake(f"--per-round {wanted} and there are {count} clients: a device takes part in a round once; give {count} or fewer, or "
                      f"more clients (--clients)")
    named = getattr(clients, "name_of", None) or list(clients).__getitem__
    return Population(count, named, min(wanted, count))


def sample_of(job: Job, clients: Mapping[str, Any], population: Population) -> tuple[Device, ...]:
    """A few devices that have records. Others are named when their turn comes, and the round goes on without them."""
    found, wrong = [], ""
    for name in islice(map(population.name, range(population.count)), TRIES):
        try:
            found.append(Device(records_of(job, name, clients[name], job.seed)))
        except Mistake as error:
            wrong = wrong or str(error)
        if len(found) == SAMPLE:
            break
    if not found:
        raise Mistake(f"none of the first {min(TRIES, population.count)} clients can be used: {wrong}")
    return tuple(found)


def plain_cost(given: Prepared) -> RoundCost:
    """What a round costs without techniques: bytes by formula, seconds and an update from devices that really work."""
    parts = given.plain
    server, devices = given.server(parts), given.devices(parts)
    names = tuple(map(given.population.name, range(min(given.population.count, TIMED * given.how.chunk * given.processes))))
    order = parts.order(server, Group(names))
    try:
        list(devices.work(order, names[:given.how.chunk * given.processes]))   # what is made once is made now
        begun = time.perf_counter()
        updates = [parts.decode(order, one.sent) for one in devices.work(order, names) if one.sent is not None]
        worked = time.perf_counter() - begun
        combined = parts.advance(server, parts.combine(server, updates))
        whole = time.perf_counter() - begun
    finally:
        devices.close()
    del combined
    rows = torch.cat([one.rows for one in updates])
    norms = rows.norm(dim=1)
    usual = rows[int(norms.argsort()[len(norms) // 2])].clone()
    size = given.layout.size
    return RoundCost(
        size, size, up=4 * size + TOLD, down=4 * size, clients=given.population.count, per_round=given.population.per_round,
        rounds=given.rounds, device_seconds=worked / len(rows), server_seconds=(whole - worked) / len(rows) * given.population.per_round,
        delta=given.asked.delta or 0.0, wanted=float("inf") if given.asked.epsilon is None else given.asked.epsilon,
        evidence=Evidence(usual, worked / len(rows)), layout=given.layout)


TOLD = 16   # bytes that every device sends beside its update: how many samples it trained on, and its loss


def parts_of(given: Prepared, techniques: Sequence[FederatedTechnique]) -> Round:
    return applied(techniques, given.plain)


