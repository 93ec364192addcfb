"""The page of a federated run as a person sees it: on a phone and on a desktop, as a file and live."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoestring.runs.folder import Lock
from tests.browser.test_charts_in_browser import chart, opened_report, over
from tests.browser.test_page_in_browser import OUTSIDE, OVERLAPS, seen, served, tab
from tests.federated.report.test_sections import NASTY, ROWS, federated_run, round_fields
from tests.show.made_runs import add, made_run

pytestmark = pytest.mark.browser
CHARTS = (
    "Loss",
    "Accuracy",
    "Participants",
    "Privacy",
    "Bytes up and down",
    "Accuracy on devices",
    "Speed",
    "Memory while training",
)


def fits(opened: Any, width: int) -> bool:
    """Nothing reaches beyond the screen, and no words lie over each other or outside of their drawing."""
    assert opened.evaluate(OVERLAPS) == [] and opened.evaluate(OUTSIDE) == []
    return bool(opened.evaluate("document.documentElement.scrollWidth") <= width)


@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("script", [True, False], ids=["charts", "pictures"])
def test_every_chart_and_table_fits_the_screen(browser: Any, tmp_path: Path, width: int, script: bool) -> None:
    names = [f"{NASTY} {place} {'y' * (90 * (place % 2))}" for place in range(40)]
    path = federated_run(
        tmp_path / "run",
        done=40,
        epsilon=4.2,
        names=names,
        end={},
        comparisons=[
            {"title": f"A against {NASTY}", "rows": [*ROWS, {**ROWS[0], "metric": "m" * 60, "group": "g" * 60}]}
        ],
    )
    with tab(browser, width, script=script) as opened:
        opened_report(opened, path)
        assert fits(opened, width)
        for name in CHARTS:
            assert chart(opened, name).locator("path.curve" if script else "polyline.curve").count() > 0, name
        assert chart(opened, "Privacy").locator("line.limit").count() == 1
        assert chart(opened, "Privacy").locator("text.limit-text").inner_html() == "budget 4.2"
        assert opened.locator("td.interval svg").count() == 3 and opened.locator("main b b, main b script").count() == 0
        edges = "all => all.every(one => one.getBoundingClientRect().right <= innerWidth && one.getBoundingClientRect().width > 80)"
        assert opened.locator("td.interval svg").evaluate_all(edges)
        opened.screenshot(path=tmp_path / f"federation-{width}-{script}.png", full_page=True)
    if kept := os.environ.get("SHOESTRING_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / f"federation-{width}-{script}.png", kept)


def test_the_pointer_reads_rounds(browser: Any, tmp_path: Path) -> None:
    path = federated_run(tmp_path / "run", done=20)
    with tab(browser) as opened:
        opened_report(opened, path)
        section = chart(opened, "Participants")
        section.scroll_into_view_if_needed()
        over(opened, section.locator(".stage"), 0.985)
        told = section.locator(".tip").inner_text()
        assert told.startswith("round 20") and "took part 9.000" in told and "turned away 1.000" in told


def test_a_live_page_follows_the_rounds_in_its_own_style(browser: Any, tmp_path: Path) -> None:
    path = federated_run(tmp_path / "run", done=20, epsilon=4.0)
    lock = Lock(path)
    with served(path) as server, tab(browser, 390) as opened:
        opened.goto(server.url)
        seen(opened, "Round 20 of 40")
        assert (
            opened.locator(".tiles svg").bounding_box()["height"] < 10
        )  # by the style that the server's policy allows
        add(path, "step", step=21, loss=0.2, seconds=0.5, process=1, most=1)
        add(path, "round", epsilon=2.1, **round_fields(21, ["late"]))
        add(path, "warning", text="news")
        seen(opened, "Round 21 of 40")
        seen(opened, "Epsilon 2.100 of 4 is spent")
        assert fits(opened, 390)
    lock.release()


def test_runs_that_count_rounds_are_overlaid_by_round(browser: Any, tmp_path: Path) -> None:
    for place in range(2):
        federated_run(tmp_path / "runs" / f"run-{place}", done=20, epsilon=2.0 + place)
    with served(tmp_path / "runs") as server, tab(browser, 390) as opened:
        opened.goto(server.url)
        opened.wait_for_function("() => document.querySelectorAll('.stage path.curve').length === 2")
        assert "round" in opened.locator(".stage text").all_text_contents()
        opened.get_by_role("combobox").select_option("bytes up")
        opened.wait_for_function(
            "() => [...document.querySelectorAll('.stage text')].some(one => one.textContent.endsWith(' KiB'))"
        )
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390
        made_run(tmp_path / "runs" / "gpt", done=30)
        seen(opened, "Died at step 30 of 400")
        opened.wait_for_function(
            "() => [...document.querySelectorAll('.stage text')].some(one => one.textContent === 'step or round')"
        )
