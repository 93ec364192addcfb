"""What a federation needs before its first round: the job's clients, its model as a row, and how devices are simulated."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.technique import applied
from shoestring.data.clients import clients_of
from shoestring.federated.devices.device_errors import Failure, UnusableRecords, count_kinds
from shoestring.federated.devices.device_output import withheld_output
from shoestring.federated.devices.local_steps import ignored_settings, job_for_devices, optimizer_note
from shoestring.federated.devices.records import Records, records_of
from shoestring.federated.model.layout import Layout, layout_of
from shoestring.federated.model.statistics import statistics_rule, with_statistics
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.playing.plain import plain_round
from shoestring.federated.playing.randomness import SYSTEM, Randomness, SeededRandomness
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Population, Round, ServerState, Tensors, Work
from shoestring.federated.simulation.cohort import Engine, MethodChoice, choose_method, engine_work
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, make_model, sequential_method
from shoestring.federated.simulation.simulated_devices import DeviceWorker, SimulatedDevices, States
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.release import check_delta_for
from shoestring.runs.weights.initial_weights import fresh_model

ROUNDS = 20  # default number of rounds
PER_ROUND = 10
SAMPLE = 3  # devices on which ways to work are tried
TIMED = 2  # chunks a process that are timed
MEASURED = 10  # devices whose updates say how far devices agree,
UPDATES = 32 << 20  # as many as are together no more bytes than that; of one alone, others are taken to be like it
PARTS = 4  # chunks of a round, at least
STEPS = 3  # that a device of the sample takes to show that it can
KEEPS = (
    "local training keeps state that can't be restored (an iterator, say), so what a device finds depends on the devices before it, "
    "and a run that was killed may end with other numbers: keep such state in the model, in the loss or in a variable of its closure"
)
TRIES = 20  # clients that are looked at to find such a sample: some may be empty or broken


@dataclass(frozen=True)
class Prepared:
    job: Job
    clients: Mapping[str, Any]
    population: Population
    rounds: int
    layout: Layout
    row: Tensor  # the job's initial model
    how: MethodChoice
    processes: int
    sample: tuple[DeviceView, ...]
    asked: FederateOptions
    statistics: StatisticsRule  # what becomes of norm layers' statistics
    warnings: tuple[str, ...] = ()  # of the plan: what devices do otherwise than the job says

    @property
    def plain(self) -> Round:
        """The round without techniques, simulated as chosen."""
        return self.round(engine_work(Engine(self.job, self.layout, self.how)))

    def round(self, work: Work) -> Round:
        """The round without techniques, for whole rows, with this `work`."""
        parts = with_statistics(plain_round(self.layout, self.job.local, work), self.layout, self.statistics, self.row)
        return parts.with_(randomness=self.randomness)

    @property
    def randomness(self) -> Randomness:
        return SYSTEM if self.asked.insecure_seed is None else SeededRandomness(self.asked.insecure_seed)

    def may_tell(self, difference: str) -> str:
        """What may be told of a difference between the fast method and the plain loop: its figures are record counts of
        devices, which epsilon does not cover."""
        return difference if self.asked.epsilon is None else "an update differs from the plain loop's"

    def server(self, parts: Round) -> ServerState:
        """The server before the first round."""
        return parts.initial(self.server_at(0, self.row, {}))

    def server_at(self, round: int, row: Tensor, state: Tensors) -> ServerState:
        """The server after `round` rounds, from the model's whole row."""
        return ServerState(
            self.job.seed, round, row[: self.layout.trained_count], state, row[self.layout.trained_count :]
        )

    def devices(self, parts: Round, states: States | None = None) -> SimulatedDevices:
        return SimulatedDevices(
            DeviceWorker(parts, self.job, self.clients, self.job.seed, self.asked.epsilon is None),
            self.how.chunk,
            self.processes,
            states,
        )


