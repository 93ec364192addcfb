"""The privacy ledger of a population: every round that any run released about it, written to disk before the release.

Each released round is one line, with a digest of what was released. Lines are never merged: noise is never drawn twice,
so a round that is played again is another release and counts again. Several runs may share a ledger; each locks the
file while it adds up and writes.

Damage never lowers the epsilon spent. All lines have the same length, a line number and a checksum, so a damaged,
truncated or missing line is noticed. It counts as the most expensive kind of round in the ledger; if no line is
readable, epsilon is infinite. `done` and `lines` are what a run's checkpoint knows of the run and the ledger. Rounds
and lines that the ledger lacks (somebody restored an older copy) count in the same way. There is no protection against
somebody who forges both the ledger and the checkpoints: no key signs them.

Contract: A round of a private federation is in the ledger before anything of it leaves the process, and one that is
played again counts again (tests/privacy/test_ledger.py, tests/federated/test_session.py).
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
from shoestring.core.files.files import append_synced, lock_to_append
from shoestring.core.files.regular import read_regular
from shoestring.privacy.account import EXACT, QUICK, Events, SampledGaussian, check_delta, epsilon_spent

NAME = "privacy.jsonl"  # the default ledger, in the run's folder
WIDTH = 256  # bytes of a line, including the newline
CRC = len(b',"crc":"00000000"}')
LEAST, MOST_NOISE = 1e-3, 1e6  # range of valid noise multipliers
LEAST_RATE = 1e-12  # of sampling: one device of a million million
MOST_LINES = 10**7
MOST_KINDS = 64  # of rounds whose epsilon is composed exactly
BEFORE = {
    "round",
    "digest",
    "multiplier",
    "rate",
    "delta",
}  # keys of a line written by the previous version, whose noise followed from the job's seed


@dataclass(frozen=True)
class ReleasedRound:
    """One line of the ledger: a round that was released."""

    run: str  # random token of the run that released it
    round: int  # from 0
    release: str  # digest of what was released
    multiplier: float  # noise multiplier
    rate: float  # sampling rate
    delta: float  # the same for the whole ledger
    limit: float | None = None  # epsilon that all runs together may spend, if the run stated one
    seeded: bool = False  # the noise follows from a seed, so the round is not private

    @property
    def kind(self) -> SampledGaussian:
        return SampledGaussian(self.multiplier, self.rate)


class PrivacyLedger:
    """The ledger as one run sees it. `done`: rounds that the run's checkpoint has; `lines`: lines that the ledger had
    by then."""

    def __init__(self, path: Path, run: str = "", done: int = 0, lines: int = 0) -> None:
        self.path, self.run, self.done, self.known = path, run, done, lines
        self.entries: tuple[ReleasedRound, ...] = ()
        self.lines = self.damaged = 0
        self.read()

    def read(self) -> None:
        """Read the ledger from disk."""
        try:
            data = read_regular(self.path)
        except FileNotFoundError:
            data = b""
        found = [entry_of(data[start : start + WIDTH]) for start in range(0, len(data), WIDTH)]
        numbers = [number for number, _ in filter(None, found) if number is not None]
        self.entries = tuple(entry for _, entry in filter(None, found))
        self.lines = max(len(found), max(numbers, default=-1) + 1)  # including lines that somebody cut out
        self.damaged = sum(one is None for one in found) + self.lines - len(found)

    @property
    def delta(self) -> float | None:
        """The ledger's delta; None while the ledger is empty."""
        return next((one.delta for one in self.entries), None)

    @property
    def limit(self) -> float | None:
        """Epsilon that all runs together may spend; None if nobody stated a limit."""
        return min((one.limit for one in self.entries if one.limit is not None), default=None)

    @property
    def runs(self) -> int:
        return len({one.run for one in self.entries})

    @property
    def own(self) -> tuple[ReleasedRound, ...]:
        return tuple(one for one in self.entries if one.run == self.run)

    @property
    def lost_rounds(self) -> int:
        """Rounds that are spent but unreadable: damaged lines, missing lines, and rounds of this run without a line. A
        missing round may be one of the damaged lines or not; nobody knows, so both count."""
        rounds = {one.round for one in self.own}
        return self.damaged + max(self.known - self.lines, 0) + sum(number not in rounds for number in range(self.done))

    def spend(self, entry: ReleasedRound, budget: float = inf) -> bool:
        """Write a round to the ledger; it is on disk when this returns True.

        Returns False, and writes nothing, if the round would exceed the run's budget or the population's limit (others
        may have spent meanwhile). Then nothing of the round may be released.
        """
        with lock_to_append(self.path) as file:
            self.read()
            if self.would_exceed(entry, budget):
                return False
            size = os.fstat(file).st_size
            torn = (
                b" " * (-size % WIDTH - 1) + b"\n" if size % WIDTH else b""
            )  # a line that a kill cut off is padded and kept: it counts as damaged
            # Numbered after all lines that are known, so that those which are missing are missed by everybody from now on
            append_synced(file, torn + line_of(max(-(-size // WIDTH), self.lines, self.known), entry))
        self.read()
        self.known = self.lines
        return True

    def check(self, entry: ReleasedRound) -> None:
        """Refuse a round that does not fit this ledger: another delta, seeded noise beside secret noise, or a raised
        limit."""
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
        """Epsilon spent by all runs. By default on the quick grid: never less than `exactly`, and more by about 1e-5 of
        it."""
        return self.epsilon_of(self.entries, delta, exactly)

    def own_epsilon(self, delta: float | None = None, exactly: bool = False) -> float:
        """Epsilon spent by this run."""
        return self.epsilon_of(self.own, delta, exactly)

    def epsilon_of(self, entries: tuple[ReleasedRound, ...], delta: float | None, exactly: bool) -> float:
        delta = self.delta if delta is None else delta
        if delta is None:
            return inf if self.lost_rounds else 0.0
        return self.worst_epsilon(entries, delta, EXACT if exactly else QUICK)

    def would_exceed(self, entry: ReleasedRound, budget: float, rounds: int = 1) -> bool:
        """Whether so many more rounds exceed this run's budget, or the limit of all runs together."""
        self.check(entry)
        limit = min((one for one in (self.limit, entry.limit) if one is not None), default=inf)
        more = (entry,) * rounds
        return self.exceeds((*self.own, *more), entry.delta, budget) or self.exceeds(
            (*self.entries, *more), entry.delta, limit
        )

    def exceeds(self, entries: tuple[ReleasedRound, ...], delta: float, budget: float) -> bool:
        return (
            budget < inf
            and self.worst_epsilon(entries, delta, QUICK) > budget
            and self.worst_epsilon(entries, delta, EXACT) > budget
        )

    def worst_epsilon(self, entries: Iterable[ReleasedRound], delta: float, interval: float) -> float:
        """Epsilon if all lost rounds were of the most expensive kind in the ledger."""
        counts = count_kinds(entries)
        if not self.lost_rounds:
            return epsilon_spent(tuple(counts.items()), delta, interval)
        if not self.entries or self.lost_rounds > MOST_LINES:
            return inf
        cases: list[Events] = [
            tuple((counts + Counter({kind: self.lost_rounds})).items())
            for kind in most_expensive(count_kinds(self.entries))
        ]
        return max(epsilon_spent(case, delta, interval) for case in cases)


def count_kinds(entries: Iterable[ReleasedRound]) -> Counter[SampledGaussian]:
    """How many rounds there are of each kind.

    Of more than MOST_KINDS, which would take minutes to compose, neighbours count as one kind with the least noise and
    the highest rate of them, so epsilon is larger than the truth.
    """
    counts = Counter(one.kind for one in entries)
    kinds = sorted(counts, key=lambda one: (one.rate, one.multiplier))
    size = -(-len(kinds) // MOST_KINDS)
    if size < 2:
        return counts
    found: Counter[SampledGaussian] = Counter()
    for begin in range(0, len(kinds), size):
        some = kinds[begin : begin + size]
        joined = SampledGaussian(min(one.multiplier for one in some), max(one.rate for one in some))
        found[joined] += sum(counts[one] for one in some)
    return found


def most_expensive(kinds: Iterable[SampledGaussian]) -> list[SampledGaussian]:
    """The kinds that could be the most expensive: no other one has both less noise and a higher rate.

    >>> most_expensive([SampledGaussian(1.0, 0.1), SampledGaussian(2.0, 0.1), SampledGaussian(3.0, 0.5)])
    [SampledGaussian(multiplier=1.0, rate=0.1), SampledGaussian(multiplier=3.0, rate=0.5)]
    """
    found: list[SampledGaussian] = []
    for one in sorted(set(kinds), key=lambda one: (one.multiplier, -one.rate)):
        if not found or one.rate > found[-1].rate:
            found.append(one)
    return found


def line_of(number: int, entry: ReleasedRound) -> bytes:
    """An entry as a line of WIDTH bytes."""
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
        values = json.loads(head + b"}")
        if set(values) == BEFORE:
            values = {"run": "", "release": values.pop("digest"), "seeded": True, **values}
        number = values.pop("line", None)
        found = ReleasedRound(**values)
        return (number, found) if is_usable(number, found) else None
    except (TypeError, ValueError, RecursionError):
        return None


def is_usable(number: object, entry: ReleasedRound) -> bool:
    """Whether the values of a line with a good checksum are ones that we could have written. It checks ranges only,
    which is quick."""
    check_delta(entry.delta)
    figures = (entry.multiplier, entry.rate, entry.delta, *(() if entry.limit is None else (entry.limit,)))
    return (
        not any(isinstance(one, bool) for one in (number, entry.round, *figures))
        and LEAST <= entry.kind.multiplier <= MOST_NOISE
        and entry.rate >= LEAST_RATE
        and (number is None or (isinstance(number, int) and 0 <= number < MOST_LINES))
        and isinstance(entry.round, int)
        and 0 <= entry.round < MOST_LINES
        and isinstance(entry.run, str)
        and isinstance(entry.release, str)
        and isinstance(entry.seeded, bool)
        and (entry.limit is None or 0 < entry.limit < inf)
    )
