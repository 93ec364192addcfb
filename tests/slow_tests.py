"""Which tests `make test` leaves to `make check`: those that took longest when they were measured, room by room.

    make slow-tests     measures all of them on a quiet machine, and writes slow.txt

Every room has about a minute of `make test`, and what rooms share has two. Of a room that takes longer the longest tests are listed
in slow.txt, and conftest marks these as slow. The cheapest case of a test stays, unless it takes longer than `LONG`, and so does the
cheapest test of a file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

LISTED = Path(__file__).parent / "slow.txt"
PROCESSES = 2  # that `make test` runs
ROOMS = ("training", "federated", "compression", "serving")
SECONDS, SHARED_SECONDS = 52, 95  # of a room, and of everything else
LONG = 4.0  # seconds of a case that need not stay
SHORT = 0.3  # seconds of a test that is never listed


def listed() -> frozenset[str]:
    """The node ids in slow.txt."""
    return frozenset(line for line in LISTED.read_text(encoding="utf-8").splitlines() if line)


def room_of(test: str) -> str:
    parts = Path(test.partition("::")[0]).parts
    return next((room for room in ROOMS if len(parts) > 1 and parts[1] == room), "shared")


def function_of(test: str) -> str:
    return test.partition("[")[0]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def those_that_stay(seconds: Mapping[str, float]) -> set[str]:
    """The cheapest case of every test that is not long, and the cheapest test of every file.

    >>> sorted(those_that_stay({"a::x[1]": 9.0, "a::x[2]": 1.0, "a::y": 8.0, "b::z[1]": 7.0, "b::z[2]": 6.0}))
    ['a::x[2]', 'b::z[2]']
    """
    cheapest: dict[str, str] = {}
    for test in sorted(seconds, key=lambda one: seconds[one], reverse=True):
        cheapest[file_of(test)] = test
        if seconds[test] <= LONG:
            cheapest[function_of(test)] = test
    return set(cheapest.values())


def too_long(seconds: Mapping[str, float], most: float) -> set[str]:
    """Tests to leave out, longest first, until the others take at most so many seconds.

    >>> sorted(too_long({"a::x": 5.0, "a::y": 6.0, "a::z": 1.0}, most=7.0))
    ['a::y']
    """
    stay, out, total = those_that_stay(seconds), set(), sum(seconds.values())
    for test in sorted(seconds, key=lambda one: seconds[one], reverse=True):
        if total <= most or seconds[test] < SHORT:
            break
        if test not in stay:
            out.add(test)
            total -= seconds[test]
    return out


def measured_seconds(lines: Iterable[str]) -> dict[str, float]:
    """What every test took, with what was prepared for it."""
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        test, seconds = json.loads(line)
        found[test] += seconds
    return dict(found)


def write(file: Path) -> None:
    seconds = measured_seconds(file.read_text(encoding="utf-8").splitlines())
    rooms: dict[str, dict[str, float]] = defaultdict(dict)
    for test, took in seconds.items():
        if test.startswith("tests/"):  # examples in docstrings always run
            rooms[room_of(test)][test] = took
    out: set[str] = set()
    for room, own in sorted(rooms.items()):
        left = too_long(own, PROCESSES * (SHARED_SECONDS if room == "shared" else SECONDS))
        stays = sum(took for test, took in own.items() if test not in left)
        print(
            f"{room}: {len(left)} of {len(own)} tests are slow; {sum(own.values()):.0f} -> {stays:.0f} s of a process"
        )
        out |= left
    LISTED.write_text("".join(f"{test}\n" for test in sorted(out)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
