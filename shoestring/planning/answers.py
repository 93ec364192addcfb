"""What planning measured is kept, so that the same job on the same machine is not measured again: a file a job in the user's cache folder.

Kept are the answers to slow questions, not a plan: the logs of rehearsals and what worker processes found. Planning asks the same questions
in the same order and gets the same answers, so the plan follows as it did, in a second; another budget asks mostly the same.

A file is for one job, with all that can be known of it (training/execution/job_key.py). Beside the answers it has
every module of the user's that
was imported, with a digest: if one of them changed, or the machine is faster or slower than it was, the answers do not count. What was
timed while other processes held it up (measure/load.py) is timed again by the next planning. What a job reads from elsewhere nobody can
know, so a plan says when it was measured, and `fresh` measures again.

A damaged file counts as not there (measure/cache.py). Two that plan at once both write a whole file, and the last one stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import time
import zlib
from base64 import b85decode, b85encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

from shoestring.core.codec import to_json
from shoestring.core.regular import read_regular
from shoestring.measure.cache import cache_folder, read_kept, value_of, write_kept
from shoestring.measure.load import HELD_UP
from shoestring.measure.tracker import Log

R = TypeVar("R")
VERSION = 1
MOST = 100  # jobs that are kept
LARGEST = 32 << 20  # bytes of one file; a job with more is measured each time
UNPACKED = 1 << 30  # bytes that its answers are at most, unpacked
DRIFTED = 1.25  # times as fast or slow as the machine was: what was measured then does not count


@runtime_checkable
class TimedResult(Protocol):
    """An answer for which something was timed."""

    @property
    def held_up(self) -> float:
        """Share of the time that other processes held up even the best of what was timed."""


@dataclass(frozen=True)
class KeptFile:
    """What is on disk."""

    version: int
    when: float
    speed: float
    files: dict[str, str]
    answers: str  # JSON, packed


@dataclass
class MeasuredAnswers:
    """The answers for one job; those that are new are written by `save`."""

    place: Path
    speed: float = 0.0  # the machine's, in operations per second
    answers: dict[str, Any] = field(default_factory=dict)  # question -> answer, as JSON
    when: float = 0.0  # the time when the first of them was measured
    files: dict[str, str] = field(default_factory=dict)  # modules of the user's -> SHA-256
    earlier: frozenset[str] = frozenset()  # questions that an earlier planning asked
    used: bool = False  # one of their answers was taken
    added: bool = False
    asked: Counter[str] = field(
        default_factory=Counter
    )  # how often each question to a worker was asked in this planning
    alike: Mapping[str, Any] = field(default_factory=dict)  # what jobs have in common whose steps may take as long
    fresh: bool = False  # measure again

    def answer(self, question: Mapping[str, Any], kind: type[R], work: Callable[[], R]) -> R:
        """The answer to a question: the one that is kept, or what `work` finds."""
        key = digest(question)
        found = (
            value_of(kind, self.answers[key]) if key in self.answers else None
        )  # None: of a version that wrote it otherwise
        if found is not None and not (key in self.earlier and disturbed(found)):
            self.used |= key in self.earlier
            return found
        new = work()
        if found is not None:  # measured on a busy machine: of the two, the one that was held up less
            new = min(new, found, key=held_up)
        self.earlier -= {key}
        self.answers[key] = to_json(new)
        self.added, self.when = True, self.when or time.time()
        return new

    def by_worker(self, question: Mapping[str, Any], kind: type[R], work: Callable[[], R]) -> R:
        """The answer of a worker process. A question that is asked twice in a planning is answered twice, because the two may differ."""
        self.asked[digest(question)] += 1
        return self.answer({**question, "time": self.asked[digest(question)]}, kind, work)

    def same_times(self, log: Log, question: Mapping[str, Any], measured: R) -> R:
        """What was timed first for a step with this log, in any job that is `alike`: so two jobs that differ in a learning rate get the
        same times, and the same plan. Of two that were timed on a busy machine, the one that was held up less."""
        known = opened({**self.alike, "step": digest(to_json(log))}, self.speed, self.fresh)
        found = known.answer(question, type(measured), lambda: measured)
        known.save()
        if known.used:
            self.used, self.when = True, min(self.when or known.when, known.when)
        return found

    def save(self) -> None:
        """Keep what is new for the next time, with the modules that are imported by now."""
        if not self.added:
            return
        packed = b85encode(zlib.compress(json.dumps(self.answers).encode(), 3)).decode()
        if len(packed) > LARGEST:
            return
        files = {**self.files, **digests(own_modules())}
        write_kept(self.place, KeptFile(VERSION, self.when, self.speed, files, packed))
        with suppress(OSError):
            for old in sorted(self.place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST]:
                old.unlink(missing_ok=True)


def opened(about: Mapping[str, Any], speed: float, fresh: bool = False) -> MeasuredAnswers:
    """What is kept for a job, of which `about` says all that the answers depend on; with `fresh` nothing is."""
    alike = {**about, "flags": without_numbers(about.get("flags", {}))}
    new = MeasuredAnswers(cache_folder() / "evidence" / f"{digest(about)[:32]}.json", speed, alike=alike, fresh=fresh)
    if fresh:
        return new
    found = read_kept(new.place, KeptFile)
    if found is None or found.version != VERSION or max(found.speed, speed) > DRIFTED * min(found.speed, speed):
        return new
    answers = unpacked(found.answers)
    if not answers or not all(map(importable, found.files)) or digests(found.files) != found.files:
        return new
    return MeasuredAnswers(new.place, found.speed, answers, found.when, found.files, frozenset(answers), alike=alike)


def unpacked(answers: str) -> dict[str, Any]:
    """The answers in a file; none if they are not as `save` packs them."""
    try:
        data = json.loads(zlib.decompressobj().decompress(b85decode(answers), UNPACKED))
    except (ValueError, zlib.error, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def without_numbers(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a job but for those that are real numbers: a learning rate, a decay, a share. What one of those changes in a step's cost,
    if anything, its rehearsal shows.

    >>> without_numbers({"lr": 0.1, "width": 8, "text": "a.txt"})
    {'width': 8, 'text': 'a.txt'}
    """
    return {name: value for name, value in flags.items() if not isinstance(value, float)}


