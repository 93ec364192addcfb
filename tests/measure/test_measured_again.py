"""The machine is measured in several rounds and the best count; how busy it was is kept; and that is believed while a look at it agrees."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.measure import probe
from shoestring.measure.cache import read_cached, write_cached
from shoestring.measure.probe import (
    MORE_ROUNDS,
    QUIET,
    ROUNDS,
    ProbeRound,
    best_of,
    busy_share,
    cached_hardware,
    combine_measurements,
    doubt,
    remember,
    rounds,
)

QUIETLY = ProbeRound(0.05, flops=2e11, disk=2e9, direct=4e9, moving=5e-11, small=(3e-10, 1e-10), huge=(2e-10, 1e-10))
BUSILY = ProbeRound(0.9, flops=4e10, disk=1e9, direct=1e9, moving=9e-11, small=(5e-10, 2e-10), huge=(46e-10, 2e-10))
KEPT = Hardware(
    device=probe.device_here(),
    flops=1e11,
    disk=1e9,
    direct=1e9,
    moving=5e-11,
    fault=2e-10,
    huge_fault=1e-10,
    when=1000.0,
    tries=3,
    busy=0.05,
)


def counted(given: Sequence[ProbeRound]) -> list[ProbeRound]:
    """The rounds that are measured on a machine that would give these one after the other."""
    each = iter([*given, *[given[-1]] * 99])
    return rounds("cpu", lambda device: next(each), pause=0.0)


def test_a_quiet_machine_is_measured_in_a_few_rounds_and_a_busy_one_in_more() -> None:
    assert len(counted([QUIETLY])) == ROUNDS
    assert len(counted([BUSILY])) == MORE_ROUNDS > ROUNDS + 1
    assert len(counted([BUSILY] * ROUNDS + [QUIETLY])) == ROUNDS + 1  # that was the moment
    assert len(counted([QUIETLY, BUSILY, BUSILY])) == ROUNDS


def test_what_the_quietest_moment_gave_is_what_counts() -> None:
    found = best_of([BUSILY, QUIETLY, BUSILY], now=7.0)
    assert (found.flops, found.disk, found.direct, found.moving) == (2e11, 2e9, 4e9, 5e-11)
    assert found.fault == pytest.approx(2e-10) and found.huge_fault == pytest.approx(1e-10)
    assert (found.when, found.tries, found.busy) == (7.0, 3, 0.05)


def test_huge_pages_that_look_dearer_than_small_ones_are_not_believed_of_a_busy_machine() -> None:
    busy = best_of([BUSILY] * 3, now=7.0)
    assert busy.busy > QUIET and busy.huge_fault == busy.fault == pytest.approx(3e-10)
    quiet = best_of([replace(BUSILY, busy=0.0)] * 3, now=7.0)  # there it is a fact: the kernel has to look for room
    assert quiet.huge_fault == pytest.approx(44e-10)


def test_one_round_that_was_disturbed_makes_no_memory_free_of_charge() -> None:
    disturbed = replace(QUIETLY, small=(3e-10, 9e-10))  # the second touch took longer than the first
    assert best_of([QUIETLY, disturbed], now=7.0).fault == pytest.approx(2e-10)


@pytest.mark.parametrize(
    ("flops", "busy", "kept_busy", "later", "said"),
    [
        (1.0e11, 0.0, 0.05, 1e6, ""),
        (1.2e11, 0.0, 0.05, 1e6, ""),
        (1.5e11, 0.0, 0.05, 1e6, "1.5 times as fast"),
        (1.5e11, 0.9, 0.05, 0.0, "1.5 times as fast"),  # busy now and faster still: then it was worse
        (0.4e11, 0.0, 0.05, 1e6, "2.5 times as slow"),
        (0.4e11, 0.9, 0.05, 1e6, ""),  # others are at work now: that says nothing
        (1.0e11, 0.1, 0.7, 1e6, "others had 70% of the cores when it was measured, and have 10% now"),
        (1.0e11, 0.6, 0.7, 1e6, ""),  # as busy as it was
        (1.0e11, 0.1, 0.7, 5.0, ""),  # just now: not at every command
        (1.0e11, 0.1, 0.7, -5.0, "others had 70%"),  # the clock was put back
    ],
)
def test_what_is_kept_is_doubted_when_a_look_disagrees(
    flops: float, busy: float, kept_busy: float, later: float, said: str
) -> None:
    found = doubt(replace(KEPT, busy=kept_busy), flops, busy, KEPT.when + later)
    assert said in found and bool(found) == bool(said)


def test_a_quieter_measurement_replaces_another_and_of_a_busier_one_only_what_is_better_counts() -> None:
    quiet = replace(KEPT, flops=5e10, fault=9e-10, when=2000.0)
    assert (
        combine_measurements(None, quiet) == quiet == combine_measurements(KEPT, quiet)
    )  # slower, and known from a quiet moment
    busy = replace(
        KEPT, flops=2e11, disk=5e8, direct=5e8, moving=9e-11, fault=1e-10, huge_fault=9e-10, when=2000.0, busy=0.8
    )
    both = combine_measurements(replace(KEPT, links={"2 near": [1e-9, 1e-4, 0.0]}), busy)
    assert (both.flops, both.disk, both.direct, both.moving, both.fault, both.huge_fault) == (
        2e11,
        1e9,
        1e9,
        5e-11,
        1e-10,
        1e-10,
    )
    assert (both.when, both.tries, both.busy) == (1000.0, 6, 0.05) and both.links


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(probe, "BELIEVED", set())
    return tmp_path


def test_a_kept_machine_is_looked_at_once_a_process_and_measured_again_if_that_disagrees(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    speed = 1e11

    def measured(dtypes: bool) -> Hardware:
        done.append("measured")
        return replace(KEPT, flops=speed)

    def glance(device: str) -> tuple[float, float]:
        done.append("looked")
        return speed, 0.0

    def asked(anew: bool) -> tuple[float, list[str]]:
        """What is known, and what was done to know it; anew: by another process."""
        done.clear()
        if anew:
            probe.BELIEVED.clear()
        return probe.known_hardware().flops, list(done)

    monkeypatch.setattr(probe, "measure_hardware", measured)
    monkeypatch.setattr(probe, "glance", glance)
    assert asked(anew=True) == (1e11, ["measured"])  # nothing was kept
    assert asked(anew=False) == (1e11, [])
    assert asked(anew=True) == (1e11, ["looked"])
    speed = 2e11
    assert asked(anew=False) == (1e11, [])  # within one process nothing changes
    assert asked(anew=True) == (2e11, ["looked", "measured"])
    assert asked(anew=True) == (2e11, ["looked"])  # and that is kept


def test_a_file_of_an_older_version_is_measured_again(home: Path) -> None:
    remember(KEPT)
    assert cached_hardware() == KEPT
    old = {name: value for name, value in asdict(KEPT).items() if name not in ("when", "tries", "busy")}
    probe.hardware_file().write_text(json.dumps(old))
    assert cached_hardware() is None
    write_cached(probe.hardware_file(), old)  # sealed, and without what it must say
    assert cached_hardware() is None
    write_cached(probe.hardware_file(), asdict(KEPT) | {"colour": "blue"})
    assert cached_hardware() is None
    remember(replace(KEPT, device="another"))  # GPUs that were hidden since, or came
    assert cached_hardware() is None


def test_a_damaged_file_is_as_good_as_none(home: Path) -> None:
    remember(KEPT)
    whole, file, draw = probe.hardware_file().read_bytes(), probe.hardware_file(), Random(0)
    for _ in range(2000):
        place = draw.randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :])
        assert cached_hardware() in (None, KEPT)  # the same, where the flip made another space
    for text in (b"", b"{", b"[]", b"null", b"7", b'"x"', b'{"sha256": 3}', b"[" * 100_000, whole[:-9], b"\xff\xfe"):
        file.write_bytes(text)
        assert cached_hardware() is None


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "kept"
    if kind == "pipe":
        os.mkfifo(there)
    elif kind == "device":
        there.symlink_to("/dev/zero")
    elif kind == "folder":
        there.mkdir()
    assert read_cached(there, dict) is None


def test_a_kept_file_is_there_whole_or_not_at_all_and_drafts_of_the_dead_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "kept.json"
    write_cached(there, {"a": 1})
    (tmp_path / "kept.json.tmp-1").write_text('{"a"')
    monkeypatch.setattr(Path, "rename", lambda *given: (_ for _ in ()).throw(OSError(28, "full")))
    write_cached(there, {"a": 2})  # could not be finished, and nobody is troubled with it
    assert read_cached(there, dict) == {"a": 1}
    monkeypatch.undo()
    write_cached(there, {"a": 3})
    assert read_cached(there, dict) == {"a": 3} and [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_a_home_that_can_not_be_written_to_troubles_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_cached(tmp_path / "file" / "kept.json", {"a": 1})
    assert read_cached(tmp_path / "file" / "kept.json", dict) is None


STAT = """cpu  999 0 999 999 0 0 0 0 0 0
cpu0 100 0 100 500 100 0 0 200 0 0
cpu1 9000 0 9000 0 0 0 0 0 0 0
intr 1 2 3
"""


def test_how_busy_others_are_is_read_of_the_cores_that_we_may_use_and_without_what_we_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: STAT)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: os.times_result((0.5, 0.25, 0.15, 0.1, 99.0)))
    assert probe.core_seconds() == (
        pytest.approx(3.0),
        pytest.approx(10.0),
    )  # user, system and stolen, but one second of our own
    assert busy_share((0.0, 0.0), (3.0, 10.0)) == pytest.approx(0.3)
    assert busy_share((3.0, 10.0), (3.0, 10.0)) == 0.0 and busy_share((3.0, 10.0), (2.9, 11.0)) == 0.0
