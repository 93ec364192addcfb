"""The recipe of the README, as somebody does it: fine-tuned with all it has, killed twice at random, resumed, exported, and loaded by other
people's tools. With MiniLM where its package is installed, else with a small encoder made from a config.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

from shoestring.jobfile import load_job
from shoestring.runs.events.history import History
from shoestring.runs.folder import holder
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_workers")

RECIPE = Path(__file__).parent.parent / "examples" / "fine_tune.py"


SMALL = ["--small", "--batch", "32", "--frozen", "2", "--epochs", "3", "--lr", "0.003"]
PRETRAINED = ["--batch", "8", "--steps", "40", "--every", "8"]


def train(run: Path, flags: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "shoestring",
        "train",
        str(RECIPE),
        "--memory",
        "1500MiB",
        "--use",
        "Checkpoint(every=2)",
        "--save-every",
        "7",
        "--run",
        str(run),
        "--json",
        *flags,
    ]


def trained(run: Path, flags: list[str]) -> dict[str, Any]:
    done = subprocess.run(train(run, flags), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def killed_after(run: Path, step: int, flags: list[str]) -> None:
    """Begin or go on, and kill the worker and its launcher after this step."""
    launcher = subprocess.Popen(train(run, flags), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until(lambda: len(History().read(run).steps) >= step or launcher.poll() is not None, f"step {step}")
    assert launcher.poll() is None, launcher.stderr.read()  # type: ignore[union-attr]
    worker = holder(run)
    launcher.kill()
    if worker is not None and worker > 0:
        os.kill(worker, signal.SIGKILL)
    launcher.wait()
    until(lambda: holder(run) is None, "the end of all of them")  # the kernel frees the lock when the last is gone


def exported(run: Path, kind: str, out: Path) -> Path:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "shoestring",
            "export",
            str(run),
            "--job",
            str(RECIPE),
            "--best",
            "--to",
            kind,
            "--out",
            str(out),
        ],
        check=True,
    )
    return out


@torch.no_grad()
def logits(model: Any, flags: dict[str, Any]) -> torch.Tensor:
    job = load_job(RECIPE, flags)
    assert job.collate is not None
    found: torch.Tensor = model.eval()(**job.collate(job.data()[:4])).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SMALL, PRETRAINED], ids=["small", "pretrained"])
def test_the_recipe_survives_and_ends_in_other_peoples_tools(flags: list[str], tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "a", flags)
    for moment in sorted(random.Random(1).sample(range(3, undisturbed["steps"] - 10), 2)):
        killed_after(tmp_path / "b", moment, flags)
    again = trained(tmp_path / "b", flags)
    for key in ("weights_sha256", "metrics", "best", "ended", "epochs", "steps"):
        assert again[key] == undisturbed[key], key
    assert {"step", "epoch", "loss", "accuracy"} <= set(again["best"])

    tuned = BertForSequenceClassification.from_pretrained(exported(tmp_path / "b", "hf", tmp_path / "tuned"))
    plain = BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "tuned"))
    plain.load_state_dict(
        load_file(exported(tmp_path / "b", "safetensors", tmp_path / "best.safetensors")), strict=True
    )
    other = BertForSequenceClassification.from_pretrained(exported(tmp_path / "a", "hf", tmp_path / "other"))
    first, *others = (logits(model, {"small": "--small" in flags}) for model in (tuned, plain, other))
    assert all(torch.equal(first, one) for one in others)
