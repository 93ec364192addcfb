"""One contestant of the benchmark of speed, in a process of its own: `python speed_contestant.py NAME CASE CORES`.

It makes its data, runs a few rounds to warm up, says "ready", and then runs a round for every line that it reads, saying how many
seconds it took. A round: every client trains for an epoch by SGD from the same weights, and the mean of their updates, by samples, moves
the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from speed_models import CASES, RATE, Case

WARM = 9  # rounds before the first that counts: after so many, all shapes that come again are recorded (cohort/stacked/recording.py)


def asked() -> Iterator[None]:
    """A turn for every line that is read."""
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        yield


def tell(seconds: float) -> None:
    print(json.dumps(seconds), flush=True)


def take_turns(play: Callable[[], Any]) -> None:
    for _ in range(WARM):
        play()
    for _ in asked():
        begin = time.perf_counter()
        play()
        tell(time.perf_counter() - begin)


def loop(case: Case, cores: int) -> None:
    """What a good engineer writes first: one model, weights copied in, autograd, SGD, updates added up."""
    model, data = case.made(), case.data()
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def play() -> None:
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for x, y in data:
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for places in (places for _ in range(case.epochs) for places in torch.randperm(len(x)).split(case.batch)):
                optimizer.zero_grad()
                case.loss(model(x[places]), y[places]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name].add_(value - weights[name], alpha=len(x))
        for name, value in total.items():
            weights[name].add_(value, alpha=1 / sum(len(x) for x, _ in data))

    take_turns(play)


def shoestring_job(case: Case) -> Any:
    from torch.utils.data import TensorDataset

    from shoestring.core.clients.local import Local
    from shoestring.core.job import Job, default_loss

    clients = {f"client {number}": TensorDataset(x, y) for number, (x, y) in enumerate(case.data())}
    loss = default_loss if not case.text else lambda output, batch: case.loss(output, batch[1])
    return Job(
        model=case.made,
        data=list,
        clients=lambda: clients,
        local=Local(batch=case.batch, lr=RATE, epochs=case.epochs),
        loss=loss,
    )


def engine(case: Case, cores: int) -> None:
    """Shoestring's engine by itself: chunks of devices to updates, and their mean."""
    from shoestring.federated.devices.records import records_of
    from shoestring.federated.model.layout import layout_of
    from shoestring.federated.round import DeviceView, Objective, Order
    from shoestring.federated.simulation.cohort import Engine, choose_method, engine_work

    job = shoestring_job(case)
    devices = sorted(
        (DeviceView(records_of(job, name, data, 0)) for name, data in job.clients().items()),
        key=lambda one: one.records.count,
    )
    model = job.model()
    layout = layout_of(model)
    row, how = layout.row(model), choose_method(job, layout, [one.records for one in devices])
    print(how, file=sys.stderr)
    work = engine_work(Engine(job, layout, how))
    turn = iter(range(1_000_000))

    def play() -> None:
        nonlocal row
        total, weight, number = torch.zeros_like(row), 0.0, next(turn)
        for begin in range(0, len(devices), how.chunk):
            found = work(Order(0, number, row), devices[begin : begin + how.chunk], Objective(job.local))
            total += found.counts.float() @ found.rows
            weight += float(found.counts.sum())
        row = row + total / weight

    take_turns(play)


def whole_round(case: Case, cores: int) -> None:
    """Shoestring as its users run it: choose, order, work, send, combine, advance, in as many processes as there are cores."""
    from shoestring.federated.devices.records import records_of
    from shoestring.federated.model.layout import layout_of
    from shoestring.federated.planning.prepare import several
    from shoestring.federated.playing.plain import plain_round
    from shoestring.federated.playing.play import play
    from shoestring.federated.round import Population, ServerState
    from shoestring.federated.simulation.cohort import Engine, choose_method, engine_work
    from shoestring.federated.simulation.simulated_devices import DeviceWorker, SimulatedDevices

    job = shoestring_job(case)
    clients, model = job.clients(), job.model()
    names, layout = list(clients), layout_of(model)
    how = several(
        choose_method(job, layout, [records_of(job, name, clients[name], 0) for name in names[:3]]), len(names)
    )
    parts = plain_round(layout, job.local, engine_work(Engine(job, layout, how)))
    devices = SimulatedDevices(DeviceWorker(parts, job, clients, 0), how.chunk, cores)
    population, server = Population(len(names), names.__getitem__, len(names)), ServerState(0, 0, layout.row(model))

    def turn() -> None:
        nonlocal server
        server = play(parts, server, devices, population).server

    take_turns(turn)
    devices.close()


def main() -> None:
    name, case, cores = sys.argv[1], CASES[sys.argv[2]], int(sys.argv[3])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(1)
    if name in ("pfl", "flower"):
        import speed_peers

        contestants: dict[str, Callable[[Case, int], None]] = {"pfl": speed_peers.pfl, "flower": speed_peers.flower}
    else:
        contestants = {"loop": loop, "engine": engine, "round": whole_round}
    contestants[name](case, cores)


if __name__ == "__main__":
    main()
