"""Why a model is cut where it is, and stands as it does, in a sentence."""
from __future__ import annotations

from dataclasses import replace

from shoestring.core.units import bytes_text, seconds_text
from shoestring.planning.plan import Plan


def explained(plan: Plan, plain: Plan, memory: int) -> Plan:
    """The plan with why it is cut there; `plain` is what every worker would do with a whole copy of the model, `memory` a device's."""
    if plan.staging is None:
        return plan
    cut, sizes = plan.staging, dict(plan.mesh)
    parts = "+".join(map(str, cut.cut))
    busy = [sum(work.end - work.begin for work in own) for own in cut.timeline]
    copies = f", in {sizes['data']} copies," if sizes["data"] > 1 else ""
    where = (f"{sum(cut.cut)} blocks are cut {parts} over {sizes['stage']} stages{copies} of which the slowest computes for "
             f"{seconds_text(max(busy))} of a step and the fastest for {seconds_text(min(busy))}")
    waits = f"{cut.pieces} pieces of a batch by {cut.schedule} leave workers idle for {cut.bubble:.0%} of a step"
    if not plain.techniques:
        instead = "batches have too few samples for every worker to train a copy of its own"
    elif plain.process_bytes > memory:
        instead = f"with a whole copy on every worker, {plain} needs {bytes_text(plain.process_bytes)} of {bytes_text(memory)}"
    else:
        instead = f"with a whole copy on every worker, {plain} takes {seconds_text(plain.step_seconds)} a step"
    return replace(plan, staging=replace(cut, why=f"{where}; {waits}; {instead}"))
