"""A technique: a small frozen value with two pure functions, `cost` on ledgers and `apply` on runs.

Only `cost`, `apply`, `exact` and `why` are required. A technique may also have

    order          where among the techniques of a plan it stands (default: last)
    unites         whether it makes workers train one model; a group's plan has exactly one such (default: no)
    agrees         after which share of the steps workers then agree on what to do (default: all; 0: they never wait for each other)
    serves         whether the first worker keeps the weights and computes nothing, so that others need more memory (default: no)
    talking        of so many steps, those in which workers talk, by settings under which every step is like them (default: all are alike)
    choices        classmethod: the settings worth trying for a ledger (default: the one without arguments)
    refusal        why it can't work for this ledger, as text (default: it can)
    exactness      how close it stays for this ledger (default: from `exact`)
    drift          of one that is `changed` for this ledger: how far it may lead from the weights of plain training, as a share of the way
                   that plain training went, in ten steps of SGD with momentum (default: it states nothing). Below 1 the weights are nearer
                   to those of plain training than to those it began with. The tests hold every technique to it, on models that do not draw.
    environment    variables that its worker process must start with (default: none)
    making         a context in which the job's model is made and techniques are applied (default: nothing special)
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from typing import Any, Protocol

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.ledger import Ledger
from shoestring.core.run import Run
from shoestring.core.written import call_of, check_knobs, check_name


class Technique(Protocol):
    @property
    def exact(self) -> bool: ...
    @property
    def why(self) -> str: ...
    def cost(self, ledger: Ledger) -> Ledger: ...
    def apply(self, run: Run) -> Run: ...


def order(technique: Technique | type[Technique]) -> int:
    return getattr(technique, "order", 100)


def refusal(technique: Technique, ledger: Ledger) -> str:
    asked = getattr(technique, "refusal", None)
    return asked(ledger) if asked else ""


def exactness(technique: Technique, ledger: Ledger) -> Exactness:
    asked = getattr(technique, "exactness", None)
    return asked(ledger) if asked else Exactness.BITS if technique.exact else Exactness.CHANGED


def drift(technique: Technique, ledger: Ledger) -> float:
    """How far a technique may lead from plain training; infinitely far if it states nothing."""
    asked = getattr(technique, "drift", None)
    if exactness(technique, ledger) is not Exactness.CHANGED:
        return 0.0
    return float(asked(ledger)) if asked else float("inf")


MIXED = 1.0   # the drift of layers that mix samples (batch norm), where they see a part of the batch only


def choices(kind: type[Technique], ledger: Ledger) -> tuple[Technique, ...]:
    asked = getattr(kind, "choices", None)
    return asked(ledger) if asked else (kind(),)


def environment(techniques: Iterable[Technique]) -> dict[str, str]:
    return {name: value for technique in techniques for name, value in getattr(technique, "environment", {}).items()}


@contextmanager
def making(techniques: Iterable[Technique]) -> Iterator[None]:
    """While inside, the model is made as its techniques want it."""
    with ExitStack() as stack:
        for technique in techniques:
            if hasattr(technique, "making"):
                stack.enter_context(technique.making())
        yield


def in_order(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    return tuple(sorted(techniques, key=order))


def total_cost(techniques: Iterable[Technique], ledger: Ledger) -> Ledger:
    return reduce(lambda now, technique: technique.cost(now), techniques, ledger)


def applied(techniques: Iterable[Technique], run: Run) -> Run:
    return reduce(lambda now, technique: technique.apply(now), techniques, run)


def described(technique: Technique) -> dict[str, Any]:
    """A technique as plain data; `built` makes it again."""
    knobs: dict[str, Any] = asdict(technique) if is_dataclass(technique) and not isinstance(technique, type) else {}
    return {"name": type(technique).__name__, "knobs": knobs}


def text(technique: Technique) -> str:
    """How a technique is written on the command line: its name and the knobs that are not at their default."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(technique)} if is_dataclass(technique) else {}
    knobs = {name: value for name, value in described(technique)["knobs"].items() if value != defaults.get(name)}
    return f"{type(technique).__name__}({', '.join(f'{name}={value!r}' for name, value in knobs.items())})"


def built(name: str, knobs: Mapping[str, Any], catalogue: Iterable[type[Technique]]) -> Technique:
    kinds = {kind.__name__: kind for kind in catalogue}
    check_name(name, kinds)
    kind: Any = kinds[name]
    check_knobs(name, knobs, [field.name for field in fields(kind)] if is_dataclass(kind) else [])
    try:
        made: Technique = kind(**knobs)
        return made
    except TypeError as error:
        raise Mistake(f"{name} can't be made of {dict(knobs)}: {error}") from error


def parsed(written: str, catalogue: Iterable[type[Technique]]) -> Technique:
    """The technique that a user wrote, such as Checkpoint(every=2)."""
    name, knobs = call_of(written)
    return built(name, knobs, catalogue)
