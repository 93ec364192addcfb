"""Charts to work with: values under the pointer and by keys, scales, smoothing, zoom, several runs over each other, a table that sorts."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import pytest

from shoestring.runs.folder import Lock
from shoestring.runs.reports.report import Report, report_of
from shoestring.show.page import page as report
from tests.browser.test_page_in_browser import seen, served, tab
from tests.show.made_runs import add, made_run, metrics_at, step_fields

pytestmark = pytest.mark.browser


def validated_run(path: Path, done: int = 200) -> Path:
    made_run(path, done=done, steps=done, per_epoch=50)
    add(path, "finished", step=done, ended="epochs", epoch=done // 50)
    return path


def opened_report(opened: Any, path: Path, told: Report | None = None) -> None:
    """The report of a run as a file, opened."""
    (path / "report.html").write_text(report(told or report_of(path)))
    opened.goto((path / "report.html").as_uri())


def chart(opened: Any, title: str) -> Any:
    return opened.locator("section", has=opened.get_by_role("heading", name=title, exact=True))


def over(opened: Any, stage: Any, share: float) -> None:
    """The pointer over a chart, at a share of its width."""
    box = stage.bounding_box()
    opened.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)


def ticks(section: Any) -> list[str]:
    return [text for text in section.locator(".stage text").all_text_contents() if text[:1].isdigit()]


def test_every_line_tells_its_value_under_the_pointer(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    with tab(browser) as opened:
        opened_report(opened, path)
        loss = chart(opened, "Loss")
        assert loss.locator(".tip").is_hidden()
        over(opened, loss.locator(".stage"), 0.985)  # the last step
        told = loss.locator(".tip").inner_text()
        assert "step 200 · epoch 4" in told and f"training {step_fields(200)['loss']:.4g}".rstrip("0") in told
        assert f"held out {metrics_at(200)['loss']:.4g}".rstrip("0") in told and "best" in told
        over(opened, loss.locator(".stage"), 0.5)
        assert "at 100" in loss.locator(".tip").inner_text()  # where the validation was that is nearest
        opened.mouse.move(5, 5)
        assert loss.locator(".tip").is_hidden()
        assert loss.locator("text.epoch").all_text_contents() == ["epoch 2", "epoch 3", "epoch 4"]
        assert loss.locator("circle.best").count() == 1
        assert all(
            chart(opened, name).locator("path.curve").count() == 1
            for name in ("Accuracy", "Learning rate", "Gradient norm")
        )


def test_the_keyboard_reads_values_and_zooms(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    with tab(browser) as opened:
        opened_report(opened, path)
        loss = chart(opened, "Loss")
        loss.locator(".stage").focus()
        opened.keyboard.press("End")
        assert "step 200" in loss.get_by_role("status").inner_text()
        opened.keyboard.press("ArrowLeft")
        assert "step 199 · epoch 4: training" in loss.get_by_role("status").inner_text()
        opened.keyboard.press("+")
        assert loss.get_by_role("button", name="Show all").is_visible()
        opened.keyboard.press("Escape")
        assert loss.get_by_role("button", name="Show all").is_hidden()


def test_dragging_zooms_all_charts_of_steps_and_a_button_shows_all(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    with tab(browser) as opened:
        opened_report(opened, path)
        loss, rate = chart(opened, "Loss"), chart(opened, "Learning rate")
        before = ticks(loss), ticks(rate)
        over(opened, loss.locator(".stage"), 0.5)
        opened.mouse.down()
        over(opened, loss.locator(".stage"), 0.7)
        opened.mouse.up()
        assert "120" in ticks(loss) and "1" not in ticks(loss) and ticks(rate) != before[1]
        loss.get_by_role("button", name="Show all").click()
        assert (ticks(loss), ticks(rate)) == before


def test_a_logarithmic_scale_and_smoothing(browser: Any, tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=100, loss=lambda step: 10.0 ** (-step / 25))
    with tab(browser) as opened:
        opened_report(opened, path)
        loss = chart(opened, "Loss")
        path_before = loss.locator("path.curve").first.get_attribute("d")
        loss.get_by_role("button", name="Log scale").click()
        assert loss.get_by_role("button", name="Log scale").get_attribute("aria-pressed") == "true"
        assert {"0.001", "0.01", "0.1"} <= set(ticks(loss))
        loss.get_by_role("button", name="Log scale").click()
        assert (
            loss.locator("path.curve").first.get_attribute("d") == path_before
            and loss.locator("path.faint").count() == 0
        )
        loss.get_by_role("slider", name="Smoothing").fill("60")
        assert (
            loss.locator("path.faint").get_attribute("d")
            == path_before
            != loss.locator("path.curve").last.get_attribute("d")
        )


def test_a_line_can_be_hidden(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    with tab(browser) as opened:
        opened_report(opened, path)
        loss = chart(opened, "Loss")
        loss.get_by_role("button", name="held out").click()
        over(opened, loss.locator(".stage"), 0.5)
        assert "held out" not in loss.locator(".tip").inner_text() and loss.locator("path.curve").count() == 1


def test_metrics_that_are_not_numbers_are_gaps(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    add(path, "validated", step=201, epoch=4, metrics={"loss": nan, "accuracy": float("inf")})
    add(path, "step", step=202, loss=nan, seconds=1.0, process=1, most=1)
    with tab(browser) as opened:
        opened_report(opened, path)
        seen(opened, "The loss has not been finite since step 202.")
        data = json.loads(chart(opened, "Loss").locator("figure").get_attribute("data-chart"))
        assert data["lines"][1]["y"][-1] is None and data["lines"][0]["y"][-1] is None


def test_without_a_script_the_charts_are_pictures(browser: Any, tmp_path: Path) -> None:
    path = validated_run(tmp_path / "run")
    with tab(browser, script=False) as opened:
        opened_report(opened, path)
        loss = chart(opened, "Loss")
        assert (
            loss.locator("svg polyline").count() == 2
            and loss.locator("circle.best").count() == loss.get_by_role("img").count() == 1
        )


def test_a_live_chart_keeps_its_zoom(browser: Any, tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=240, per_epoch=50)
    lock = Lock(path)
    with served(path) as server, tab(browser) as opened:
        opened.goto(server.url)
        loss = chart(opened, "Loss")
        loss.locator(".stage").focus()
        opened.keyboard.press("Home")
        opened.keyboard.press("+")
        before = ticks(loss)
        add(path, "step", **step_fields(241, 50))
        add(path, "warning", text="news")
        seen(opened, "Step 241 of 400")
        assert ticks(loss) == before and loss.get_by_role("button", name="Show all").is_visible()
        assert "step 1 " in loss.locator(".tip").inner_text() and loss.locator(".stage").evaluate(
            "one => one === document.activeElement"
        )
    lock.release()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Ten runs that differ in a flag."""
    for place in range(10):
        made_run(
            tmp_path / "runs" / f"run-{place}",
            done=60 + place,
            per_epoch=20,
            flags={"width": 320, "lr": f"{(place * 7) % 10}e-4"},
        )
    return tmp_path / "runs"


