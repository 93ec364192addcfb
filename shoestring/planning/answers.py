"""A cache of what planning measured, so that the same job on the same machine is not measured again. One file per job
in the user's cache folder.

It stores answers to slow questions, not plans: the logs of rehearsals and what worker processes found. Planning asks
the same questions in the same order and gets the same answers, so it arrives at the same plan within a second. Another
budget asks mostly the same questions.

A file belongs to one job, identified by everything that is known of it (training/execution/job_key.py). It also lists
every module of the user's that was imported, with a digest. Its answers are ignored if a module changed, or if the
machine is faster or slower than it was. Times that were measured while other processes slowed them down
(measure/load.py) are measured again by the next planning. What a job reads from elsewhere can't be known, so a plan
says when it was measured, and `fresh` measures again.

A damaged file counts as missing (measure/cache.py). Two processes that plan at once each write a whole file; the last
one wins.
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

from shoestring.core.files.codec import to_json
from shoestring.core.files.regular import file_sha256
from shoestring.measure.cache import cache_folder, read_cached, value_of, write_cached
from shoestring.measure.load import HELD_UP
from shoestring.measure.tracker import Log

R = TypeVar("R")
VERSION = 1
MOST = 100  # jobs in the cache
LARGEST = 32 << 20  # bytes of one file; a job with more is measured every time
UNPACKED = 1 << 30  # most bytes of its answers, unpacked
DRIFTED = 1.25  # if the machine is this many times faster or slower than it was, its answers are ignored


@runtime_checkable
class TimedResult(Protocol):
    """An answer that includes measured times."""

    @property
    def held_up(self) -> float:
        """Fraction of the time that other processes took from even the best measurement."""


@dataclass(frozen=True)
class KeptFile:
    """The content of a cache file."""

    version: int
    when: float
    speed: float
    files: dict[str, str]
    answers: str  # JSON, packed by zlib


@dataclass
class MeasuredAnswers:
    """The answers for one job; `save` writes new ones."""

    place: Path
    speed: float = 0.0  # the machine's speed, in operations per second
    answers: dict[str, Any] = field(default_factory=dict)  # question -> answer, as JSON
    when: float = 0.0  # when the first of them was measured
    files: dict[str, str] = field(default_factory=dict)  # the user's modules -> SHA-256
    earlier: frozenset[str] = frozenset()  # questions that an earlier planning asked
    used: bool = False  # whether one of those answers was used
    added: bool = False
    asked: Counter[str] = field(default_factory=Counter)  # how often each question was put to a worker in this planning
    # the part of the job that determines its step time; jobs that share it share times
    alike: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False  # ignore the cache and measure again

    def answer(self, question: Mapping[str, Any], kind: type[R], work: Callable[[], R]) -> R:
        """The answer to a question: from the cache, or computed by `work`."""
        key = digest(question)
        found = (
            value_of(kind, self.answers[key]) if key in self.answers else None
        )  # None: written by a version with another format
        if found is not None and not (key in self.earlier and was_disturbed(found)):
            self.used |= key in self.earlier
            return found
        new = work()
        if found is not None:  # measured on a busy machine: keep the less disturbed of the two
            new = min(new, found, key=held_up)
        self.earlier -= {key}
        self.answers[key] = to_json(new)
        self.added, self.when = True, self.when or time.time()
        return new

    def by_worker(self, question: Mapping[str, Any], kind: type[R], work: Callable[[], R]) -> R:
        """A worker process's answer. If planning asks the same question twice, it is answered twice, because the
        answers may differ."""
        self.asked[digest(question)] += 1
        return self.answer({**question, "time": self.asked[digest(question)]}, kind, work)

    def same_times(self, log: Log, question: Mapping[str, Any], measured: R) -> R:
        """The times of a step with this log that were measured first, for any job with the same `alike`. So two jobs
        that differ in a learning rate get the same times and the same plan. Of two measurements on a busy machine, the
        less disturbed one counts."""
        known = open_answers({**self.alike, "step": digest(to_json(log))}, self.speed, self.fresh)
        found = known.answer(question, type(measured), lambda: measured)
        known.save()
        if known.used:
            self.used, self.when = True, min(self.when or known.when, known.when)
        return found

    def save(self) -> None:
        """Write new answers to the cache, with the modules imported by now."""
        if not self.added:
            return
        packed = b85encode(zlib.compress(json.dumps(self.answers).encode(), 3)).decode()
        if len(packed) > LARGEST:
            return
        files = {**self.files, **digests(own_modules())}
        write_cached(self.place, KeptFile(VERSION, self.when, self.speed, files, packed))
        with suppress(OSError):
            for old in sorted(self.place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST]:
                old.unlink(missing_ok=True)


def open_answers(about: Mapping[str, Any], speed: float, fresh: bool = False) -> MeasuredAnswers:
    """The cached answers for a job; `about` identifies it by everything that the answers depend on. With `fresh`, none."""
    alike = {**about, "flags": without_numbers(about.get("flags", {}))}
    new = MeasuredAnswers(cache_folder() / "evidence" / f"{digest(about)[:32]}.json", speed, alike=alike, fresh=fresh)
    if fresh:
        return new
    found = read_cached(new.place, KeptFile)
    if found is None or found.version != VERSION or max(found.speed, speed) > DRIFTED * min(found.speed, speed):
        return new
    answers = unpack_answers(found.answers)
    if not answers or not all(map(importable, found.files)) or digests(found.files) != found.files:
        return new
    return MeasuredAnswers(new.place, found.speed, answers, found.when, found.files, frozenset(answers), alike=alike)


def unpack_answers(answers: str) -> dict[str, Any]:
    """The answers in a file; none if they are not as `save` packs them."""
    try:
        data = json.loads(zlib.decompressobj().decompress(b85decode(answers), UNPACKED))
    except (ValueError, zlib.error, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def without_numbers(flags: Mapping[str, Any]) -> dict[str, Any]:
    """A job's flags without real numbers, such as a learning rate or a decay. If one of those changes the cost of a
    step, the rehearsal shows it.

    >>> without_numbers({"lr": 0.1, "width": 8, "text": "a.txt"})
    {'width': 8, 'text': 'a.txt'}
    """
    return {name: value for name, value in flags.items() if not isinstance(value, float)}


def held_up(answer: object) -> float:
    """Fraction of the time that other processes took while an answer was timed; 0 if nothing was timed."""
    return answer.held_up if isinstance(answer, TimedResult) else 0.0


def was_disturbed(answer: object) -> bool:
    """Whether an answer was timed on a busy machine, so the next planning should measure again."""
    return held_up(answer) > HELD_UP


def digest(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


def importable(file: str) -> bool:
    """Whether a file can be one of the user's modules: it is imported, or lies in a folder on `sys.path`. No other file
    that a cache names is opened."""
    places = {os.path.abspath(place) for place in sys.path}
    inside = (
        file.endswith(".py") and os.path.abspath(file) == file and any(str(one) in places for one in Path(file).parents)
    )
    return inside or file in own_modules()


def digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the content of files; missing files are left out."""
    found = {}
    for name in files:
        with suppress(OSError, ValueError):  # ValueError: an impossible path
            found[name] = file_sha256(name)
    return found


OURS = str(Path(__file__).parents[1])
LIBRARIES = tuple(
    f"{one}{os.sep}"
    for one in (OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
)


def own_modules() -> list[str]:
    """Files of the user's own modules that this process has imported; none from packages or libraries."""
    return sorted({file for file in map(own_file, loaded_modules().values()) if file})


def loaded_modules() -> dict[str, ModuleType]:
    """This process's modules by name: those in `sys.modules`, and those that were loaded from a path and are only known
    as a global of one of the user's modules."""
    found = dict(sys.modules)
    users = [module for module in found.values() if own_file(module)]
    while users:
        for value in list(vars(users.pop()).values()):
            if issubclass(type(value), ModuleType) and value.__name__ not in found and own_file(value):
                found[value.__name__] = value
                users.append(value)
    return found


def own_file(module: ModuleType) -> str:
    """The file of one of the user's own modules; empty if the module is not the user's."""
    file = getattr(module, "__file__", None) or ""
    path = os.path.abspath(file)
    library = path.startswith(LIBRARIES) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))
    return "" if library or not file.endswith(".py") else path
