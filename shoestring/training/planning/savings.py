"""Warnings for memory techniques that save nothing here, and for plans that need more memory than plain training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoestring.core.technique import text
from shoestring.core.units import bytes_text
from shoestring.measure.timeline import peak
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.planning.predict import SPREAD, Predictor


def useless_techniques(predictor: Predictor, plan: TrainingPlan) -> Iterator[str]:
    """Remarks on memory techniques that save nothing here: the peak is no lower with them than without."""
    for technique in plan.techniques:
        rest = tuple(one for one in plan.techniques if one is not technique)
        if technique.saves_memory:
            without = peak(predictor.log(rest))
            if plan.predicted["peak_bytes"] >= without.bytes:
                yield (
                    f"{text(technique)} saves nothing here: the peak of tensors is "
                    f"{bytes_text(plan.predicted['peak_bytes'])} with it, in the {plan.details.where}, and "
                    f"{bytes_text(without.bytes)} without"
                )


def excess(plan: TrainingPlan, plain: TrainingPlan) -> str:
    """A warning with both figures if a plan needs more memory than plain training; else empty. Tensors are known to the
    byte; a process counts as larger only if the difference exceeds that between two trials of one plan."""
    if plan.techniques == plain.techniques:
        return ""
    found = [
        f"{bytes_text(most)} of {name}, where plain training needs {bytes_text(least)}"
        for name, most, least, spread in (
            ("tensors", plan.predicted["peak_bytes"], plain.predicted["peak_bytes"], 1.0),
            ("process", plan.predicted["process_bytes"], plain.predicted["process_bytes"], SPREAD),
        )
        if most > spread * least
    ]
    if not found:
        return ""
    saving = [text(technique) for technique in plan.techniques if technique.saves_memory]
    advice = f": leave out {' and '.join(saving)} to save memory" if saving else ""
    return f"{plan} needs more memory than plain training: {', and '.join(found)}{advice}"


def costs_more(plan: TrainingPlan, plain: TrainingPlan) -> bool:
    """Whether a plan has a memory-saving technique and yet needs more memory than plain training."""
    return any(technique.saves_memory for technique in plan.techniques) and bool(excess(plan, plain))


def with_warning(plan: TrainingPlan, plain: TrainingPlan) -> TrainingPlan:
    """The plan with a warning if it needs more memory than plain training."""
    return replace(plan, warnings=tuple(filter(None, (excess(plan, plain),))))
