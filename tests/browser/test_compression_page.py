"""The page of a compressed model as a person sees it: on a phone and on a desktop, in light and dark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoestring.compression.report.compress_report import CompressReport
from shoestring.compression.report.sections import compression_page
from tests.browser.test_page_in_browser import OUTSIDE, OVERLAPS, tab
from tests.compression.report.test_sections import made_report

pytestmark = pytest.mark.browser
WIDTHS = (360, 390, 768, 1280)


def opened_page(opened: Any, folder: Path, report: CompressReport) -> None:
    (folder / "report.html").write_text(compression_page(report))
    opened.goto((folder / "report.html").as_uri())


def fits(opened: Any, width: int) -> bool:
    """Nothing reaches beyond the screen, and no words lie over each other or outside of their drawing."""
    assert opened.evaluate(OVERLAPS) == [] and opened.evaluate(OUTSIDE) == []
    tables = "[...document.querySelectorAll('table')].map(one => one.getBoundingClientRect().right)"
    beyond = [right for right in opened.evaluate(tables) if right > width]  # also those that can be scrolled
    return bool(opened.evaluate("document.documentElement.scrollWidth") <= width) and not beyond


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_fits_the_screen(browser: Any, tmp_path: Path, width: int) -> None:
    with tab(browser, width) as opened:
        opened_page(
            opened, tmp_path, made_report(healed={"seconds": 598.0, "steps": 900, "before": 0.962, "after": 0.9984})
        )
        assert fits(opened, width)
        assert (
            opened.locator(".frontier circle.ring").count() == 2 and opened.locator(".frontier line.limit").count() == 2
        )
        assert set(opened.locator(".frontier text.word").all_text_contents()) >= {"predicted", "measured"}
        bars = opened.locator(".layers td.bar svg")
        assert bars.count() == 2 * 38 + 1 and bars.evaluate_all(
            "all => all.every(one => one.getBoundingClientRect().width > 40)"
        )
        colours = set()
        for scheme in ("light", "dark"):
            opened.emulate_media(color_scheme=scheme)
            colours.add(opened.evaluate("getComputedStyle(document.querySelector('.frontier text.measured')).fill"))
            opened.screenshot(path=tmp_path / f"compression-{width}-{scheme}.png", full_page=True)
        assert len(colours) == 2
    if kept := os.environ.get("SHOESTRING_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        for picture in tmp_path.glob("*.png"):
            shutil.copy(picture, kept)


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_and_points_anywhere_fit_too(browser: Any, tmp_path: Path, width: int) -> None:
    long = "model." + "very_long_name_without_a_space" * 4
    awkward = {
        "layers": [
            {
                "name": long,
                "technique": long,
                "form": "groups",
                "bits": 1e300,
                "bytes": 10**300,
                "shape": [10**11] * 6,
                "damage": 1e-300,
            }
        ],
        "metric": {long: {"predicted": 1e300, "measured": -1e300, "n": 10**14, "standard_error": 1e300}},
        "folder": f"/tmp/{long}",
        "notes": [long * 4],
        "asked": {"size": 8e6, "quality": 0.9999, "latency": 0.001},
    }
    with tab(browser, width) as opened:
        opened_page(opened, tmp_path, made_report(**awkward))
        assert fits(opened, width)
        for size in (8.1e6, 15.8e6, 90e6):
            for fidelity in (0.5, 0.9985, 0.999999998, 1.0):
                both = {"predicted": size, "measured": size * 0.99}
                for asked in ({"size": size, "quality": 0.998}, {"size": 2e6, "quality": fidelity}):
                    opened_page(
                        opened,
                        tmp_path,
                        made_report(
                            size_bytes=both,
                            fidelity={"mean": {"predicted": 0.999999996, "measured": fidelity}},
                            asked=asked,
                        ),
                    )
                    assert fits(opened, width), (size, fidelity, asked)
