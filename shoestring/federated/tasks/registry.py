"""Which devices something was told about, so that no two results differ by a few of them: their difference would be about those few.

A file a population, a line a release: the devices that were asked, and those that every number is about (all that answered, and each
group), as digests of their names. It is written, and on disk, before anything is told, by whoever asks: every task has one
(`gather.seen_of`), whichever command or process begins it, and holds the file while it looks and writes.
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
from shoestring.core.files import append_synced, held_to_append
from shoestring.core.regular import read_regular

DIGEST = 8  # bytes of a device's name
CRC = len(b',"crc":"01234567"}')

Digests = frozenset[bytes]  # devices, by their names


@dataclass(frozen=True)
class Told:
    """One release."""

    asked: Digests
    about: tuple[Digests, ...]  # of every number of it
    least: int


class TooClose(Mistake):
    """A result would differ from an earlier one by a few devices."""


class Registry:
    """`path`: None keeps it in this object alone, for who has one process and no other result of these devices."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept: list[Told] = []

    def refuse_asking(self, names: Iterable[str], least: int) -> None:
        """Refuse to ask devices that are nearly those of an earlier task, before they work."""
        refuse(
            [digests(names)],
            [(one.asked,) for one in self.earlier()],
            [one.least for one in self.earlier()],
            least,
            "asked",
        )

    def note(self, asked: Iterable[str], about: Iterable[Collection[str]], least: int) -> None:
        """Note what is about to be told, or refuse; when this returns it is on disk."""
        told = Told(digests(asked), tuple(dict.fromkeys(map(digests, about))), least)
        with self.held() as file:
            earlier = self.earlier()
            refuse(told.about, [one.about for one in earlier], [one.least for one in earlier], least, "was about")
            if told not in earlier:
                self.add(told, file)

    def earlier(self) -> list[Told]:
        if self.path is None:
            return self.kept
        try:
            lines = read_regular(self.path).split(b"\n")
        except FileNotFoundError:
            return []
        found = [told_of(line) for line in lines[:-1]]
        if lines[-1] or None in found:
            raise Mistake(
                f"{self.path}, which says what devices were asked before, is damaged: whether a result would give a device away "
                f"can't be known; put a whole copy back, or give another --ledger if these are other devices"
            )
        return [one for one in found if one is not None]

    @contextmanager
    def held(self) -> Iterator[int]:
        """While inside, nobody else writes."""
        if self.path is None:
            yield -1
            return
        with held_to_append(self.path) as file:
            yield file

    def add(self, told: Told, file: int) -> None:
        if self.path is None:
            self.kept.append(told)
            return
        append_synced(file, line_of(told))


def refuse(
    now: Sequence[Digests], earlier: Sequence[Sequence[Digests]], bounds: Sequence[int], least: int, word: str
) -> None:
    for cohorts, bound in zip(earlier, bounds, strict=True):
        for one in now:
            for other in cohorts:
                apart = len(one ^ other)
                if 0 < apart < max(least, bound):
                    raise TooClose(
                        f"an earlier result {word} these devices, but for {apart}: the difference of both would be about fewer "
                        f"than {max(least, bound)}; ask the same ones, or others"
                    )


def digests(names: Iterable[str]) -> Digests:
    return frozenset(hashlib.blake2b(name.encode(), digest_size=DIGEST).digest() for name in names)


def line_of(told: Told) -> bytes:
    record = {"asked": written(told.asked), "about": [written(one) for one in told.about], "least": told.least}
    head = json.dumps(record, separators=(",", ":")).encode()[:-1]
    return head + b',"crc":"%08x"}\n' % crc32(head)


def written(devices: Digests) -> str:
    return b64encode(b"".join(sorted(devices))).decode()


def told_of(line: bytes) -> Told | None:
    """None: the line is damaged."""
    head = line[:-CRC]
    if line[-CRC:] != b',"crc":"%08x"}' % crc32(head):
        return None
    try:
        found = json.loads(head + b"}")
        return Told(read(found["asked"]), tuple(map(read, found["about"])), int(found["least"]))
    except (ValueError, KeyError, TypeError):
        return None


def read(text: str) -> Digests:
    data = b64decode(text, validate=True)
    if len(data) % DIGEST:
        raise ValueError("it is cut off")
    return frozenset(data[start : start + DIGEST] for start in range(0, len(data), DIGEST))
