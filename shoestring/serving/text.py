"""What was planned for a server, for the terminal."""

from __future__ import annotations

from shoestring.core.units import seconds_text, unit_text
from shoestring.serving.room import ServingOutcome, ServingPlan
from shoestring.show.terminal import Screen, table

HOUR = 3600


def outcome_text(outcome: ServingOutcome, screen: Screen, price: float | None = None) -> str:
    """The plan, those that it was chosen from, and what it will do under load."""
    limits = " and ".join(f"{limit.name} {unit_text(limit.value, limit.unit)}" for limit in outcome.budget.limits())
    plans = [(outcome.chosen, "chosen")]
    others = (outcome.chosen, *(plan for plan, _ in outcome.runners_up))
    if outcome.plain is not None and all(outcome.plain.techniques != one.techniques for one in others):
        plans.append((outcome.plain, "one request at a time"))
    rows = [["", "most", "an answer", "memory", ""], *(row(plan, why) for plan, why in (*plans, *outcome.runners_up))]
    details = outcome.chosen.details
    loads = [["at", *(f"{100 * share:g} % within" for share in shares(outcome.chosen))]]
    for rate in dict.fromkeys(one.requests_per_second for one in details.loads):
        times = [seconds_text(one.seconds) for one in details.loads if one.requests_per_second == rate]
        loads.append([f"{rate:,.3g} requests/s ({rate / details.capacity:.0%})", *times])
    cost = [] if price is None else ["", cost_text(outcome.chosen, price)]
    head = f"plan{f' for {limits}' * bool(limits)}, {outcome.chosen.exactness.word}: {outcome.chosen}"
    return "\n".join(
        [head, "", table(rows, screen=screen), "", "predicted under load:", "", table(loads, screen=screen), *cost]
    )


def row(plan: ServingPlan, why: str) -> list[str]:
    known = plan.numbers()
    return [
        str(plan),
        f"{known['requests_per_second']:,.3g}/s",
        seconds_text(known["latency_seconds"]),
        unit_text(known["process_bytes"], "bytes"),
        why,
    ]


def shares(plan: ServingPlan) -> list[float]:
    return list(dict.fromkeys(one.share for one in plan.details.loads))


def cost_text(plan: ServingPlan, price: float) -> str:
    """What a million requests cost at the highest rate."""
    rate = plan.numbers()["requests_per_second"]
    return f"a million requests cost {price * 1e6 / (rate * HOUR):,.3g} at {rate:,.3g} requests/s" if rate else ""
