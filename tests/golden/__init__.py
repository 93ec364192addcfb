"""What earlier versions wrote, frozen: answers of every command in JSON, and run folders, of 0.1 before and after files had seals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSIONS = ("version-1", "version-2")


def answers(version: str) -> dict[str, Any]:
    """What commands printed with --json, by command."""
    found: dict[str, Any] = json.loads((HERE / version / "answers.json").read_text())
    return found


def lost(before: Any, now: Any, where: str = "") -> list[str]:
    """What of an answer is not there any more, or of another kind; what is new is fine. Which parts stand in a peak depends on the plan.

    >>> lost({"a": 1, "b": {"c": "x"}}, {"a": 2.5, "b": {"c": None}, "d": 3})
    ['.b.c was str and is NoneType']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{where}.{name} is gone" for name in before if name not in now and not where.endswith(".parts")]
        return gone + [
            one for name in before if name in now for one in lost(before[name], now[name], f"{where}.{name}")
        ]
    if isinstance(before, list) and isinstance(now, list):
        return lost(before[0], now[0], f"{where}[0]") if before and now else []
    number = (int, float)
    alike = type(before) is type(now) or (type(before) in number and type(now) in number)
    return [] if alike or before is None else [f"{where} was {type(before).__name__} and is {type(now).__name__}"]
