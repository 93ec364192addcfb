"""Write the golden files anew: `python -m tests.golden.make`. Only when a format or a name changes on purpose: until there is a release,
the newest format is the only one that is read."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.golden import HERE, USE, VERSIONS, said_in
from tests.waiting import until

PLACE = Path("/tmp/golden")  # stands in the files, so it is the same for everybody
KEPT = ("run.json", "modules.json", "plan.json", "report.json", "events.jsonl", "job.py", "checkpoints")


def stopped(place: Path) -> Path:
    """A run that is told to stop within its eighth step, which it saves."""
    words = ["train", "job.py", "--run", "stopped", *USE, "--save-every", "2", "--keep", "2", "--pause", "0.3"]
    running = subprocess.Popen([sys.executable, "-m", "shoestring", *words], cwd=place)
    events = place / "stopped" / "events.jsonl"
    until(lambda: events.exists() and '"step":7' in events.read_text())
    running.send_signal(signal.SIGTERM)
    running.wait()
    return place / "stopped"


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    shutil.copy(HERE / "job.py", PLACE)
    runs = (stopped(PLACE), PLACE / "finished")
    answers, target = said_in(PLACE), HERE / VERSIONS[-1]
    shutil.rmtree(target, ignore_errors=True)
    for run in runs:
        for name in KEPT:
            if (run / name).is_dir():
                shutil.copytree(run / name, target / run.name / name)
            elif (run / name).exists():
                (target / run.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(run / name, target / run.name / name)
    shutil.copy(PLACE / "saved.json", target / "saved-plan.json")
    (target / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")
    (target / "weights_sha256").write_text(answers["train"]["weights_sha256"] + "\n")


if __name__ == "__main__":
    main()
