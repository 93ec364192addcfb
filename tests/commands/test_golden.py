"""What a program reads of our commands with --json stays: every key that was there is there, of the same kind."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.golden import COMMANDS, HERE, VERSIONS, answers, lost, said_in

OPEN = {
    "dtypes",
    "environment",
    "links",
    "missing",
    "runners_up",
    "more_memory",
    "refused",
}  # what is in them depends on the machine


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every command says today, one after the other in one folder."""
    place = tmp_path_factory.mktemp("golden")
    shutil.copy(HERE / "job.py", place)
    return said_in(place)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_an_answer_is_still_there(name: str, version: str, said: dict[str, Any]) -> None:
    before = {key: value for key, value in answers(version)[name].items() if key not in OPEN}
    assert lost(before, said[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_weights_are_those_that_earlier_versions_trained(version: str, said: dict[str, Any]) -> None:
    assert said["train"]["weights_sha256"] == (HERE / version / "weights_sha256").read_text().strip()


@pytest.mark.slow
def test_every_worker_of_a_group_has_its_own_figures_and_they_are_right(said: dict[str, Any]) -> None:
    found = said["train by a group"]["workers"]
    assert [one["rank"] for one in found] == [0, 1] and all(one["predicted"] == one["measured"] for one in found)
