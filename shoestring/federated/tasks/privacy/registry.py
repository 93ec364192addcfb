"""Records which devices earlier results were about, and refuses results whose devices differ from those by a few: the
difference of the two results would be about those few. Groups count too, and their sums (`overlap`).

There is one file per population and one line per release, with digests of the names of all devices asked, and of the
devices behind every number (all that answered, and each group). A line is on disk before its result is released. Every
task goes through `gather.ask_and_release`, which holds the file's lock while it checks and writes.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from binascii import crc32
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.files.files import append_synced, lock_to_append
from shoestring.core.files.regular import read_regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.federated.tasks.privacy.overlap import least_remainder

DIGEST = 8  # bytes of a name's digest
LARGEST = 1 << 31  # devices that a result can be promised to be about
CRC = len(b',"crc":"01234567"}')

Digests = frozenset[bytes]  # a set of devices, as digests of their names


@dataclass(frozen=True)
class ReleaseRecord:
    """One line of the registry: the devices of one released result."""

    asked: Digests
    about: tuple[Digests, ...]  # the devices behind each number
    least: int

    @property
    def groups(self) -> tuple[Digests, ...]:
        """The disjoint groups of devices that the numbers add up: all together come first, and are left out."""
        return self.about[1:] or self.about


class TooClose(Mistake):
    """A result's devices differ from those of an earlier result by too few."""


class Registry:
    """The registry of a population. Without a `path` it lives in memory: enough for one process and no earlier results."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[ReleaseRecord] = []

    def refuse_asking(self, names: Iterable[str], least: int) -> None:
        """Before devices work, refuse a set that differs from that of an earlier task by too few devices."""
        asked = digests(names)
        refuse_overlap(
            [asked], (((one.asked,), one.least) for one in self.earlier() if one.asked != asked), least, "asked"
        )

    def note(self, asked: Iterable[str], about: Iterable[Collection[str]], least: int) -> None:
        """Record a result that is about to be released, or refuse it. The record is on disk when this returns."""
        record = ReleaseRecord(digests(asked), tuple(dict.fromkeys(map(digests, about))), least)
        with self.lock_file() as file:
            earlier = self.earlier()
            refuse_overlap(record.groups, ((one.groups, one.least) for one in earlier), least, "was about")
            if record not in earlier:
                self.add(record, file)

    def earlier(self) -> list[ReleaseRecord]:
        if self.path is None:
            return self.records
        try:
            lines = read_regular(self.path).split(b"\n")
        except FileNotFoundError:
            return []
        found = [parse_line(line) for line in lines[:-1]]
        if lines[-1] or None in found:
            raise Mistake(
                f"{self.path}, which records the devices of earlier results, is damaged, so nobody can tell whether a new result would "
                f"expose a device: restore an intact copy, or give another --ledger if these are other devices"
            )
        return [one for one in found if one is not None]

    @contextmanager
    def lock_file(self) -> Iterator[int]:
        """Lock the file, so that nobody else writes."""
        if self.path is None:
            yield -1
            return
        with lock_to_append(self.path) as file:
            yield file

    def add(self, record: ReleaseRecord, file: int) -> None:
        if self.path is None:
            self.records.append(record)
            return
        append_synced(file, line_of(record))


def refuse_overlap(
    now: Sequence[Digests], earlier: Iterable[tuple[Sequence[Digests], int]], least: int, word: str
) -> None:
    """Refuse groups of devices whose numbers, combined with those of an earlier release, would be about a few devices.
    `earlier`: groups of every release, and how many devices it promised."""
    for groups, promised in earlier:
        bound = max(least, promised)
        apart = least_remainder(now, groups, bound)
        if apart < bound:
            raise TooClose(
                f"an earlier result {word} these devices, except for {apart}: the difference of both would be about fewer "
                f"than {bound}; ask the same devices, or others"
            )


def digests(names: Iterable[str]) -> Digests:
    return frozenset(hashlib.blake2b(name.encode(), digest_size=DIGEST).digest() for name in names)


def line_of(record: ReleaseRecord) -> bytes:
    fields = {
        "asked": encode_devices(record.asked),
        "about": [encode_devices(one) for one in record.about],
        "least": record.least,
    }
    head = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return head + b',"crc":"%08x"}\n' % crc32(head)


def encode_devices(devices: Digests) -> str:
    return b64encode(b"".join(sorted(devices))).decode()


def parse_line(line: bytes) -> ReleaseRecord | None:
    """The record of a line; None if the line is damaged."""
    head = line[:-CRC]
    if line[-CRC:] != b',"crc":"%08x"}' % crc32(head):
        return None
    try:
        found = parse_json(head + b"}")
        about, least = tuple(map(decode_devices, found["about"])), found["least"]
        if type(least) is not int or not 2 <= least <= LARGEST or not about or frozenset().union(*about) != about[0]:
            return None
        return ReleaseRecord(decode_devices(found["asked"]), about, least)
    except (ValueError, KeyError, TypeError):
        return None


def decode_devices(text: str) -> Digests:
    data = b64decode(text, validate=True)
    if len(data) % DIGEST:
        raise ValueError("it is cut off")
    return frozenset(data[start : start + DIGEST] for start in range(0, len(data), DIGEST))
