"""Prints results of tasks on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoestring.federated.tasks.compare import Comparison
from shoestring.federated.tasks.evaluate import Evaluation
from shoestring.federated.tasks.tables import ReportTable, comparison_tables, evaluation_tables, tuning_tables
from shoestring.federated.tasks.tune import Tuning
from shoestring.show.terminal import PIPE, Screen, indent_text, plain, render_text, table_part

if TYPE_CHECKING:
    from rich.console import RenderableType


def tables_text(tables: Iterable[ReportTable], screen: Screen = PIPE) -> str:
    parts: list[RenderableType] = []
    for one in tables:
        parts += [plain(one.title)] if one.title else []
        parts += [*rows_parts(one, screen), plain("")] if one.rows else []
        parts += [plain(note) for note in one.notes]
    return render_text(parts, screen)


def rows_parts(table: ReportTable, screen: Screen) -> list[RenderableType]:
    """The rows as a table or, on a narrow screen, as a name and a line of figures each."""
    widths = [max(map(len, column)) + 2 for column in zip(*table.rows, strict=True)]
    if screen.width is None or sum(widths) <= screen.width:
        return [table_part(table.rows, table.right)]
    heading, *rows = table.rows
    return [
        part
        for row in rows
        for part in (
            plain(row[0]),
            indent_text(
                ", ".join(f"{label} {cell}".strip() for label, cell in zip(heading[1:], row[1:], strict=True) if cell)
            ),
        )
    ]


def evaluation_text(result: Evaluation, screen: Screen = PIPE) -> str:
    return tables_text(evaluation_tables(result), screen)


def tuning_text(result: Tuning, screen: Screen = PIPE) -> str:
    return tables_text(tuning_tables(result), screen)


def comparison_text(result: Comparison, screen: Screen = PIPE) -> str:
    return tables_text(comparison_tables(result), screen)


def result_text(result: Evaluation | Tuning | Comparison, screen: Screen = PIPE) -> str:
    if isinstance(result, Evaluation):
        return evaluation_text(result, screen)
    return tuning_text(result, screen) if isinstance(result, Tuning) else comparison_text(result, screen)