def held_up(answer: object) -> float:
    """Share of the time that other processes held up what was timed for an answer; 0 where nothing was timed."""
    return answer.held_up if isinstance(answer, TimedResult) else 0.0


def disturbed(answer: object) -> bool:
    """Whether an answer was timed on a busy machine, so that the next planning should ask again."""
    return held_up(answer) > HELD_UP


def digest(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


def importable(file: str) -> bool:
    """Whether a file could be a module of the user's: one that is imported, or lies in a folder on `sys.path`. No other that a cache
    names is opened."""
    places = {os.path.abspath(place) for place in sys.path}
    inside = (
        file.endswith(".py") and os.path.abspath(file) == file and any(str(one) in places for one in Path(file).parents)
    )
    return inside or file in own_modules()


def digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the content of files; those that are not there are left out."""
    found = {}
    for name in files:
        with suppress(OSError, ValueError):  # ValueError: no such path can be
            found[name] = hashlib.sha256(read_regular(name)).hexdigest()
    return found


OURS = str(Path(__file__).parents[1])
LIBRARIES = tuple(
    f"{one}{os.sep}"
    for one in (OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
)


def own_modules() -> list[str]:
    """Files of the user's own modules, which belong to no package or library, that this process has imported."""
    return sorted({file for file in map(own_file, loaded_modules().values()) if file})


def loaded_modules() -> dict[str, ModuleType]:
    """The modules of this process by name: those in `sys.modules`, and those that were loaded from a path and are known only to a module
    of the user's, as a global of it."""
    found = dict(sys.modules)
    users = [module for module in found.values() if own_file(module)]
    while users:
        for value in list(vars(users.pop()).values()):
            if issubclass(type(value), ModuleType) and value.__name__ not in found and own_file(value):
                found[value.__name__] = value
                users.append(value)
    return found


def own_file(module: ModuleType) -> str:
    """The file of a module that is the user's own; empty if it is none."""
    file = getattr(module, "__file__", None) or ""
    path = os.path.abspath(file)
    library = path.startswith(LIBRARIES) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))
    return "" if library or not file.endswith(".py") else path
