"""The privacy ledger of a population: what has been released about it, by any run, on disk before it is released.

A line a released round, with the digest of what was released. No line is ever merged with another: noise is never drawn twice, so a round
that is played again is another release, and counts again. Several runs may write at once; each holds the file while it adds up and writes.

Nothing that was spent can be forgotten as long as anything of it is left. Every line is as long as the others, has its number and a
checksum, so a line that is damaged, was cut off or is missing is counted, as a round of the kind that costs most among those known; if
none is known, epsilon is infinite. `done` and `lines` are what a run knows of itself and of the ledger by its checkpoint: rounds and
lines that the ledger lacks (somebody put an older copy back) count in the same way. Against somebody who writes a false ledger and false
checkpoints there is no key to check with, and no protection.

Contract: A round of a private federation is in the ledger before anything of it leaves the process, and one that is
played again counts again (tests/privacy/test_spending.py, tests/federated/test_kill.py).
"""

from __future__ import annotations

import json
import os
from binascii import crc32
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.files import append_synced, held_to_append
from shoestring.core.regular import read_regular
from shoestring.privacy.account import EXACT, QUICK, Events, SampledGaussian, check_delta, spent

NAME = "privacy.jsonl"  # in a run's folder, if no other ledger is named
WIDTH = 256  # bytes of a line, with its end
CRC = len(b',"crc":"00000000"}')
LEAST, MOST_NOISE = 1e-3, 1e6  # no noise is smaller or larger
MOST_LINES = 10**7
BEFORE = {
    "round",
    "digest",
    "multiplier",
    "rate",
    "delta",
}  # of a line of the version before, whose noise followed from the job's seed


@dataclass(frozen=True)
class ReleasedRound:
    """A round that was released."""

    run: str  # which run released it, by what it drew as it began
    round: int  # from 0
    release: str  # digest of what was released
    multiplier: float
    rate: float
    delta: float  # of the whole ledger
    limit: float | None = None  # epsilon that the population may spend in all, as it was stated then
    seeded: bool = False  # its noise follows from a seed: nothing of it is private

    @property
    def kind(self) -> SampledGaussian:
        return SampledGaussian(self.multiplier, self.rate)


