"""Makes docs/page.png, the picture of a run's page in the README: trains the job below under a budget and photographs its report.

python docs/picture.py        some minutes on two cores; needs scikit-learn, playwright and Chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
JOB = '''"""Handwritten digits: held-out accuracy after every epoch, a rate that warms up and falls, clipped gradients."""
import torch
from shoestring import Job
from shoestring.jobs.digits import Residual, digits
from torch import nn


def part(begin, end):
    return torch.utils.data.Subset(digits(), range(begin, end))


def job(width: int = 48, depth: int = 8, batch: int = 128, rate: float = 1e-3, steps: int = 110):
    return Job(
        model=lambda: nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *(Residual(width) for _ in range(depth)),
                                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(width, 10)),
        data=lambda: part(0, 1400), batch=batch, steps=steps, clip=1.0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1),
        held_out=lambda: part(1400, 1797), goal="max accuracy",
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()})
'''


def photographed(page: Path, picture: Path, width: int = 1280, height: int = 800) -> None:
    """The top of a page, with the pointer on its first chart."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        tab.goto(page.as_uri())
        box = tab.locator(".stage").first.bounding_box()
        assert box is not None, "the page has a chart"
        tab.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + 0.4 * box["height"])
        tab.screenshot(path=picture)
        browser.close()


with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    (place / "digits.py").write_text(JOB)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "shoestring",
            "train",
            place / "digits.py",
            "--memory",
            "475MiB",
            "--run",
            place / "run",
        ],
        check=True,
        cwd=ROOT,
    )
    photographed(place / "run" / "report.html", ROOT / "docs" / "page.png")
