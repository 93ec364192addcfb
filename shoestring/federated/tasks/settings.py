"""Candidate settings for local training, and grids of them as text: `lr=0.01,0.1,1 epochs=1,2` has six."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product

from shoestring.core.clients.local import Local
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake

KINDS: Mapping[str, type] = {
    "epochs": int,
    "batch": int,
    "lr": float,
    "steps": int,
}  # the settings of Local that a candidate can change
REFUSED = {
    "held_out": "all candidates are evaluated on the same records: set it in the job's Local",
    "optimizer": "it is a function of the job: set it in the job's Local",
}
MOST = 1000  # settings in a grid at most

Value = int | float


@dataclass(frozen=True)
class TuneCandidate:
    """A candidate: a model, and the settings with which devices train it on their own records before they evaluate it."""

    name: str
    settings: Mapping[str, Value] = field(default_factory=dict)  # of Local; the job's where they are left out
    model: str = ""  # name of its weights among the task's models
    trains: bool = True  # False: the weights are evaluated as they are

    def local(self, of_job: Local) -> Local:
        """The job's Local with these settings."""
        check_settings(self.settings)
        if "lr" in self.settings and of_job.optimizer is not None:
            raise Mistake(
                f"{self.name}: devices have an optimizer (the Job's or its Local's), so lr has no effect: leave lr out of the "
                f"settings, or give Local(lr=...) without an optimizer"
            )
        return replace(of_job, **self.settings)  # type: ignore[arg-type]   # checked above


def check_settings(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        if name in REFUSED:
            raise Mistake(f"{name}={value} among settings: {REFUSED[name]}")
        if name not in KINDS:
            known = [one.name for one in fields(Local) if one.name in KINDS]
            raise Mistake(
                f"a device's training has no setting {name!r}; it has {', '.join(known)}{did_you_mean(name, known)}"
            )
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (KINDS[name] is int and value != int(value)):  # type: ignore[call-overload]
            raise Mistake(f"{name}={value} among settings: give a {'whole ' * (KINDS[name] is int)}number")
    Local(**settings)  # type: ignore[arg-type]   # refuses what is out of range


def candidates_of(settings: Sequence[Mapping[str, Value]], model: str = "") -> tuple[TuneCandidate, ...]:
    """A candidate of one model for each of these settings."""
    return tuple(TuneCandidate(text_of(one), one, model) for one in settings)


def text_of(settings: Mapping[str, Value]) -> str:
    """The name of a candidate.

    >>> text_of({"lr": 0.1, "epochs": 2}), text_of({})
    ('lr=0.1 epochs=2', 'as in the job')
    """
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "as in the job"


def settings_of(written: str) -> tuple[Mapping[str, Value], ...]:
    """All settings of a grid.

    >>> settings_of("lr=0.01,0.1 epochs=1,2")
    ({'lr': 0.01, 'epochs': 1}, {'lr': 0.01, 'epochs': 2}, {'lr': 0.1, 'epochs': 1}, {'lr': 0.1, 'epochs': 2})
    """
    values: dict[str, tuple[Value, ...]] = {}
    for item in written.split():
        name, equals, given = item.partition("=")
        if not equals or not name or not given:
            raise Mistake(f"{item!r} among settings: write a name, = and one or several values, such as lr=0.01,0.1")
        if name in values:
            raise Mistake(f"{name} is given twice among settings: write all its values at once, such as {name}=1,2")
        values[name] = tuple(value_of(name, one) for one in given.split(","))
        for value in values[name]:
            check_settings({name: value})
        if len(set(values[name])) < len(values[name]):
            raise Mistake(f"{item!r} among settings has a value twice: leave one out")
    if not values:
        raise Mistake("no settings: write a grid, such as lr=0.01,0.1,1 epochs=1,2")
    found = tuple(dict(zip(values, combination, strict=True)) for combination in product(*values.values()))
    if len(found) > MOST:
        raise Mistake(f"{written!r} makes {len(found):,} settings: give at most {MOST:,}")
    return found


def value_of(name: str, text: str) -> Value:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        check_settings({name: 1})  # report an unknown name before a bad value
        raise Mistake(f"{name}={text} among settings: {text!r} is not a number")
    return float(value) if KINDS.get(name) is float else value
