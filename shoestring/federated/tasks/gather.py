"""Asks many devices a question, adds up their answers by group, and releases what the developer may see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.federated.devices.device_errors import Failure, error_class, withhold_text
from shoestring.federated.devices.device_output import withheld_output
from shoestring.federated.devices.records import Records
from shoestring.federated.tasks.device import DeviceEngine, Question, ask_devices, failed_device
from shoestring.federated.tasks.privacy.registry import Registry
from shoestring.federated.tasks.privacy.release import ReleasedTotals, release_totals
from shoestring.federated.tasks.statistics.totals import DeviceTotals, Telemetry, sum_totals

CHUNK = 64  # devices that work at once


@dataclass(frozen=True)
class Cohort:
    """Simulated devices that can be asked, with the models that they receive."""

    job: Job
    engine: DeviceEngine
    records: Callable[[str], Records]  # a device's records by its name
    models: Mapping[str, Tensor]  # weights by name, a row (size) each
    registry: Registry  # which devices earlier results were about
    seed: int = 0
    chunk: int = CHUNK
    clock: Callable[[], float] = perf_counter

    def group(self, name: str) -> str:
        return str(self.job.group(name)) if self.job.group is not None else ""


@dataclass(frozen=True)
class GatheredTotals:
    """The exact sums of all answers by group. The developer must not see them."""

    sums: Mapping[str, DeviceTotals]
    answered: Mapping[str, Sequence[str]]  # the devices whose answers are in the sums

    def in_one(self, group: str) -> GatheredTotals:
        """Merge all groups into one."""
        return GatheredTotals(
            {group: sum_totals(self.sums.values())},
            {group: [name for names in self.answered.values() for name in names]},
        )


def ask_and_release(
    question: Question, cohort: Cohort, names: Sequence[str], least: int, whole: str | None = None
) -> ReleasedTotals:
    """Ask devices and release what the developer may see. Every result comes from here, and is in the registry before
    it is returned.

    `whole`: a group for all devices together; None: the groups that they belong to.
    """
    cohort.registry.refuse_asking(names, least)
    found = gather_totals(question, cohort, names)
    found = found if whole is None else found.in_one(whole)
    seen = release_totals(found.sums, least)
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


def gather_totals(question: Question, cohort: Cohort, names: Sequence[str]) -> GatheredTotals:
    """Ask devices and add up their answers by group. `release` decides what the developer may see of the sums."""
    check_question(question, cohort, names)
    found: dict[str, DeviceTotals] = {}
    answered: dict[str, list[str]] = {}
    last: BaseException | None = None
    for begin in range(0, len(names), cohort.chunk):
        for name, answer, error in ask_chunk(question, cohort, names[begin : begin + cohort.chunk]):
            group = cohort.group(name)
            found[group] = found.get(group, DeviceTotals()).plus(answer)
            answered.setdefault(group, []).extend([name] * answer.telemetry.devices)
            last = error or last
    whole = sum_totals(found.values()).telemetry
    if last is not None and not whole.devices:
        kinds = ", ".join(f"{count} {kind}" for kind, count in whole.errors)
        raise Mistake(
            f"none of the {len(names)} devices could answer: {kinds}; add --traceback to see where"
        ) from withhold_text(last)
    return GatheredTotals(found, answered)


def ask_chunk(
    question: Question, cohort: Cohort, names: Sequence[str]
) -> Iterator[tuple[str, DeviceTotals, BaseException | None]]:
    """The answers of some devices at once. If that fails, each device is asked alone. Only an error's class leaves a
    device."""
    used = {one.model for one in question.candidates}
    models = {name: row for name, row in cohort.models.items() if name in used}
    try:
        with withheld_output():
            records = [cohort.records(name) for name in names]
            answers = ask_devices(question, cohort.job, cohort.engine, models, records, cohort.seed, cohort.clock)
    except Failure as error:
        if len(names) > 1:
            for name in names:
                yield from ask_chunk(question, cohort, [name])
        else:
            yield names[0], failed_device(error_class(error), Telemetry(asked=1)), error
        return
    yield from ((name, one, None) for name, one in zip(names, answers, strict=True))


def check_question(question: Question, cohort: Cohort, names: Sequence[str]) -> None:
    """Before any device is asked, refuse a question that would fail on all of them."""
    if not question.candidates:
        raise Mistake("there is no candidate to evaluate: give settings, or models")
    if not names:
        raise Mistake("there is no device to ask")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Mistake(f"the device {twice!r} is asked twice and would count as two")
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
            "devices hold out no records, so they have nothing to evaluate on: give the job local=Local(held_out=0.2)"
        )
