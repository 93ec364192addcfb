"""What a command and a script share: from what is asked for to a federation that has run in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoestring.core.codec import Unreadable, from_json
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.job import Job
from shoestring.federated.available import AvailableTechniques, available_techniques
from shoestring.federated.device_errors import Failure, error_class, failed_at, raised_by_us, withhold_text
from shoestring.federated.finished import finished_report
from shoestring.federated.kept_plan import plan_in
from shoestring.federated.options import FederateOptions
from shoestring.federated.prepare import Prepared, prepared
from shoestring.federated.room import FederatedOutcome, FederatedPlan, planned
from shoestring.federated.runner import Ended, Runner
from shoestring.federated.techniques.private.release import NORM_OF_DEVICES, check_room
from shoestring.runs.cadence import Cadence
from shoestring.runs.checkpoints import newest_good
from shoestring.runs.event import Event, Planning, Warned
from shoestring.runs.events import note
from shoestring.runs.modules import note_modules
from shoestring.runs.report import report_of
from shoestring.runs.resume import OpenedRun
from shoestring.runs.session import Session, kept_plan

VERSION = 2  # of plan.json


@contextmanager
def blaming_the_job() -> Iterator[None]:
    """While inside, what fails in a function of the job is a Mistake that says where; what fails in ours is ours. Either may have been at
    work on a record, so its text is withheld."""
    try:
        yield
    except (OverBudget, MemoryError):
        raise
    except Failure as error:
        found = failed_at(error)
        if (isinstance(error, Mistake) and raised_by_us(error)) or (isinstance(error, OSError) and found.ours):
            raise
        if found.ours:
            raise withhold_text(error) from None
        raise Mistake(
            f"the job failed in {found.place}: {error_class(error)}, whose text is withheld because it may hold a record; "
            f"add --traceback to see where"
        ) from withhold_text(error)


@blaming_the_job()
def chosen(
    job: Job, asked: FederateOptions, use: Sequence[str] | None, offers: AvailableTechniques | None = None
) -> FederatedOutcome:
    """The plan for what is asked for."""
    return planned(prepared(job, asked), asked.budget, use, offers or available_techniques())


@dataclass(frozen=True)
class Federation:
    """A federation that is planned, in a folder that this process holds."""

    held: OpenedRun
    given: Prepared
    plan: FederatedPlan
    outcome: FederatedOutcome | None  # None: it goes on with the plan it had

    @blaming_the_job()
    def run(
        self,
        tell: Callable[[Event], None],
        cadence: Cadence,
        heard: Callable[[int, int, int], None] = lambda number, done, given: None,
    ) -> Ended:
        folder = self.held.folder
        if job_file := self.given.job.origin:  # what was imported while devices' work was tried is known by now
            note_modules(
                folder, Path(job_file.file).parent, True, lambda text: note(folder.path, Warned(text)), begins=True
            )
        every = self.given.asked.every or 0
        chosen = self.outcome is not None and self.outcome.choice is not None and self.given.asked.epsilon is not None
        remarks = (NORM_OF_DEVICES,) * chosen
        return Runner(self.given, self.plan, self.held.folder, tell, cadence, every, heard, remarks).run()


def finish(session: Session, ended: Ended) -> dict[str, Any]:
    """What a federation came to, which its folder keeps from now on."""
    found = finished_report(session.request, report_of(session.folder.path), ended)
    session.finish(found)
    return found


@blaming_the_job()
def begun(job: Job, held: OpenedRun, offers: AvailableTechniques | None = None, adopt: bool = False) -> Federation:
    """Plan, or read the plan of the run that goes on. `offers`: the techniques that there are, if a script gives some of its own; `adopt`:
    plan anew where the plan is damaged."""
    offers = offers or available_techniques()
    try:
        asked = from_json(FederateOptions, held.request.asked)
    except Unreadable as error:
        raise held.folder.unusable("run.json", error) from error
    note(held.folder.path, Planning())
    if asked.epsilon is not None and not newest_good(held.folder.checkpoints)[0]:
        check_room(held.folder.path, asked.ledger, asked.ledger_epsilon)
    read = partial(plan_in, offers=offers, use=held.request.use, private=asked.epsilon is not None)
    kept = None if held.changed else kept_plan(held.folder, read, adopt)
    if kept is not None:
        return Federation(held, prepared(job, asked, how=kept.how), kept.plan, None)
    outcome = chosen(job, asked, held.request.use, offers)
    held.folder.write("plan.json", {"shoestring": VERSION, **outcome.as_json()})
    return Federation(held, outcome.given, outcome.chosen, outcome)
