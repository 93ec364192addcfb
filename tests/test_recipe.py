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
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

from shoestring.jobfile import loaded_job
from shoestring.runs.folder import holder
from shoestring.runs.history import History

pytestmark = pytest.mark.usefixtures("warm_workers")

RECIPE = Path(__file__).parent.parent / "examples" / "fine_tune.py"


def train(run: Path) -> list[str]:
    return [sys.executable, "-m", "shoestring", "train", str(RECIPE), "--memory", "1500MiB", "--use", "Checkpoint(every=2)", "--batch",
            "32", "--epochs", "5", "--save-every", "7", "--run", str(run), "--json"]


def trained(run: Path) -> dict[str, Any]:
    done = subprocess.run(train(run), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def killed_after(run: Path, step: int) -> None:
    """Begin or go on, and kill the worker and its launcher after this step."""
    launcher = subprocess.Popen(train(run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(History().read(run).steps) < step and launcher.poll() is None:
        time.sleep(0.02)
    assert launcher.poll() is None, "it must not be done yet"
    worker = holder(run)
    launcher.kill()
    if worker is not None and worker > 0:
        os.kill(worker, signal.SIGKILL)
    launcher.wait()


def exported(run: Path, kind: str, out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "shoestring", "export", str(run), "--best", "--to", kind, "--out", str(out)], check=True)
    return out


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    batch = next(iter(loaded_job(RECIPE, {}).collate(loaded_job(RECIPE, {}).data()[:4]) for _ in range(1)))
    found: torch.Tensor = model.eval()(**batch).logits
    return found


def test_the_recipe_survives_and_ends_in_other_peoples_tools(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "a")
    moments = sorted(random.Random(1).sample(range(3, 4 * 30), 2))
    for moment in moments:
        killed_after(tmp_path / "b", moment)
    again = trained(tmp_path / "b")
    for key in ("weights_sha256", "metrics", "best", "ended", "epochs", "steps"):
        assert again[key] == undisturbed[key], key
    assert {"step", "epoch", "loss", "accuracy"} <= set(again["best"])

    tuned = BertForSequenceClassification.from_pretrained(exported(tmp_path / "b", "hf", tmp_path / "tuned"))
    plain = BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "tuned"))
    plain.load_state_dict(load_file(exported(tmp_path / "b", "safetensors", tmp_path / "best.safetensors")), strict=True)
    other = BertForSequenceClassification.from_pretrained(exported(tmp_path / "a", "hf", tmp_path / "other"))
    assert torch.equal(logits(tuned), logits(plain)) and torch.equal(logits(tuned), logits(other))
