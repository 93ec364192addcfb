"""A question to many devices, and what they tell, added up by group in the order of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.suggest import did_you_mean
from shoestring.federated.device_errors import class_of, withheld
from shoestring.federated.records import Records
from shoestring.federated.tasks.device import DeviceEngine, Question, answers, failure
from shoestring.federated.tasks.registry import Registry
from shoestring.federated.tasks.release import Released, released
from shoestring.federated.tasks.totals import DeviceTotals, Telemetry, together

CHUNK = 64  # devices at once


@dataclass(frozen=True)
class Cohort:
    """Devices that can be asked, and what they are given. Simulated: their records are here."""

    job: Job
    engine: DeviceEngine
    records: Callable[[str], Records]  # of a device, by its name
    models: Mapping[str, Tensor]  # weights by name, a row (size) each
    registry: Registry  # what was told of these devices before
    seed: int = 0
    chunk: int = CHUNK
    clock: Callable[[], float] = perf_counter

    def group(self, name: str) -> str:
        return str(self.job.group(name)) if self.job.group is not None else ""


@dataclass(frozen=True)
class GatheredTotals:
    """What devices told, by group. It is known to whoever adds up."""

    sums: Mapping[str, DeviceTotals]
    answered: Mapping[str, Sequence[str]]  # the devices whose results are in the sums

    def in_one(self, group: str) -> GatheredTotals:
        """All groups as one."""
        return GatheredTotals(
            {group: together(self.sums.values())}, {group: [name for names in self.answered.values() for name in names]}
        )


def seen_of(question: Question, cohort: Cohort, names: Sequence[str], least: int, whole: str | None = None) -> Released:
    """Ask devices, and release what the developer may see: the one way to a result, which the registry knows before anybody does.
    `whole`: the group that all devices are put into; None: those that they belong to."""
    cohort.registry.refuse_asking(names, least)
    found = gathered(question, cohort, names)
    found = found if whole is None else found.in_one(whole)
    seen = released(found.sums, least)
    everybody = [name for some in found.answered.values() for name in some]
    others = [name for group, some in found.answered.items() if group not in seen.groups for name in some]
    cohort.registry.note(
        names,
        [
            everybody,
            *(found.answered[group] for group in seen.groups if group in found.answered),
            *([others] if seen.groups and others else ()),
        ],
        least,
    )
    return seen


def gathered(question: Question, cohort: Cohort, names: Sequence[str]) -> GatheredTotals:
    """The sums of every group; what the developer may see of them, `release` says."""
    check(question, cohort, names)
    found: dict[str, DeviceTotals] = {}
    answered: dict[str, list[str]] = {}
    last: Exception | None = None
    for begin in range(0, len(names), cohort.chunk):
        for name, told, error in told_by(question, cohort, names[begin : begin + cohort.chunk]):
            group = cohort.group(name)
            found[group] = found.get(group, DeviceTotals()).plus(told)
            answered.setdefault(group, []).extend([name] * told.telemetry.devices)
            last = error or last
    whole = together(found.values()).telemetry
    if last is not None and not whole.devices:
        kinds = ", ".join(f"{count} {kind}" for kind, count in whole.errors)
        raise Mistake(
            f"none of the {len(names)} devices could answer: {kinds}; add --traceback to see where"
        ) from withheld(last)
    return GatheredTotals(found, answered)


def told_by(
    question: Question, cohort: Cohort, names: Sequence[str]
) -> Iterator[tuple[str, DeviceTotals, Exception | None]]:
    """What devices tell. Where they fail together each is asked alone, and of an error nothing leaves the device but its kind."""
    used = {one.model for one in question.candidates}
    models = {name: row for name, row in cohort.models.items() if name in used}
    try:
        records = [cohort.records(name) for name in names]
        told = answers(question, cohort.job, cohort.engine, models, records, cohort.seed, cohort.clock)
    except Exception as error:
        if len(names) > 1:
            for name in names:
                yield from told_by(question, cohort, [name])
        else:
            yield names[0], failure(class_of(error), Telemetry(asked=1)), error
        return
    yield from ((name, one, None) for name, one in zip(names, told, strict=True))


def check(question: Question, cohort: Cohort, names: Sequence[str]) -> None:
    """What would fail on every device is told before any is asked."""
    if not question.candidates:
        raise Mistake("there is no candidate to evaluate: give settings, or models")
    if not names:
        raise Mistake("there is no device to ask")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Mistake(f"the device {twice!r} is asked twice: it would count as two")
    labels = [one.name for one in question.candidates]
    if len(set(labels)) < len(labels):
        raise Mistake(
            f"two candidates are called {next(one for one in labels if labels.count(one) > 1)!r}: give each a name of its own"
        )
    for one in question.candidates:
        if one.model not in cohort.models:
            raise Mistake(
                f"the candidate {one.name!r} is of the model {one.model!r}, and there are {', '.join(map(repr, cohort.models))}"
                f"{did_you_mean(one.model, cohort.models)}"
            )
        one.local(cohort.job.local)
    if not cohort.job.local.held_out:
        raise Mistake(
            "devices hold no records out, so there is nothing to judge by: give the job local=Local(held_out=0.2)"
        )
