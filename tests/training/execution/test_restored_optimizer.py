"""What an optimizer kept is accepted when it is loaded, and refused with any part of it left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shoestring
from shoestring import Job, Mistake
from shoestring.core.running.run import plain_run
from shoestring.data.feed import Feed
from shoestring.runs.checkpoints.checkpoints import list_checkpoints
from shoestring.training.execution.restored_optimizer import READ, lack_of
from shoestring.training.execution.snapshot import restore

SETTINGS: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"lr": 0.1, "momentum": 0.9},
    optim.Adam: {"amsgrad": True},
    optim.RMSprop: {"momentum": 0.9, "centered": True},
}


def stepped(kind: Callable[..., optim.Optimizer]) -> optim.Optimizer:
    """Two steps of weights of several sizes, one of which has no gradient."""
    shapes = [(3, 5), (4, 4)] if kind is optim.Muon else [(3, 5), (7,), (), (2, 3, 4)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = kind(weights, **SETTINGS.get(kind, {"lr": 0.01}))  # type: ignore[call-overload]
    for _ in range(2):
        for weight in weights[1:]:
            weight.grad = torch.randn(weight.shape)
            weight.grad = weight.grad.to_sparse() if kind is optim.SparseAdam else weight.grad
        optimizer.step()
    return optimizer


def loaded(optimizer: optim.Optimizer, state: dict[str, Any]) -> str:
    fresh = deepcopy(optimizer)
    try:
        fresh.load_state_dict(state)
    except KeyError as error:  # torch looks at some parts itself, and `reading_untrusted` tells of the file
        return f"no {error} for a weight of any size"
    return lack_of(fresh, {})


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.__name__)
def test_every_part_that_an_optimizer_steps_with_is_missed(kind: type[optim.Optimizer]) -> None:
    optimizer = stepped(kind)
    whole = optimizer.state_dict()
    before = [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]
    assert loaded(optimizer, whole) == ""
    for number, state in whole["state"].items():
        for name in state:
            less = deepcopy(whole)
            del less["state"][number][name]
            odd = deepcopy(whole)
            odd["state"][number][name] = torch.zeros(9, 1, 1, 1, 1)
            assert repr(name) in loaded(optimizer, odd), "of another shape"
            if len(state) > 1:  # a weight without any state begins anew, as one that never had a gradient
                assert f"no {name!r} for a weight of" in loaded(optimizer, less)
    for name in ("lr", "weight_decay"):
        if name in optimizer.defaults:
            less = deepcopy(whole)
            del less["param_groups"][0][name]
            assert f"'{name}'" in loaded(optimizer, less)
    after = [one.detach() for group in optimizer.param_groups for one in group["params"]]
    assert all(map(torch.equal, before, after)), "trying moves no weight"


def test_settings_that_no_step_can_be_made_with_are_refused() -> None:
    optimizer = stepped(optim.AdamW)
    whole = optimizer.state_dict()
    whole["param_groups"][0]["lr"] = "../x"
    assert "settings that AdamW can't step with" in loaded(optimizer, whole)


def test_a_checkpoint_without_a_moment_is_refused_by_file_weight_and_name(tmp_path: Path) -> None:
    job = Job(lambda: nn.Linear(4, 2), [(torch.randn(3, 4), torch.tensor([0, 1, 0]))], steps=1)
    for _ in shoestring.train(job, run=tmp_path / "run"):
        pass
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    restore(checkpoint, plain_run(job, job.model(), {}), Feed(job))
    file = checkpoint.path / "state.json"
    lost = ["exp_avg", {"tensor": "state/optimizer/state/1/exp_avg"}]
    text = file.read_text()
    assert json.dumps(lost) in text
    file.write_text(text.replace(json.dumps(lost) + ", ", ""))
    with pytest.raises(Mistake, match=r"step-00000001 .*state\.json has no 'exp_avg' for 'bias'"):
        restore(checkpoint, plain_run(job, job.model(), {}), Feed(job))
