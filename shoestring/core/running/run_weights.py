"""The weights of a run, wherever they are: in memory, on disk, in parts on several workers, or trained beside the model.

`weights` are the model's and those trained beside them; `result` has averages (EMA) in their place; `digest_state` is
what the model's SHA-256 is computed over (tests/training/memory/optimizers/test_ema.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shoestring.core.running.run import Run
from shoestring.core.running.run_state import (
    KeepsAverages,
    KeepsWeights,
    LivesOnDisk,
    MovesBytes,
    StoredTensor,
    TrainsBeside,
)


def stored_weights(run: Run) -> dict[str, StoredTensor]:
    """The weights that are not in memory, by name."""
    return {name: one for part in run.state_that(KeepsWeights) for name, one in part.weights_elsewhere.items()}


def weights(run: Run) -> dict[str, Any]:
    """The model's state by name: tensors and stored tensors, with what is trained beside them."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **stored_weights(run)}
    for part in run.state_that(TrainsBeside):
        found = part.merge(found)
    return dict(found)


def digest_state(run: Run) -> dict[str, Any]:
    """State included in the trained model's SHA-256: the model's state, or the part of it that a technique trains."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **stored_weights(run)}
    for part in run.state_that(TrainsBeside):
        found = part.digest_state(found)
    return dict(found)


def result(run: Run) -> dict[str, Any]:
    """The model's state for export: as `weights`, with averages where a part keeps them."""
    return {
        **weights(run),
        **{name: value for part in run.state_that(KeepsAverages) for name, value in part.averages.items()},
    }


@contextmanager
def guard_outside(run: Run) -> Iterator[None]:
    """While inside, refuse access to weights that are not in memory, by job code that runs outside of a step
    (`OutsideSteps.usable`)."""
    with ExitStack() as stack:
        for part in run.state_that(KeepsWeights):
            stack.enter_context(part.guarding())
        yield


def traffic(run: Run) -> int:
    """Bytes moved to and from the disk so far."""
    found: list[int] = [part.bytes_moved for part in run.state_that(MovesBytes)]
    return sum(found)


def bytes_stored(run: Run) -> int:
    """Bytes of state on the disk."""
    found: list[int] = [part.bytes_stored for part in run.state_that(LivesOnDisk)]
    return sum(found)


def bring_home(run: Run) -> None:
    """Bring all weights back into memory where possible, at the end of a run."""
    found = {
        name: torch.cat([piece.clone() for piece in one.pieces()]).view(one.shape)
        for name, one in stored_weights(run).items()
    }
    for name, parameter in run.model.named_parameters():
        if name in found:
            parameter.data = found[name].to(parameter.device)
    for part in run.state_that(TrainsBeside):
        part.finish()
