"""The page as a person sees it: live, never stale without saying so, and readable on a phone and a desktop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from shoestring.runs.folder import Folder, Lock
from shoestring.runs.reports.report import report_of
from shoestring.show.page import page as report
from shoestring.show.watch.follow import Watch
from shoestring.show.watch.server import WatchServer
from tests.show import made_runs
from tests.show.made_reports import made_report
from tests.show.made_runs import MIB, add, made_run, step_fields
from tests.waiting import HUNG

pytestmark = pytest.mark.browser
WIDTHS = (360, 1400)


@contextmanager
def served(*paths: Path, port: int = 0) -> Iterator[WatchServer]:
    with WatchServer(Watch(paths), port=port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def tab(browser: Any, width: int = 1280, quiet: bool = True, script: bool = True) -> Iterator[Any]:
    """A tab in which nothing may complain, the content policy included."""
    context = browser.new_context(viewport={"width": width, "height": 844}, java_script_enabled=script)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    context.close()
    assert not (quiet and complaints), complaints


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    path = made_run(tmp_path / "runs" / "gpt-1", done=240)
    lock = Lock(path)
    yield path
    lock.release()


def finished(path: Path) -> Path:
    made_run(path, done=400)
    add(path, "finished", step=400)
    parts = {
        "activations": 88 * MIB,
        "optimizer": 62 * MIB,
        "parameters": 41 * MIB,
        "gradients": 21 * MIB,
        "inputs": MIB,
    }
    Folder(path).write(
        "report.json",
        {
            "measured": {"peak_bytes": 221 * MIB, "process_bytes": 531 * MIB, "step_seconds": 0.91, "parts": parts},
            "weights_sha256": "ab12" * 16,
            "shown": "ROMEO:\nWhat light & what <window> breaks?\n\nJULIET:\nIt is the east.",
        },
    )
    return path


def seen(tab: Any, words: str) -> None:
    tab.wait_for_function(
        "words => document.querySelector('main').innerText.replaceAll('\\u00a0', ' ').includes(words)",
        arg=words,
        timeout=1000 * HUNG,
    )


def test_the_page_follows_the_run(browser: Any, run: Path) -> None:
    with served(run) as server, tab(browser) as opened:
        opened.goto(server.url)
        seen(opened, "Step 240 of 400")
        opened.evaluate("scrollTo(0, 700)")
        opened.evaluate("document.querySelector('footer').kept = 'yes'")
        add(run, "step", **step_fields(241))
        add(run, "warning", text="the <b>disk</b> is nearly full")
        seen(opened, "Step 241 of 400")
        seen(opened, "Warning The <b>disk</b> is nearly full")
        assert opened.title() == "Training 60 % · gpt · shoestring"
        assert opened.evaluate("scrollY") == 700
        assert opened.evaluate("document.querySelector('footer').kept") == "yes"  # what did not change was left alone


def test_a_killed_run_shows_as_dead(browser: Any, tmp_path: Path) -> None:
    path = made_run(tmp_path / "gpt-1", done=120)
    root = Path(made_runs.__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, made_runs.__file__, str(path), "120"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"121\n"
        with served(path) as server, tab(browser) as opened:
            opened.goto(server.url)
            seen(opened, "Training")
            child.kill()
            seen(opened, "Died at step")
            seen(opened, "can go on from step 100")
    finally:
        child.kill()
        child.communicate()


def test_a_lost_connection_is_said_and_mended(browser: Any, run: Path) -> None:
    with tab(browser, quiet=False) as opened:
        with served(run) as server:
            opened.goto(server.url)
            seen(opened, "Step 240 of 400")
            assert opened.locator("#connection").is_hidden()
        opened.locator("#connection").wait_for(state="visible", timeout=1000 * HUNG)
        add(run, "step", **step_fields(241))
        with served(run, port=server.server_port):
            seen(opened, "Step 241 of 400")
            assert opened.locator("#connection").is_hidden()


def test_rows_lead_to_runs_and_back(browser: Any, run: Path) -> None:
    made_run(run.parent / "digits <1>", job="digits", done=30)
    with served(run.parent) as server, tab(browser, width=390) as opened:
        opened.goto(server.url)
        seen(opened, "2 runs")
        opened.get_by_role("link", name="digits <1>").click()
        seen(opened, "Died at step 30 of 400.")
        opened.get_by_text("All runs").click()
        seen(opened, "1 training, 1 died")


def test_a_token_leaves_the_address_and_stays_as_a_cookie(browser: Any, run: Path) -> None:
    made_run(run.parent / "second", done=3)
    with served(run.parent) as server, tab(browser) as opened:
        server.token = "secret"
        opened.goto(server.url)
        assert "secret" not in opened.url
        opened.get_by_role("link", name="second").click()
        seen(opened, "Died at step 3 of 400.")


def test_the_report_is_readable_as_a_file(browser: Any, tmp_path: Path) -> None:
    path = finished(tmp_path / "gpt-1")
    (path / "report.html").write_text(report(report_of(path)))
    with tab(browser, width=390) as opened:
        opened.goto((path / "report.html").as_uri())
        seen(opened, "Trained 400 steps inside 600 MiB")
        assert opened.locator("script").count() == 1


OVERLAPS = """() => {
  const texts = [...document.querySelectorAll('main svg')].flatMap(svg => {
    const found = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return found.flatMap(([name, one], place) => found.slice(place + 1).filter(([, other]) => one.left < other.right - 1
      && other.left < one.right - 1 && one.top < other.bottom - 3 && other.top < one.bottom - 3).map(([other]) => name + ' | ' + other));
  });
  return texts;
}"""


# Words of a drawing that its edge cuts
OUTSIDE = """() => [...document.querySelectorAll('main svg text')].filter(text => {
  const edge = text.ownerSVGElement.getBoundingClientRect(), own = text.getBoundingClientRect();
  return own.width && (own.left < edge.left - 1 || own.right > edge.right + 1);
}).map(text => text.textContent)"""

# Tables that can only be read by pushing them sideways
SIDEWAYS = "() => [...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_state_fits_the_screen(browser: Any, run: Path, tmp_path: Path, width: int) -> None:
    add(run, "warning", text="The disk is 91 % full: 3.1 GiB left, a checkpoint takes 104 MiB.")
    made_run(run.parent / "gpt-died", done=137)
    failed, stopped = made_run(run.parent / "gpt-failed", done=12), made_run(run.parent / "gpt-stopped", done=120)
    add(failed, "failed", text="The loss of step 13 is not finite: lower the learning rate.\nunbroken" + "x" * 300)
    add(stopped, "stopped", step=120, text="Asked to stop, after saving.")
    planning = made_run(run.parent / ("digits-with-quite-a-long-name-" + "x" * 60), job="digits", begin=False)
    lock = Lock(planning)
    finished(run.parent / "gpt-finished")
    with served(run.parent) as server, tab(browser, width) as opened:
        for name in ("", *server.watch.runs):
            opened.goto(server.url + (f"run/{name}" if name else ""))
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, name
            assert width > 1000 or opened.evaluate(SIDEWAYS) == [], name
            assert opened.evaluate(OVERLAPS) == [] and opened.evaluate(OUTSIDE) == [], name
            for scheme in ("light", "dark"):
                opened.emulate_media(color_scheme=scheme)
                opened.screenshot(path=tmp_path / f"{name[:16] or 'overview'}-{scheme}-{width}.png", full_page=True)
    lock.release()
    if kept := os.environ.get("SHOESTRING_SCREENSHOTS"):
        for picture in tmp_path.glob("*.png"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, kept)


@pytest.mark.parametrize("script", [True, False], ids=["charts", "pictures"])
@pytest.mark.parametrize("width", WIDTHS)
def test_words_in_drawings_never_overlap(browser: Any, width: int, script: bool) -> None:
    with tab(browser, width, script=script) as opened:
        for count, scale in (
            (2, 1.0),
            (9, 1e-7),
            (11, 5e7),
            (99, 0.1),
            (102, 3.0),
            (990, 1.0),
            (1234, 1e-3),
            (10_400, 60.0),
            (100_000, 30_000.0),
        ):
            values = [scale * (1 + 0.1 * (place % 3)) for place in range(count)]
            samples = [[scale * place, (3 + place) << 20] for place in range(count)]
            opened.set_content(
                report(
                    made_report(
                        {
                            "state": "running",
                            "step": count,
                            "steps": 2 * count,
                            "losses": values,
                            "seconds": values,
                            "samples_process": samples,
                            "budget": {"memory": (count + 5) << 20},
                        }
                    )
                )
            )
            assert opened.locator(".stage").count() == (3 if script else 0)
            assert opened.evaluate(OVERLAPS) == [], (count, scale)
            assert opened.evaluate(OUTSIDE) == [], (count, scale)
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, (count, scale)
