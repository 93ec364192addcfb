"""Base class of techniques after which samples leave early."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.calibration.latency import Latency
from shoestring.compression.exits.evidence import gather_evidence, seconds_by_part
from shoestring.compression.exits.leaves_early import LeavesEarly
from shoestring.compression.exits.thresholds import NEVER, ExitEvidence, Point
from shoestring.compression.exits.within_seconds import latency_at
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core.errors import Mistake
from shoestring.core.technique import text

FAILURES = (RuntimeError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError)  # of a user's model


class FoundExits(NamedTuple):
    """A model whose samples leave early, and what is expected of it."""

    model: LeavesEarly
    edit: Mapping[str, Any]  # the manifest's entry to make it again
    latency: Latency | None  # of an answer; None: not timed


class LeaveEarly(Restructure, ABC):
    """Abstract: `find_exits` makes the model, once for every calibration."""

    @abstractmethod
    def find_exits(self, study: Calibration) -> FoundExits:
        """Raises Mistake if no exit is worth what it costs, or the model can't have any."""

    def restructure(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        found = self.exits_for(study)
        return found.model, found.edit, ()

    def derive(self, study: Calibration) -> Calibration:
        return replace(super().derive(study), predicted=self.exits_for(study).latency)

    def exits_for(self, study: Calibration) -> FoundExits:
        found = study.parts(text(self), lambda: self.try_exits(study))
        if isinstance(found, Mistake):
            raise found
        assert isinstance(found, FoundExits), "it was stored so"
        return found

    def try_exits(self, study: Calibration) -> FoundExits | Mistake:
        try:
            return self.find_exits(study)
        except Mistake as error:
            return error
        except FAILURES as error:
            return Mistake(f"samples of this model can't leave early: {type(error).__name__}: {str(error)[:200]}")


def evidence_of(study: Calibration, model: LeavesEarly) -> tuple[ExitEvidence, ExitEvidence]:
    """The outputs of all exits, with the costs of whole batches, and of single samples."""
    batches = seconds_by_part(model, study.others[0], forward=study.forward)
    found = gather_evidence(model, study.others, batches, forward=study.forward)
    return found, replace(found, **seconds_by_part(model, study.sample, forward=study.forward)._asdict())


def predicted_latency(study: Calibration, single: ExitEvidence, point: Point) -> Latency | None:
    return latency_at(single, point, study.clock.plain) if study.timed else None


def expected_entry(point: Point) -> dict[str, Any]:
    """The manifest's entry of what to expect: of the exits that are on, and of the end."""
    on = [*(one < NEVER for one in point.thresholds), True]
    shares = [one for one, used in zip(point.shares, on, strict=True) if used]
    return {**{name: asdict(point)[name] for name in ("speedup", "loss", "rows")}, "shares": shares}