class Spending:
    """The ledger, as one run sees it. `done`: rounds that the run is known to have done; `lines`: that it knew the ledger to have."""

    def __init__(self, path: Path, run: str = "", done: int = 0, lines: int = 0) -> None:
        self.path, self.run, self.done, self.known = path, run, done, lines
        self.entries: tuple[ReleasedRound, ...] = ()
        self.lines = self.damaged = 0
        self.read()

    def read(self) -> None:
        """Take the ledger as it is on disk."""
        try:
            data = read_regular(self.path)
        except FileNotFoundError:
            data = b""
        found = [entry_of(data[start : start + WIDTH]) for start in range(0, len(data), WIDTH)]
        numbers = [number for number, _ in filter(None, found) if number is not None]
        self.entries = tuple(entry for _, entry in filter(None, found))
        self.lines = max(len(found), max(numbers, default=-1) + 1)  # with those that somebody cut out
        self.damaged = sum(one is None for one in found) + self.lines - len(found)

    @property
    def delta(self) -> float | None:
        """Of the first entry; none if there is none."""
        return next((one.delta for one in self.entries), None)

    @property
    def limit(self) -> float | None:
        """Epsilon that the population may spend in all; None if nobody stated one."""
        return min((one.limit for one in self.entries if one.limit is not None), default=None)

    @property
    def runs(self) -> int:
        return len({one.run for one in self.entries})

    @property
    def own(self) -> tuple[ReleasedRound, ...]:
        return tuple(one for one in self.entries if one.run == self.run)

    @property
    def lost(self) -> int:
        """Rounds that were spent, or may have been, and of which the ledger does not say what. One that is missing may be one that is
        damaged, or another: nobody knows, so both count."""
        rounds = {one.round for one in self.own}
        return self.damaged + max(self.known - self.lines, 0) + sum(number not in rounds for number in range(self.done))

    def spend(self, entry: ReleasedRound, budget: float = inf) -> bool:
        """Note a round; when this returns it is on disk. False if the run's budget or the population's would be exceeded, by what others
        have spent meanwhile: then nothing is noted, and nothing of the round may be released."""
        with held_to_append(self.path) as file:
            self.read()
            if self.would_exceed(entry, budget):
                return False
            size = os.fstat(file).st_size
            torn = (
                b" " * (-size % WIDTH - 1) + b"\n" if size % WIDTH else b""
            )  # what a kill cut off stays, as a line that counts
            append_synced(file, torn + line_of(max(-(-size // WIDTH), self.lines), entry))
        self.read()
        self.known = self.lines
        return True

    def check(self, entry: ReleasedRound) -> None:
        """Refuse what does not belong into this ledger."""
        check_delta(entry.delta)
        if self.delta not in (None, entry.delta):
            raise Mistake(
                f"--delta {entry.delta:g}, and {self.path} is kept for {self.delta:g}: one ledger has one delta, because epsilon "
                f"means nothing without it; give --delta {self.delta:g}, or another --ledger or --run"
            )
        if any(one.seeded != entry.seeded for one in self.entries):
            raise Mistake(
                f"{self.path} has rounds whose noise {'is' if entry.seeded else 'is not'} secret, and this run's noise "
                f"{'follows from a seed' if entry.seeded else 'is'}: such a sum is worth nothing; give another --ledger or --run"
            )
        if entry.limit is not None and self.limit is not None and entry.limit > self.limit:
            raise Mistake(
                f"--ledger-epsilon {entry.limit:g}, and {self.path} was promised to stay within {self.limit:g}: a promise that "
                f"was made is not made larger; leave the flag out"
            )

    def epsilon(self, delta: float | None = None, exactly: bool = False) -> float:
        """What all runs have spent. It is on the quick grid, and no less than `exactly`, whose difference is about 1e-5 of it."""
        return self.epsilon_of(self.entries, delta, exactly)

    def own_epsilon(self, delta: float | None = None, exactly: bool = False) -> float:
        """What this run has spent."""
        return self.epsilon_of(self.own, delta, exactly)

    def epsilon_of(self, entries: tuple[ReleasedRound, ...], delta: float | None, exactly: bool) -> float:
        delta = self.delta if delta is None else delta
        if delta is None:
            return inf if self.lost else 0.0
        return self.most(entries, delta, EXACT if exactly else QUICK)

    def would_exceed(self, entry: ReleasedRound, budget: float, rounds: int = 1) -> bool:
        """Whether after so many such rounds this run has spent more than its budget, or all runs more than the population may."""
        self.check(entry)
        limit = min((one for one in (self.limit, entry.limit) if one is not None), default=inf)
        more = (entry,) * rounds
        return self.exceeds((*self.own, *more), entry.delta, budget) or self.exceeds(
            (*self.entries, *more), entry.delta, limit
        )

    def exceeds(self, entries: tuple[ReleasedRound, ...], delta: float, budget: float) -> bool:
        return budget < inf and self.most(entries, delta, QUICK) > budget and self.most(entries, delta, EXACT) > budget

    def most(self, entries: Iterable[ReleasedRound], delta: float, interval: float) -> float:
        """Epsilon, with lost rounds of that kind by which it becomes largest."""
        counts = Counter(one.kind for one in entries)
        if not self.lost:
            return spent(tuple(counts.items()), delta, interval)
        if not self.entries or self.lost > MOST_LINES:
            return inf
        kinds = {one.kind for one in self.entries}
        ways: list[Events] = [tuple((counts + Counter({kind: self.lost})).items()) for kind in kinds]
        return max(spent(way, delta, interval) for way in ways)


def line_of(number: int, entry: ReleasedRound) -> bytes:
    """A line of WIDTH bytes."""
    head = json.dumps({"line": number} | asdict(entry), separators=(",", ":")).encode()[:-1]
    room = WIDTH - len(head) - CRC - 1
    if room < 0:
        raise Mistake(
            f"an entry of the privacy ledger with {len(head)} bytes: there is room for {WIDTH - CRC - 1}; give shorter digests"
        )
    head += b" " * room
    return head + b',"crc":"%08x"}\n' % crc32(head)


def entry_of(line: bytes) -> tuple[int | None, ReleasedRound] | None:
    """The number and the entry of a line; None if it is damaged."""
    head = line[: -CRC - 1]
    if len(line) != WIDTH or line[-CRC - 1 :] != b',"crc":"%08x"}\n' % crc32(head):
        return None
    try:
        told = json.loads(head + b"}")
        if set(told) == BEFORE:
            told = {"run": "", "release": told.pop("digest"), "seeded": True, **told}
        number = told.pop("line", None)
        found = ReleasedRound(**told)
        return (number, found) if is_usable(number, found) else None
    except (TypeError, ValueError):
        return None


def is_usable(number: object, entry: ReleasedRound) -> bool:
    """Whether a line whose checksum fits says something that we could have written; the numbers alone, so that nothing takes long."""
    check_delta(entry.delta)
    return (
        LEAST <= entry.kind.multiplier <= MOST_NOISE
        and (number is None or (isinstance(number, int) and 0 <= number < MOST_LINES))
        and isinstance(entry.round, int)
        and isinstance(entry.run, str)
        and isinstance(entry.release, str)
        and isinstance(entry.seeded, bool)
        and (entry.limit is None or 0 < entry.limit < inf)
    )
