"""Recordings of gradients: the same bits as the live computation; models that can't be recorded are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.clients.local import Local
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort import Engine
from shoestring.federated.simulation.cohort.stacked.recording import AFTER, Gradients
from tests.federated.simulation.cohort.cases import (
    Transformer,
    cnn,
    devices_of,
    engine,
    images,
    job_of,
    of_tokens,
    started,
    tokens,
)

LOCAL = Local(batch=6, epochs=AFTER, lr=0.01)


class Steered(nn.Module):
    """Looks at a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x.flatten(1))
        return out if bool((x.sum() > -1e9).all()) else -out


class Counting(Steered):
    """Another function after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inside(x.flatten(1))
        return out / self.calls


class Patient(Counting):
    """Counts its calls, though for now that changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inside(x.flatten(1))
        return -out if self.calls > 10_000 else out


def worked(
    model: Callable[[], nn.Module],
    records: bool,
    monkeypatch: pytest.MonkeyPatch,
    data: Any = images,
    local: Local = LOCAL,
    **more: Any,
) -> tuple[Tensor, Engine]:
    job = job_of(model, local, **more)
    row, found = started(job)[1], engine(job, "stacked")
    if not records:
        monkeypatch.setattr(Gradients, "record", lambda self, call, tensors, shape: call(*tensors))
    devices = devices_of(job, (12, 12, 13), data)
    moved = found.train_updates(row.expand(3, -1), devices, Objective(job.local), [0, 1, 2])
    monkeypatch.undo()
    return moved.rows, found


def recordings(found: Engine) -> list[int]:
    method: Any = found.method
    return [len(one.recordings) for one in (method.gradients, method.gradients_of_classes)]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 5))


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (cnn, {}),
        (Transformer, {"data": tokens, "loss": of_tokens}),
        (dropping, {}),
        (cnn, {"local": Local(batch=6, epochs=AFTER, optimizer=torch.optim.Adam)}),
    ],
)
def test_a_recording_gives_the_same_bits(
    model: Callable[[], nn.Module], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, found = worked(model, True, monkeypatch, **more)
    plain, other = worked(model, False, monkeypatch, **more)
    assert sum(recordings(found)) >= 1 and sum(recordings(other)) == 0
    assert torch.equal(recorded, plain)


@pytest.mark.parametrize("model", [Steered, Counting, Patient])
def test_what_looks_at_values_or_keeps_count_is_not_recorded(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if model is Steered:  # vmap refuses it, so autograd is asked directly
        gradients = Gradients(
            lambda weights, batch, shares: nn.functional.cross_entropy(
                torch.func.functional_call(inside, {name: one[0] for name, one in weights.items()}, (batch[0],)),
                batch[1],
            ).view(1),
            Steered(),
        )
        inside, batch = Steered(), (torch.randn(4, 144), torch.tensor([0, 1, 2, 3]))
        for _ in range(AFTER + 2):
            gradients({name: one.detach().unsqueeze(0) for name, one in inside.named_parameters()}, batch, None)
        assert gradients.refused and not gradients.recordings
        return
    _, found = worked(model, True, monkeypatch)
    assert sum(recordings(found)) == 0


def test_a_gradient_of_a_recording_is_nobodys_memory_but_its_own() -> None:
    """The gradient of w² / 2 is w: if it were the same memory, what is added to gradients would be added to weights."""
    gradients = Gradients(
        lambda weights, batch, shares: (weights["w"] ** 2).sum(1) / 2 + (weights["b"] * batch).sum(1), nn.Identity()
    )
    weights, batch = {"w": torch.randn(2, 3), "b": torch.randn(2, 3)}, torch.randn(2, 3)
    for _ in range(AFTER + 2):
        _, found = gradients(weights, batch, None)
    assert gradients.recordings
    memory = {one.data_ptr() for one in (*weights.values(), batch)}
    assert all(one is not None and one.data_ptr() not in memory for one in found)
