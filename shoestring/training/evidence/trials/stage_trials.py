"""Whether a plan's stages compute the same as one process: tried once for every setting, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoestring.core.errors import Mistake
from shoestring.core.technique import text
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import StagesResult, StagesTask
from shoestring.training.evidence.trials.stages import try_in_stages
from shoestring.training.group_technique import StagedTechnique
from shoestring.training.technique import TrainingTechnique


@dataclass
class StagedTrials:
    found: dict[StagedTechnique, StagesResult] = field(default_factory=dict)

    def check(self, rehearsals: Rehearsals, evidence: Evidence, techniques: Iterable[TrainingTechnique]) -> str:
        """Refuse techniques whose stages compute something else than one process; returns a remark where that was not
        tried."""
        told = ""
        for technique in techniques:
            if not isinstance(technique, StagedTechnique):
                continue
            tried = technique.trial_setting()
            if tried not in self.found:
                self.found[tried] = result(rehearsals, evidence, tried)
            if self.found[tried].difference:
                raise Mistake(
                    f"the stages of {text(tried)} were tried in one process, and {self.found[tried].difference}"
                )
            if self.found[tried].untried:
                told += (
                    f"; whether stages compute the numbers of one process was not tried: {self.found[tried].untried}"
                )
        return told


def result(rehearsals: Rehearsals, evidence: Evidence, technique: StagedTechnique) -> StagesResult:
    if rehearsals.worker is None:
        if not rehearsals.fits_here(evidence.plain):
            return StagesResult(untried="no real step could be run here")
        return try_in_stages(rehearsals.job, rehearsals.model_to_try, technique)
    if evidence.anchor is None or evidence.anchor.sampled or evidence.anchor.eased:
        return StagesResult(untried="a plain step does not fit this machine, or takes too long")
    task = StagesTask(**rehearsals.about_job((technique,)))
    return rehearsals.ask_worker(
        task, rehearsals.hardware.environment, f"trying the stages of {text(technique)} in one process"
    )
