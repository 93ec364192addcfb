"""Run folders of earlier versions: the stopped ones are gone on with to the same bits, the finished ones are shown and exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.files.codec import from_json, to_json
from shoestring.core.files.regular import read_regular
from shoestring.core.files.seal import unseal
from shoestring.runs.events.event_log import line_of, read, record_of
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import checkpoint_of, export_steps, export_weights
from shoestring.runs.reports.report import report_of
from shoestring.runs.request import Request
from shoestring.show.page import page
from tests.golden import lost
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("version-*"))


def trained(place: Path, version: str, kind: str) -> tuple[dict[str, Any], str]:
    """What the command answers on a copy of a run folder, and what it tells a person."""
    shutil.copy(GOLDEN / "job.py", place / "job.py")
    shutil.copytree(GOLDEN / version / kind, place / "run")
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", "train", "job.py", "--run", "run", "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def shape(value: Any) -> Any:
    """The keys and types of a JSON value; of a list, those of its first entry. A whole number may stand for a fraction."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stopped_run_of_an_earlier_version_ends_with_the_same_bits(version: str, tmp_path: Path) -> None:
    answer, _ = trained(tmp_path, version, "stopped")
    assert (
        answer["weights_sha256"] == (GOLDEN / version / "weights_sha256").read_text().strip() and answer["steps"] == 12
    )
    newest = json.loads((GOLDEN / VERSIONS[-1] / "answers.json").read_text())["train"]
    assert lost(newest, answer) == [], "what programs read of the answer is still there"
    assert shape(Folder(tmp_path / "run").read("report.json")) == shape(answer)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_finished_run_of_an_earlier_version_is_shown_and_exported(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version / "finished", tmp_path / "run")
    folder = Folder(tmp_path / "run")
    report = report_of(folder.path)
    sha = (GOLDEN / version / "weights_sha256").read_text().strip()
    assert (
        report.state == "finished"
        and not report.damage
        and report.weights_sha256 == sha
        and report.step == report.steps == 12
    )
    assert report.job == "job" and report.exactness is not None and report.figures["peak_bytes"].off == 0.0
    assert sha in page(report)
    export_weights(checkpoint_of(folder, None), tmp_path / "weights.safetensors")
    told, _ = export_steps(folder, "json", tmp_path / "told.json")
    assert json.loads(told.read_text())["losses"] == list(report.curves.losses)
    rows, _ = export_steps(folder, "csv", tmp_path / "told.csv")
    assert len(rows.read_text().splitlines()) == 13


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["stopped", "finished"])
def test_requests_and_events_are_written_as_they_were(version: str, kind: str) -> None:
    path = GOLDEN / version / kind
    data, _ = unseal(read_regular(path / "run.json"))
    assert data == to_json(from_json(Request, data))
    found = read(path)
    lines = (path / "events.jsonl").read_bytes().splitlines()
    assert found.damaged == 0 and len(found.events) == len(lines)
    for event, line in zip(found.events, lines, strict=True):
        written = record_of(event)
        assert line == line_of(written)
