"""A test finds what it would find alone: the same draws whatever ran before it, and nothing measured by another session."""

from __future__ import annotations

import json
import os
import pwd
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoestring.core.costs.hardware import Hardware
from shoestring.core.files.codec import to_json
from shoestring.measure.cache import cache_folder
from shoestring.measure.probe import known_hardware
from shoestring.training.execution.job_planning import in_group
from tests.machine import figures


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def as_read(machine: Hardware) -> Any:
    return json.loads(json.dumps(to_json(machine)))


@pytest.fixture(scope="module")
def drawn() -> list[float]:
    return draw()


@pytest.fixture
def drawn_again(drawn: list[float]) -> list[float]:
    return draw()


@pytest.mark.parametrize("before", [draw, list])
def test_what_ran_before_changes_no_draw(
    before: Callable[[], object], drawn: list[float], drawn_again: list[float]
) -> None:
    assert draw() == drawn == drawn_again
    before()


def test_measurements_of_other_sessions_are_not_there() -> None:
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert own not in cache_folder().parents and cache_folder().parent.parent == Path(os.environ["HOME"])


def test_the_machine_is_told_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.measure.probe.measure_hardware", lambda dtypes: pytest.fail("measured"))
    monkeypatch.setattr("shoestring.measure.probe.glance", lambda device: pytest.fail("compared"))
    assert as_read(known_hardware()) == as_read(figures(torch.get_num_threads()))


@pytest.mark.parametrize(("world", "here"), [(2, 2), (4, 4), (4, 2), (3, 1)])
def test_workers_of_a_group_are_told_how_fast_they_talk(world: int, here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.training.execution.job_planning.run_worker", lambda *given: pytest.fail("measured"))
    assert in_group(known_hardware(), world, here).speeds is not None
