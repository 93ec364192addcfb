"""What a run leaves behind is read by other people's tools as it is: strictly, and to the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shoestring.jobfile import load_job
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import checkpoint_of
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [{"name": "FusedOptimizer", "knobs": {}}],
        "peak_bytes": 1 << 20,
        "process_bytes": 1 << 29,
        "step_seconds": 0.01,
        "exactness": "to rounding",
    },
}
TIED = """
import torch
from torch import nn
from shoestring import Job

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.words.weight
        self.register_buffer("places", torch.arange(8.0), persistent=False)
    def forward(self, ids):
        return self.head(self.norm(self.words(ids) + self.places))

def job() -> Job:
    return Job(model=Model, data=lambda: [(torch.arange(16), torch.arange(16))] * 9, steps=3)
"""
PRETRAINED = """
import os
import torch, transformers
from shoestring import Job

def job() -> Job:
    ids = torch.arange(32).reshape(2, 16)
    made = lambda: transformers.AutoModelForSequenceClassification.from_pretrained(os.path.join(os.path.dirname(__file__), "base"))
    return Job(model=made, data=lambda: [{"input_ids": ids, "labels": torch.tensor([0, 1])}] * 9, steps=3)
"""
WRAPPER = """
import torch, transformers
from torch import nn
from shoestring import Job

class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2,
                                              intermediate_size=16, vocab_size=50))
        self.head = nn.Linear(16, 2)
    def forward(self, ids):
        return self.head(self.encoder(ids).last_hidden_state[:, 0])

def job() -> Job:
    return Job(model=Wrapper, data=lambda: [(torch.arange(32).reshape(2, 16), torch.tensor([0, 1]))] * 9, steps=2)
"""


def shoestring(place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoestring", *map(str, words)], cwd=place, capture_output=True, text=True, timeout=HUNG
    )


def trained(place: Path, source: str) -> Any:
    """What the command answers of a run of this job, in the folder a."""
    (place / "small.py").write_text(source)
    (place / "saved.json").write_text(json.dumps(PLAN))
    done = shoestring(place, "train", "small.py", "--run", "a", "--plan", "saved.json", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exported(place: Path, kind: str) -> Path:
    done = shoestring(place, "export", "a", "--job", "small.py", "--to", kind, "--out", f"out-{kind}", "--json")
    assert done.returncode == 0, done.stderr
    return place / json.loads(done.stdout)["path"]


def test_exported_weights_are_loaded_strictly_where_weights_are_tied_and_buffers_are_not_kept(tmp_path: Path) -> None:
    trained(tmp_path, TIED)
    found = load_file(exported(tmp_path, "safetensors"))
    model = load_job(tmp_path / "small.py", {}).model()
    model.load_state_dict(found, strict=True)
    assert found.keys() == model.state_dict().keys() and "places" not in found
    assert torch.equal(found["head.weight"], found["words.weight"])
    checkpoint = checkpoint_of(Folder(tmp_path / "a"), None)
    assert "places" in checkpoint.all_weights(), "a run that goes on needs it"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a job whose factory calls from_pretrained."""
    place = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50, num_labels=2
    )
    transformers.BertForSequenceClassification(config).save_pretrained(place / "base")
    (place / "base" / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (place / "base" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    trained(place, PRETRAINED)
    return place


def test_a_model_that_was_made_by_from_pretrained_is_exported_and_gives_the_same_logits(pretrained: Path) -> None:
    out = exported(pretrained, "hf")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    plain = load_job(pretrained / "small.py", {}).model().eval()
    plain.load_state_dict(load_file(exported(pretrained, "safetensors")), strict=True)
    ids = torch.arange(48).reshape(3, 16) % 50
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert (out / "vocab.txt").read_text() == (pretrained / "base" / "vocab.txt").read_text(), (
        "its tokenizer goes along"
    )
    base = transformers.AutoModelForSequenceClassification.from_pretrained(pretrained / "base").state_dict()
    assert not torch.equal(base["classifier.weight"], model.state_dict()["classifier.weight"])


def test_a_model_of_transformers_inside_of_another_is_not_exported_for_from_pretrained(tmp_path: Path) -> None:
    trained(tmp_path, WRAPPER)
    done = shoestring(tmp_path, "export", "a", "--job", "small.py", "--to", "hf")
    assert done.returncode == 2 and "the job's model is a Wrapper, not a model of transformers" in done.stderr
    assert "its part encoder is one (BertModel)" in done.stderr and not (tmp_path / "a" / "export-hf").exists()


def test_a_run_whose_job_is_gone_is_exported_with_all_names_that_the_checkpoint_says_are_weights(
    tmp_path: Path,
) -> None:
    trained(tmp_path, TIED)
    shutil.rmtree(tmp_path / "a" / "job.py", ignore_errors=True)
    (tmp_path / "a" / "job.py").unlink()
    (tmp_path / "small.py").unlink()
    assert "places" not in load_file(exported(tmp_path, "safetensors"))
