"""The privacy ledger of a run: what its rounds have spent, on disk before anything of a round is known.

`privacy.jsonl` has a line a round. Every line is as long as the others and carries a checksum, so damage can't make one line of two, and
nothing that was spent can be forgotten: a line that is damaged or was cut off counts as one more round, of the kind that costs most among
those known. If none is known, epsilon is infinite.
A round that is played again with the same seed and settings draws the same noise: it is the same release, and counts once.
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
from shoestring.core.files import write_whole
from shoestring.core.regular import read_regular, regular
from shoestring.privacy.account import EXACT, QUICK, Events, SampledGaussian, check_delta, spent

NAME = "privacy.jsonl"
WIDTH = 256   # bytes of a line, with its end
CRC = len(b',"crc":"00000000"}')


@dataclass(frozen=True)
class Entry:
    """What a round spends."""

    round: int          # from 0
    digest: str         # of the seed and all settings that the round follows from
    multiplier: float
    rate: float
    delta: float        # of the whole run

    @property
    def key(self) -> tuple[int, str]:
        return self.round, self.digest

    @property
    def kind(self) -> SampledGaussian:
        return SampledGaussian(self.multiplier, self.rate)


class Spending:
    """The ledger in a run's folder. `done`: rounds that the run is known to have done; those that the ledger lacks are counted, too."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        self.path, self.done = Path(folder) / NAME, done
        self.entries: dict[tuple[int, str], Entry] = {}
        self.damaged = 0
        self.read()

    def read(self) -> None:
        """Take the ledger as it is on disk."""
        try:
            data = read_regular(self.path)
        except FileNotFoundError:
            data = b""
        found = [entry_of(data[start:start + WIDTH]) for start in range(0, len(data), WIDTH)]
        self.entries = {one.key: one for one in found if one is not None}
        self.damaged = sum(one is None for one in found)

    @property
    def delta(self) -> float | None:
        """Of the first entry; none if there is none."""
        return next((one.delta for one in self.entries.values()), None)

    @property
    def lost(self) -> int:
        """Rounds that were spent, or may have been, and of which the ledger does not say what. One that is missing may be one that is
        damaged, or another: nobody knows, so both count."""
        rounds = {one.round for one in self.entries.values()}
        return self.damaged + sum(number not in rounds for number in range(self.done))

    def spend(self, entry: Entry) -> None:
        """Note a round, if it is not there already; when this returns it is on disk."""
        self.check(entry)
        if entry.key in self.entries:
            return
        if not self.path.exists():
            write_whole(self.path, line_of(entry))   # whole or not there: the first line says of what kind a lost one is
        else:
            self.append(line_of(entry))
        self.entries[entry.key] = entry

    def append(self, line: bytes) -> None:
        file = regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            torn = os.fstat(file).st_size % WIDTH
            left = (b" " * (WIDTH - torn - 1) + b"\n" if torn else b"") + line   # what a kill cut off stays, as a line that counts
            while left:
                left = left[os.write(file, left):]
            os.fsync(file)
        finally:
            os.close(file)

    def check(self, entry: Entry) -> None:
        check_delta(entry.delta)
        if self.delta not in (None, entry.delta):
            raise Mistake(f"--delta {entry.delta:g}, and {self.path} is kept for {self.delta:g}: one run has one delta, because epsilon "
                          f"means nothing without it; give --delta {self.delta:g}, or another --run")

    def epsilon(self, delta: float | None = None, exactly: bool = False) -> float:
        """What is spent. It is on the quick grid, and no less than `exactly`, whose difference is about 1e-5 of it."""
        delta = self.delta if delta is None else delta
        if delta is None:
            return inf if self.lost else 0.0
        return self.most(self.entries.values(), delta, EXACT if exactly else QUICK)

    def would_exceed(self, entry: Entry, budget: float) -> bool:
        """Whether more than the budget is spent after this round; never if it is there already, as nothing new is told."""
        self.check(entry)
        if entry.key in self.entries:
            return False
        entries = (*self.entries.values(), entry)
        return self.most(entries, entry.delta, QUICK) > budget and self.most(entries, entry.delta, EXACT) > budget

    def most(self, entries: Iterable[Entry], delta: float, interval: float) -> float:
        """Epsilon, with lost rounds of that kind by which it becomes largest."""
        counts = Counter(one.kind for one in entries)
        if not self.lost:
            return spent(tuple(counts.items()), delta, interval)
        if not self.entries:
            return inf
        ways: list[Events] = [tuple((counts + Counter({kind: self.lost})).items()) for kind in counts]
        return max(spent(way, delta, interval) for way in ways)


def line_of(entry: Entry) -> bytes:
    """A line of WIDTH bytes."""
    head = json.dumps(asdict(entry), separators=(",", ":")).encode()[:-1]
    room = WIDTH - len(head) - CRC - 1
    if room < 0:
        raise Mistake(f"an entry of the privacy ledger with {len(head)} bytes: there is room for {WIDTH - CRC - 1}; give a shorter digest")
    head += b" " * room
    return head + b',"crc":"%08x"}\n' % crc32(head)


def entry_of(line: bytes) -> Entry | None:
    """The entry of a line; None if it is damaged."""
    head = line[:-CRC - 1]
    if len(line) != WIDTH or line[-CRC - 1:] != b',"crc":"%08x"}\n' % crc32(head):
        return None
    try:
        found = Entry(**json.loads(head + b"}"))
        check_delta(found.delta)
        return found if found.kind and isinstance(found.round, int) else None
    except (TypeError, ValueError):
        return None
