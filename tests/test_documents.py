"""The job of every chapter of docs/coming_from.md is made as it is written there, and it trains. Links lead to files that are there, and
contracts name tests that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shoestring

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
CHAPTERS = dict(re.findall(r"^## From (\w+).*?```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


def made(chapter: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(CHAPTERS[chapter], f"docs/coming_from.md, {chapter}", "exec"), names)
    return names["job"]()


def test_every_chapter_has_a_job() -> None:
    assert list(CHAPTERS) == ["Hugging", "Lightning", "Flower"]


@pytest.mark.parametrize("chapter", ["Hugging", "Lightning"])
def test_the_job_trains_and_measures_what_it_says(chapter: str) -> None:
    steps = list(shoestring.train(made(chapter), ()))
    assert {"loss", "accuracy"} <= set(steps[-1].metrics or {}) and steps[-1].number == {
        "Hugging": 12,
        "Lightning": 20,
    }[chapter]


def test_the_federated_job_plays_a_round(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(CHAPTERS["Flower"], encoding="utf-8")
    found = shoestring.federate(file, clients=10, per_round=4, rounds=1, use=["FedAdam(lr=0.01)"], run=tmp_path / "run")
    assert found.report["rounds"] == 1


@pytest.mark.parametrize(
    "page", ["README.md", "ARCHITECTURE.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
)
def test_every_link_leads_to_a_file(page: str) -> None:
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not ((ROOT / page).parent / link).exists()]


def test_every_contract_names_a_test_that_is_there() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "shoestring").rglob("*.py")]
    named = {(one.name, test) for one in documents for test in re.findall(r"tests/[\w/]+\.py", one.read_text("utf-8"))}
    assert len(named) > 50 and [pair for pair in sorted(named) if not (ROOT / pair[1]).is_file()] == []
