"""What was served, counted; as Prometheus reads it, and as figures for whoever watches.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from shoestring.serving.replicas.happenings import (
    BatchComputed,
    Happening,
    ModelProcessDied,
    ReplicaDied,
    ServedFigures,
)

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKENS = tuple(float(1 << power) for power in range(4, 17))
Labels = tuple[str, ...]
TOO_BUSY, FAILED = 503, 500


@dataclass
class Distribution:
    """How many values were at most each bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        total = 0
        for bound, total in zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True):
            yield f"{name}_bucket{label_text({**labels, 'le': bound})} {total}"
        yield f"{name}_sum{label_text(labels)} {self.sum!r}"
        yield f"{name}_count{label_text(labels)} {total}"


def label_text(labels: Mapping[str, str]) -> str:
    r"""
    >>> label_text({"model": 'a"b\\c', "door": "infer"})
    '{model="a\\"b\\\\c",door="infer"}'
    """
    if not labels:
        return ""
    quoted = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in labels.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(labels, quoted, strict=True)) + "}"


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed; 0 of none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([], 0.99)
    (2.0, 0.0)
    """
    return ordered[max(-int(-share * len(ordered) // 1) - 1, 0)] if ordered else 0.0


@dataclass
class ServedCounts:
    requests: Counter[Labels] = field(default_factory=Counter)  # by model, door and status
    seconds: dict[str, Distribution] = field(default_factory=dict)  # by model, from arrival to answer
    batch_tokens: dict[str, Distribution] = field(default_factory=dict)
    batch_rows: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)  # seconds that replicas computed
    deaths: Counter[Labels] = field(default_factory=Counter)  # by model and kind of process
    recent: list[tuple[float, int]] = field(default_factory=list)  # seconds and status since the last figures

    def count_answer(self, model: str, door: str, status: int, seconds: float) -> None:
        self.requests[model, door, str(status)] += 1
        self.seconds.setdefault(model, Distribution(SECONDS)).add(seconds)
        self.recent.append((seconds, status))

    def note(self, happened: Happening) -> None:
        match happened:
            case BatchComputed(model=model, rows=rows, tokens=tokens, seconds=seconds):
                self.batch_tokens.setdefault(model, Distribution(TOKENS)).add(tokens)
                self.batch_rows[model] += rows
                self.busy[model] += seconds  # type: ignore[assignment]
            case ReplicaDied(model=model):
                self.deaths[model, "replica"] += 1
            case ModelProcessDied(model=model):
                self.deaths[model, "model"] += 1

    def figures(self, seconds: float, queue: int) -> ServedFigures:
        """What was served since the last figures, which begin anew."""
        recent, self.recent = self.recent, []
        answered = sorted(one for one, status in recent if status < FAILED)
        failed, refused = sum(s >= FAILED for _, s in recent), sum(s == TOO_BUSY for _, s in recent)
        shares = percentile(answered, 0.5), percentile(answered, 0.99)
        return ServedFigures("", seconds, len(recent), failed - refused, refused, *shares, queue)

    def text(self, queues: Mapping[str, tuple[int, int]]) -> str:
        """The exposition; `queues`: by model, how many requests wait and how many replicas are ready."""
        lines = [
            *family("requests_total", "counter", "Requests by status", (
                (dict(zip(("model", "door", "status"), labels, strict=True)), count) for labels, count in self.requests.items()
            )),
            *family("queue_length", "gauge", "Samples that wait", (({"model": m}, n) for m, (n, _) in queues.items())),
            *family("replicas", "gauge", "Replicas that are ready", (({"model": m}, n) for m, (_, n) in queues.items())),
            *family("batch_rows_total", "counter", "Samples computed", (({"model": m}, n) for m, n in self.batch_rows.items())),
            *family("busy_seconds_total", "counter", "Seconds that replicas computed", (
                ({"model": m}, n) for m, n in self.busy.items()
            )),
            *family("process_deaths_total", "counter", "Processes that ended unasked", (
                ({"model": labels[0], "process": labels[1]}, n) for labels, n in self.deaths.items()
            )),
            *distributions("request_seconds", "From arrival to answer", self.seconds),
            *distributions("batch_tokens", "Positions in a batch", self.batch_tokens),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def family(name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    name = f"shoestring_{name}"
    yield f"# HELP {name} {text}."
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{label_text(labels)} {value!r}"


def distributions(name: str, text: str, found: Mapping[str, Distribution]) -> Iterator[str]:
    yield f"# HELP shoestring_{name} {text}."
    yield f"# TYPE shoestring_{name} histogram"
    for model, one in found.items():
        yield from one.lines(f"shoestring_{name}", {"model": model})
