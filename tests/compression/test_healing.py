"""What healing learns from, beside outputs. (That it mends, and goes on after a kill: tests/commands/test_compress.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.compression.begin import begin_session
from shoestring.compression.calibration.hidden_states import (
    HiddenStatePair,
    block_pairs,
    healing_objective,
    matching_states,
)
from shoestring.compression.distillation import heal
from shoestring.compression.distillation.losses import parse_objective
from shoestring.compression.healing import heal_session
from shoestring.compression.loading.source import ModelSource, prepare_model
from shoestring.compression.pruning.prune_edits import Drop, apply_prune_edits, prune_edits_to_json
from shoestring.compression.session import CompressOptions
from shoestring.core.budget import Budget
from tests.compression.models import batches, called, loss, vectors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


STEPS = 600  # that a healing takes here, however fast the machine is
JOB = Job(
    model=deep,
    data=lambda: batches(40, vectors(16)),
    held_out=lambda: batches(12, vectors(16), seed=1),
    forward=called,
    loss=loss,
)


def test_a_block_learns_what_is_there_where_the_next_one_begins() -> None:
    model, batch = deep(), batches(1, vectors(16))[0]
    whole = block_pairs(model, called, batch, ())
    assert whole == [(f"layers.{number}", f"layers.{number}") for number in range(6)]
    edit = {"kind": "structure", "edits": prune_edits_to_json([Drop("layers", 6, (0, 3, 5))])}
    found = block_pairs(model, called, batch, [edit])
    assert found == [("layers.0", "layers.2"), ("layers.1", "layers.4"), ("layers.2", "layers.5")]
    small = apply_prune_edits(deep(), (Drop("layers", 6, (0, 3, 5)),))
    states = matching_states(small, model, called, batch, [edit])
    assert [(one.small, one.original) for one in states] == found and all(one.variance > 0 for one in states)
    small.requires_grad_(False)
    small.layers[1].requires_grad_(True)
    left = [one.small for one in matching_states(small, model, called, batch, [edit])]
    assert left == ["layers.1", "layers.2"], "what can't learn is left out"
    assert matching_states(nn.Linear(16, 4), nn.Linear(16, 4), called, batch, ()) == ()


@pytest.mark.parametrize("variance", [1e-9, 0.5, 1e9])
def test_an_objective_can_be_read_whatever_the_states_are(variance: float) -> None:
    terms = parse_objective(healing_objective("kl", [HiddenStatePair("a.0", "b.1", variance)]))
    assert [term.name for term in terms] == ["kl", "hidden"] and terms[1].weight == pytest.approx(
        1 / variance, rel=1e-2
    )


def test_a_model_of_half_its_layers_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "steps_in", lambda job, seconds, clock: STEPS)
    source = ModelSource(JOB, prepare_model(deep()), {"job": None, "edits": [], "decoded": 0}, (), "deep")
    session = begin_session(source, CompressOptions(Budget(), use=("Prune(layers=0.5)",), unseen=64))
    found = heal_session(session, "3s", tmp_path / "healing").healed
    assert 1 - found.after < 0.5 * (1 - found.before)
