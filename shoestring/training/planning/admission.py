"""Check techniques that a user names: by --use, in a plan file, in a Plan or as techniques of a script.

They must be compatible with each other, each must work for this job, and the weights must stay as close to plain
training as requested; else a Mistake says why not. All training with techniques that the planner did not choose for
this very job passes this check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import check_level
from shoestring.core.job import Job
from shoestring.core.technique import in_order
from shoestring.planning.choose import requested_candidate
from shoestring.planning.plan import techniques_text
from shoestring.training.conflicts import conflict
from shoestring.training.planning.predict import Combination
from shoestring.training.technique import TrainingTechnique as Technique


def check_together(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """The techniques in their order; refused if two of them can't be combined. Needs no job."""
    ordered = in_order(techniques)
    if reason := conflict(ordered):
        raise Mistake(f"{techniques_text(ordered)} can't be combined: {reason}")
    return ordered


def admit(techniques: Iterable[Technique], ledger: Ledger, exact: str | None = None) -> Combination:
    """The techniques as a candidate for the ledger's job; a Mistake says why they can't be used."""
    one = requested_candidate(check_together(techniques), ledger)
    check_level(one.exactness, exact, str(one))
    return one


def is_same_job(one: object, other: Job) -> bool:
    """Whether two jobs are made of the very same objects. The user's objects are compared by identity only."""
    return isinstance(one, Job) and all(vars(one)[field.name] is vars(other)[field.name] for field in fields(other))
