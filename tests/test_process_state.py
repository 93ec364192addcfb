"""A call of the library leaves the process as it found it, and what a script draws between steps changes nothing of a training."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.core.running import random_state
from shoestring.measure.instructions import VARIABLE
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from tests.federated.toys import toy_job

FILE = """
import random, warnings
import numpy, torch
from torch import nn
from shoestring import Job

torch.manual_seed(5), random.seed(5), numpy.random.seed(5)

def job(width: int = 8) -> Job:
    x = torch.randn(4, width)
    return Job(model=lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, 3)),
               data=lambda: [(x, torch.zeros(4, dtype=torch.long))] * 3, steps=4)
"""


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8) + float(np.random.rand()) + random.random(), torch.tensor(number % 3)


def net() -> nn.Module:
    with random_state.fork_rng():
        return made_net()


def made_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3))


def job(**settings: Any) -> Job:
    held_out = [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))]
    return Job(
        **{"model": made_net, "data": Samples, "held_out": lambda: held_out, "every": 2, "batch": 4, "steps": 6}
        | settings
    )


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def abandoned(**how: Any) -> None:
    """A training of which only three steps are asked for."""
    for _ in islice(shoestring.train(job(), **how), 3):
        pass


def failed() -> None:
    def broken(output: Any, batch: Any) -> Tensor:
        raise ValueError("of the job")

    with pytest.raises(Exception, match="of the job"):
        list(shoestring.train(job(loss=broken)))


def compressed(folder: Path) -> None:
    vectors = [(torch.randn(16, 8, generator=torch.Generator()), torch.zeros(16, dtype=torch.long)) for _ in range(8)]
    shoestring.compress(
        job(data=lambda: vectors, model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))),
        folder / "small",
        use=["Quantize(bits=8)"],
        samples=32,
    )
    shoestring.load(folder / "small", model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)))


# Every function of the library: what it is called with, a folder of its own given
CALLS: dict[str, Callable[[Path], object]] = {
    "plan": lambda folder: shoestring.plan(job()),
    "plan of a file": lambda folder: shoestring.plan(folder / "mine.py"),
    "train": lambda folder: list(shoestring.train(job())),
    "train of a file": lambda folder: list(shoestring.train(folder / "mine.py", (Checkpoint(every=1),))),
    "train, never begun": lambda folder: shoestring.train(folder / "mine.py"),
    "train a model": lambda folder: list(shoestring.train(job(), (Checkpoint(every=1),), net())),
    "train in a run": lambda folder: list(shoestring.train(job(), run=folder / "run")),
    "train with processes for data": lambda folder: list(shoestring.train(job(workers=1), run=folder / "run")),
    "train half-way": lambda folder: abandoned(),
    "train half-way in a run": lambda folder: abandoned(run=folder / "run"),
    "train, and it fails": lambda folder: failed(),
    "fit": lambda folder: shoestring.fit(net(), loss, [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))] * 3),
    "verify": lambda folder: shoestring.verify(job(), (Checkpoint(every=1),), 2),
    "federate": lambda folder: shoestring.federate(toy_job(), rounds=2, per_round=4, processes=2),
    "compress and load": compressed,
    "distill": lambda folder: list(shoestring.distill(folder / "mine.py", peers=2, steps=2)),
}


def draws() -> list[float]:
    """The next numbers of every global generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def own_files() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # of the listing itself
            continue
    return found


def children() -> list[str]:
    return [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text(encoding="utf-8").split()
    ]


def state() -> dict[str, Any]:
    """Everything of a process that a call could change for those after it."""
    loggers = {
        name: logging.getLogger(name)
        for name in ("", "torch", "torch.distributed.elastic", "shoestring", "py.warnings")
    }
    return {
        "open files": own_files(),
        "threads": [one.name for one in threading.enumerate()],
        "child processes": children(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (
            sys.excepthook,
            threading.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            sys.gettrace(),
            sys.getprofile(),
        ),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": {
            name: (list(one.handlers), one.level, one.propagate, one.disabled) for name, one in loggers.items()
        },
        "torch": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
            torch.get_float32_matmul_precision(),
            torch.is_anomaly_enabled(),
            torch.distributed.is_initialized(),
        ),
        "environment": {
            name: value for name, value in os.environ.items() if name not in (VARIABLE, "PYTEST_CURRENT_TEST")
        },
        "folder": os.getcwd(),
        "path": [
            one for one in sys.path if not one.startswith(str(Path(tempfile.gettempdir()).parent))
        ],  # job files stay
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "files here": sorted(os.listdir()),
        "temporary files": sorted(name for name in os.listdir(tempfile.gettempdir())),
    }


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a script that has a folder for temporary files, handlers and hooks of its own, and draws."""
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    threads, before = (
        torch.get_num_threads(),
        {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)},
    )
    for number in before:
        signal.signal(number, lambda number, frame: None)
    torch.set_num_threads(2)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_found_it(name: str, script: Path) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    first, again = script / "first", script / "again"
    for folder in (first, again):
        folder.mkdir()
        (folder / "mine.py").write_text(FILE, encoding="utf-8")
    CALLS[name](first)  # what is imported then stays
    gc.collect()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    torch.set_num_threads(2)
    before = state()
    CALLS[name](again)
    gc.collect()
    after = state()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}
    assert draws() == expected


def test_the_first_plan_that_is_printed_draws_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shoestring.plan(job(), use=[])
    for name in [one for one in sys.modules if one.partition(".")[0] == "rich" or one == "shoestring.show.rich_parts"]:
        monkeypatch.delitem(sys.modules, name)  # importing rich draws
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert str(plan) and "rich.style" in sys.modules
    assert draws() == expected


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a run"])
@pytest.mark.parametrize("own_model", [False, True], ids=["the job's model", "the script's model"])
def test_what_a_script_draws_between_steps_and_what_training_draws_are_apart(
    kept: bool, own_model: bool, tmp_path: Path
) -> None:
    def losses(name: str, between: Callable[[], object]) -> list[float]:
        found = []
        for step in shoestring.train(job(), (), half() if own_model else None, run=tmp_path / name if kept else None):
            found.append(step.loss)
            between()
        return found

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws() for _ in range(6)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn: list[list[float]] = []
    quiet = losses("quiet", lambda: None)
    assert losses("drawing", lambda: drawn.append(draws())) == quiet and drawn == expected
    assert losses("seeding", lambda: (random.seed(9), np.random.seed(9), torch.manual_seed(9))) == quiet


def test_a_run_that_is_left_goes_on_with_the_same_bits_whatever_the_script_drew(tmp_path: Path) -> None:
    whole = [step.loss for step in shoestring.train(job(), run=tmp_path / "whole")]
    parts = []
    for _ in range(2):
        for step in islice(shoestring.train(job(), run=tmp_path / "parts"), 3):
            parts.append(step.loss)
            draws()
    assert parts == whole


def test_a_training_in_a_script_follows_from_the_seed() -> None:
    first, again, other = ([step.loss for step in shoestring.train(job(), (), half(), seed=seed)] for seed in (1, 1, 2))
    assert first == again != other


def half() -> nn.Module:
    model = net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model