def test_runs_are_overlaid_as_they_are_ticked(browser: Any, runs: Path) -> None:
    with served(runs) as server, tab(browser, width=1400) as opened:
        opened.goto(server.url)
        seen(opened, "All runs have width 320.")
        stage = opened.locator(".stage")
        opened.wait_for_function("document.querySelectorAll('.stage path.curve').length === 8")
        opened.get_by_role("checkbox", name="Draw all runs").uncheck()
        opened.wait_for_function("document.querySelectorAll('.stage path.curve').length === 0")
        for name in ("run-1", "run-9"):
            opened.get_by_role("checkbox", name=f"Draw {name}").check()
        opened.wait_for_function("document.querySelectorAll('.stage path.curve').length === 2")
        over(opened, stage, 0.3)
        assert {"run-1", "run-9"} == {text.strip() for text in opened.locator(".tip span").all_inner_texts()}
        opened.get_by_role("combobox").select_option("accuracy")
        opened.wait_for_function("document.querySelectorAll('.stage circle').length >= 6")
        assert opened.get_by_role("combobox").locator("option").all_inner_texts() == [
            "training loss",
            "held-out loss",
            "accuracy",
            "learning rate",
            "gradient norm",
            "memory",
        ]


def test_the_table_is_sorted_by_any_column_and_stays_so(browser: Any, runs: Path) -> None:
    def column(place: int) -> list[str]:
        return opened.locator(f"table.runs tbody tr > :nth-child({place})").all_inner_texts()

    with served(runs) as server, tab(browser, width=1400) as opened:
        opened.goto(server.url)
        opened.get_by_role("button", name="lr").click()
        assert column(4) == [f"{place}e-4" for place in range(10)]
        opened.get_by_role("button", name="lr").click()
        assert column(4) == [f"{place}e-4" for place in reversed(range(10))]
        assert opened.get_by_role("columnheader", name="lr").get_attribute("aria-sort") == "descending"
        add(runs / "run-3", "failed", text="it ran out of <memory>. And more")
        seen(opened, "It ran out of <memory>.")
        assert column(4) == [f"{place}e-4" for place in reversed(range(10))]
        assert opened.get_by_role("button", name="lr").evaluate("one => one === document.activeElement")
        opened.get_by_role("button", name="Run", exact=True).click()
        assert [name.split()[0] for name in column(2)] == [f"run-{place}" for place in range(10)]