def prepare_federation(job: Job, asked: FederateOptions, how: MethodChoice | None = None) -> Prepared:
    """Everything but the plan. `how`: the method of the run that is resumed; it is chosen anew otherwise."""
    torch.set_num_threads(
        1
    )  # processes are what uses several cores, and sums of one thread are the same bits everywhere
    ignored, note, job = ignored_settings(job), optimizer_note(job), job_for_devices(job)
    clients = clients_of(job, asked.clients, job.seed)
    population = population_of(clients, asked.per_round)
    check_delta_for(asked.delta, population.count)
    rounds = ROUNDS if asked.rounds is None else asked.rounds
    if rounds < 1:
        raise Mistake(f"--rounds {rounds}: give 1 or more")
    model = fresh_model(job)
    layout, statistics = (
        layout_of(model),
        statistics_rule(asked.statistics or job.local.statistics, asked.epsilon is not None),
    )
    sample = sample_of(job, clients, population, None if how else sequential_method(job, layout, make_model(job)))
    if how is None:
        how = several(usual_way(job, layout, [device.records for device in sample]), population.per_round)
        how = replace(how, why="; ".join(filter(None, (how.why, note))))
    processes = min(asked.processes or len(os.sched_getaffinity(0)), -(-population.per_round // how.chunk))
    processes = 1 if how.alone else max(processes, 1)
    row, warnings = layout.row(model).cpu(), (*ignored, *[KEEPS] * how.alone)
    return Prepared(job, clients, population, rounds, layout, row, how, processes, sample, asked, statistics, warnings)


def several(how: MethodChoice, per_round: int) -> MethodChoice:
    """Limit a chunk's devices so that a round has PARTS chunks, which several processes can share. The number of
    processes does not matter, so chunks, and with them the bits, are always the same."""
    return replace(how, chunk=max(min(how.chunk, -(-per_round // PARTS)), 1))


def population_of(clients: Mapping[str, Any], per_round: int | None) -> Population:
    count, wanted = len(clients), PER_ROUND if per_round is None else per_round
    if wanted < 1:
        raise Mistake(f"--per-round {wanted}: a round needs a device; give 1 or more")
    if wanted > count and per_round is not None:
        raise Mistake(
            f"--per-round {wanted} and there are {count} clients: a device takes part in a round once; give {count} or fewer, or "
            f"more clients (--clients)"
        )
    named = getattr(clients, "name_of", None) or list(clients).__getitem__
    return Population(count, named, min(wanted, count))


@withheld_output()
def sample_of(
    job: Job, clients: Mapping[str, Any], population: Population, plain: SequentialMethod | None
) -> tuple[DeviceView, ...]:
    """A few devices with records on which `plain` can take some steps. Failing devices are reported when their turn
    comes, and the round continues without them."""
    found: list[DeviceView] = []
    first: BaseException | None = None
    for name in islice(map(population.name, range(population.count)), TRIES):
        try:
            with withheld_output():
                device = DeviceView(records_of(job, name, clients[name], job.seed))
                if plain is not None:
                    objective = Objective(replace(job.local, epochs=1, steps=min(job.local.steps or STEPS, STEPS)))
                    plain.train(plain.layout.row(plain.model)[None], [device.records], objective, [0])
                found.append(device)
        except Failure as error:
            first = first or error
        if len(found) == SAMPLE:
            break
    if found:
        return tuple(found)
    assert first is not None, "a population has a client"
    if isinstance(first, UnusableRecords):
        raise Mistake(
            f"none of the first {min(TRIES, population.count)} clients can be used; of the first that can't, "
            f"{first.why}: {first.cure}"
        ) from first
    raise first


@withheld_output()
def usual_way(job: Job, layout: Layout, sample: Sequence[Records]) -> MethodChoice:
    """The simulation method. Devices of the sample that fail meanwhile are left out, unless all of them do."""
    try:
        with withheld_output():
            return choose_method(job, layout, sample)
    except Failure:
        good = []
        for records in sample:
            with suppress(*Failure), withheld_output():
                choose_method(job, layout, [records])
                good.append(records)
        if not good or len(good) == len(sample):
            raise
    return choose_method(job, layout, good)


def plain_cost(given: Prepared) -> RoundCost:
    """The cost of a round without techniques: bytes by formula; seconds and updates measured on devices of the first
    round."""
    parts = given.plain
    server, devices = given.server(parts), given.devices(parts)
    names = measured_names(given, parts, server)
    order = parts.order(server, DeviceGroup(names))
    try:
        list(
            devices.work(order, names[: given.how.chunk * given.processes])
        )  # a warm-up, so that one-time work is not timed
        begun = time.perf_counter()
        arrived = list(devices.work(order, names))
        updates = [parts.decode(order, one.sent) for one in arrived if one.sent is not None]
        worked = time.perf_counter() - begun
        combined = parts.advance(server, parts.combine(server, updates))
        whole = time.perf_counter() - begun
    finally:
        devices.close()
    del combined
    if not updates:
        failed = [one for some in arrived for one in some.rejected]
        raise Mistake(
            f"the work of all {len(names)} clients that were tried failed: {count_kinds(one.why for one in failed)}"
        )
    rows = torch.cat([one.rows for one in updates])
    seconds, finite = worked / len(rows), rows.isfinite().all(1)
    if not bool(finite.any()):
        raise Mistake(f"the updates of all {len(rows)} clients that were tried are not finite: give Local a lower rate")
    kept = finite.nonzero().flatten()[: max(UPDATES // (4 * rows.shape[1]), 1)]
    evidence = UpdateEvidence.of(rows[kept], seconds, torch.cat([one.counts for one in updates])[kept])
    size, statistics = parts.layout.size, parts.statistics.size
    return RoundCost(
        size,
        size,
        up=4 * (size + statistics) + TOLD,
        down=4 * (size + statistics),
        clients=given.population.count,
        per_round=given.population.per_round,
        rounds=given.rounds,
        device_seconds=seconds,
        server_seconds=(whole - worked) / len(rows) * given.population.per_round,
        delta=given.asked.delta or 0.0,
        wanted=float("inf") if given.asked.epsilon is None else given.asked.epsilon,
        evidence=evidence,
        layout=parts.layout,
        statistics=statistics,
    )


def measured_names(given: Prepared, parts: Round, server: ServerState) -> tuple[str, ...]:
    """Devices of the first round, evenly chosen: enough for every process, and to see how far devices agree."""
    names = [name for group in parts.choose(server, given.population) for name in group.names]
    wanted = min(MEASURED, UPDATES // (4 * parts.layout.size))
    count = min(len(names), max(TIMED * given.how.chunk * given.processes, wanted))
    return tuple(names[place * len(names) // count] for place in range(count))


TOLD = 16  # bytes that every device sends beside its update: its number of samples and its loss


def parts_of(given: Prepared, techniques: Sequence[FederatedTechnique]) -> Round:
    return applied(techniques, given.plain)
