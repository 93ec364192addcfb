"""OffloadActivations meets a disk that is full, or a directory that is not there."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from shoestring import Mistake
from shoestring.data.feed import Feed
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from tests.models import job, seeded


def test_a_full_disk_is_told_of(tmp_path: Path) -> None:
    made = job("chain")
    run = build_run(made, (OffloadActivations(to=str(tmp_path)),), seeded(made))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(Mistake, match=r"spilling activations failed.*free space on the disk"):
            next(steps(run, Feed(made)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    made = job("chain")
    with pytest.raises(Mistake, match="there is no such directory"):
        build_run(made, (OffloadActivations(to=str(tmp_path / "none")),), seeded(made))
