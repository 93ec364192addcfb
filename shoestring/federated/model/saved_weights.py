"""The model and server state in checkpoints: weights under all their names, read as a row; state of techniques."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.model.layout import Layout
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint


def row_of(checkpoint: RunCheckpoint, layout: Layout) -> Tensor:
    """A checkpoint's weights as a row."""
    row, weights = torch.zeros(layout.size), checkpoint.weights()
    for name, view in layout.views(row).items():
        source = weights.metadata.get(f"alias {name}", name)
        if source not in weights.entries or weights[source].shape != view.shape:
            raise Mistake(
                f"the checkpoint {checkpoint.path} has no weights {name!r} of the shape {tuple(view.shape)}: it is of another "
                f"model; give the job and the flags that it was made with, another --run, or --fresh"
            )
        view.copy_(weights[source])
    return row


def weights_and_aliases(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A model's state by name, and second names of tied weights."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[int, int], str] = {}
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.numel())
        if value.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            weights[name] = value
    return weights, aliases


def fits(found: Tensor, initial: Tensor) -> bool:
    """Whether a stored state can come from a technique with this initial state; a state that began without rows may
    have any number of them.

    >>> fits(torch.tensor(0.5), torch.tensor(1.0)), fits(torch.tensor(torch.nan), torch.tensor(1.0))
    (True, False)
    """
    rows = slice(int(initial.dim() > 0 and not len(initial)), None)
    same = found.dtype == initial.dtype and found.dim() == initial.dim() and found.shape[rows] == initial.shape[rows]
    return same and bool(found.isfinite().all())
