"""Shared by command and library: from the options to a federation that has run in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shoestring.core.command_line.extras import install_hint
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.files.codec import Unreadable, from_json
from shoestring.core.job import Job
from shoestring.federated.devices.device_errors import Failure, error_class, is_ours, place_of_failure, withhold_text
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.available import AvailableTechniques, available_techniques
from shoestring.federated.planning.kept_plan import plan_in
from shoestring.federated.planning.prepare import Prepared, prepare_federation
from shoestring.federated.report.finished import federation_report
from shoestring.federated.room import FederatedOutcome, FederatedPlan, PlannedFederation, plan_federation
from shoestring.federated.runner import FederationResult, Runner
from shoestring.federated.techniques.private.release import check_room
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.events.event import Event, Planning, Warned
from shoestring.runs.events.event_log import note
from shoestring.runs.folder import Unusable
from shoestring.runs.modules import note_modules
from shoestring.runs.reports.report import report_of
from shoestring.runs.session import Execution, Session


@contextmanager
def blaming_the_job() -> Iterator[None]:
    """While inside, an error in a function of the job becomes a Mistake that says where; an error of ours stays ours.
    Both may have handled a record, so their text is withheld."""
    try:
        yield
    except (OverBudget, MemoryError):
        raise
    except Failure as error:
        found = place_of_failure(error)
        of_a_file = isinstance(error, (OSError, Unusable)) and found.ours  # of the run's folder, which has no records
        if of_a_file or (isinstance(error, Mistake) and is_ours(error)):
            raise
        if found.ours:
            raise withhold_text(error) from None
        raise Mistake(
            f"the job failed in {found.place}: {error_class(error)}, whose text is withheld because it may hold a record"
            f"{install_hint(error)}; "
            f"add --traceback to see where"
        ) from withhold_text(error)


@blaming_the_job()
def choose_plan(job: Job, asked: FederateOptions, use: Sequence[str] | None) -> PlannedFederation:
    """The plan for these options."""
    return plan_federation(prepare_federation(job, asked), asked.budget, use)


class Onlooker(NamedTuple):
    """Receives the progress of rounds."""

    tell: Callable[[Event], None]
    heard: Callable[[int, int, int], None] = lambda number, done, given: None  # round, devices done, devices in it


@dataclass
class FederationRun(Execution[FederatedPlan, FederationResult]):
    """A federation in a folder that this process holds. `offers`: the available techniques, including a script's own."""

    session: Session
    make_job: Callable[[], Job]
    cadence: Cadence
    playing: Callable[[Prepared], AbstractContextManager[Onlooker]]  # entered while rounds are played
    planning: Callable[[], AbstractContextManager[object]] = nullcontext  # entered while planning
    show: Callable[[PlannedFederation], None] = lambda planned: None  # called with the chosen plan
    offers: AvailableTechniques = field(default_factory=available_techniques)
    adopt: bool = False
    given: Prepared | None = None  # set once there is a plan

    @cached_property
    def job(self) -> Job:
        return self.make_job()

    @cached_property
    def options(self) -> FederateOptions:
        try:
            return from_json(FederateOptions, self.session.request.asked)
        except Unreadable as error:
            raise self.session.folder.unusable("run.json", error) from error

    @blaming_the_job()
    def begin(self) -> None:
        """Before planning: check that the ledger has room for a new run."""
        folder = self.session.folder
        note(folder.path, Planning())
        if self.options.epsilon is not None and not newest_good(folder.checkpoints)[0]:
            check_room(folder.path, self.options.ledger, self.options.ledger_epsilon)

    def read_plan(self, file: Mapping[str, Any]) -> FederatedPlan:
        return plan_in(file, self.offers, self.session.request.use, self.options.epsilon is not None)

    @blaming_the_job()
    def accept(self, kept: FederatedPlan) -> FederatedPlan:
        with self.planning():
            self.given = prepare_federation(self.job, self.options, how=kept.details.how)
        return kept

    @blaming_the_job()
    def choose(self) -> FederatedOutcome:
        use = self.session.request.use
        with self.planning():
            planned = plan_federation(prepare_federation(self.job, self.options), self.options.budget, use, self.offers)
        self.given = planned.given
        return planned.outcome

    def note_plan(self, outcome: FederatedOutcome) -> None:
        assert self.given is not None, "it was prepared to be planned"
        self.show(PlannedFederation(outcome, self.given))

    @blaming_the_job()
    def execute(self, plan: FederatedPlan) -> FederationResult:
        folder, given = self.session.folder, self.given
        assert given is not None, "it is planned"
        if (
            job_file := given.job.origin
        ):  # the modules that were imported while devices' work was tried are known by now
            note_modules(
                folder, Path(job_file.file).parent, True, lambda text: note(folder.path, Warned(text)), begins=True
            )
        with self.playing(given) as onlooker:
            return Runner(
                given, plan, folder, onlooker.tell, self.cadence, given.asked.every or 0, onlooker.heard
            ).run()

    def report(self, plan: FederatedPlan, ended: FederationResult) -> Mapping[str, Any]:
        return federation_report(report_of(self.session.folder.path), ended)
