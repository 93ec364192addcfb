"""The planner's outcome in the terminal: the chosen plan, the alternatives, and where the figures come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import localtime, strftime
from typing import TYPE_CHECKING, Any

from shoestring.core.technique import text
from shoestring.core.units import seconds_text, unit_text
from shoestring.planning.plan import Outcome, Plan
from shoestring.show.terminal import PIPE, Screen, align_columns, indent_text, plain, render_text, table_part

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoestring.core.figures import Quantity

NARROW = 100  # below this width, a table has no room for the names of plans


def outcome_text(
    outcome: Outcome[Any], columns: Sequence[Quantity], screen: Screen = PIPE, about: Iterable[RenderableType] = ()
) -> str:
    """The planner's outcome for a person. `columns`: the figures by which plans are compared; the last one is the
    objective. `about`: the room's own lines about the chosen plan."""
    chosen = outcome.chosen
    limits = " and ".join(unit_text(one.value, one.unit) for one in outcome.budget.limits())
    level = chosen.exactness
    parts: list[RenderableType] = [
        plain(f"plan{f' for {limits}' if limits else ''}, {level.word}: {chosen}"),
        indent_text(f"{level.word}: {level.meaning}"),
        "",
        *(indent_text(f"{text(one)}: {one.why}") for one in chosen.techniques),
        *[""] * bool(chosen.techniques),
        *(line for warning in chosen.warnings for line in (plain(f"warning: {warning}"), "")),
        *plan_comparison(plan_rows(outcome, columns), screen),
        "",
        *about,
        *more_budget(outcome.more, columns),
        *not_used(outcome.refused),
        *basis(outcome),
    ]
    return render_text(parts, screen)


def plan_rows(outcome: Outcome[Any], columns: Sequence[Quantity]) -> list[list[str]]:
    """A heading and a row for the chosen plan, the plain one and the runners-up; the plain one is one of these if it fits."""
    chosen, simplest, runners_up = outcome.chosen, outcome.plain, outcome.runners_up
    plans = [(chosen, f"{'as asked' if outcome.asked else 'chosen'}, {chosen.exactness.word}")]
    if simplest is not None and chosen.techniques != simplest.techniques:
        lost = [why for plan, why in runners_up if plan.techniques == simplest.techniques]
        plans += [(simplest, ", ".join(["the simplest plan" if simplest.techniques else "no technique", *lost]))]
        runners_up = tuple(one for one in runners_up if one[0].techniques != simplest.techniques)
    return [
        ["", *(one.label for one in columns), ""],
        *(
            [str(plan), *(one.text(plan.predicted.get(one.name) or None) for one in columns), why]
            for plan, why in (*plans, *runners_up)
        ),
    ]


def plan_comparison(rows: Sequence[Sequence[str]], screen: Screen) -> list[RenderableType]:
    """Plans as a table, or, if that would break names, as a name and a line of figures each."""
    figures_at = range(1, len(rows[0]) - 1)
    if screen.width is None or screen.width >= NARROW:
        return [table_part(rows, right=figures_at, bold=1)]
    return [
        part
        for name, *cells, why in rows[1:]
        for part in (
            plain(name),
            indent_text(
                ", ".join(f"{label} {cell}" for label, cell in zip(rows[0][1:-1], cells, strict=True)) + f": {why}"
            ),
        )
    ]


def more_budget(more: Sequence[Plan[Any, Any]], columns: Sequence[Quantity]) -> list[RenderableType]:
    """What the next better plans need."""
    if not more:
        return []
    *needs, objective = columns
    rows = [
        (
            ", ".join(f"{one.label} {one.text(plan.predicted.get(one.name))}" for one in needs),
            f"{objective.label} {objective.text(plan.predicted.get(objective.name))} with {plan}",
        )
        for plan in more
    ]
    return ["", plain("what a larger budget would buy, by arithmetic:"), align_columns(rows, right=0)]


def not_used(refused: Sequence[tuple[str, str]]) -> list[RenderableType]:
    if not refused:
        return []
    return ["", plain("not used:"), *(indent_text(f"{name}: {why}") for name, why in refused)]


def basis(outcome: Outcome[Any]) -> list[RenderableType]:
    """How many plans were considered, and where the chosen one's figures come from."""
    lines = [""]
    if not outcome.asked:
        took = f"; planned in {seconds_text(outcome.seconds)}" if outcome.seconds else ""
        tried = f"{outcome.tried:,} combination{'s' * (outcome.tried != 1)} tried"
        lines += [f"{tried}, {outcome.fitting:,} fit by arithmetic{took}"]
    lines += [f"how its figures are known: {outcome.chosen.basis}"] if outcome.chosen.basis else []
    lines += [measurement_note(outcome.measured_at)] if outcome.measured_at else []
    return [plain(line) for line in lines]


def measurement_note(when: float) -> str:
    """When the figures of a plan were measured, and what to do if that is too long ago."""
    return (
        f"measured earlier, at {strftime('%Y-%m-%d %H:%M', localtime(when))}, on this machine; files that the job reads may have "
        f"changed since, which nobody can know: --fresh-plan measures again"
    )
