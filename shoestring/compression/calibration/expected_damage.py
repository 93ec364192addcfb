"""The expected damage of class logits, where the mean over some samples is a poor estimate of it.

A classifier that is sure of nearly all answers loses nothing on them: the few samples whose classes are nearly tied
hold all the damage, and some hundred samples may contain none of these. How far logits move is known much better than
which samples are nearly tied, and hardly depends on it. So every observed error is applied to every sample:

    damage = mean over samples i and j of damage(l_i + e_j, l_i)      l: logits of the original, e: errors

which is an estimate: it is used only where the plain mean has a standard error of more than a quarter of itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.compression.calibration.fidelity import (
    AT_ONCE,
    BINARY,
    KL,
    Fidelity,
    OutputFidelity,
    OutputMeasure,
    damage_per_vector,
)
from shoestring.compression.calibration.model_outputs import Outputs

UNSURE = 0.25  # standard error, relative to the damage, from which on a mean over samples is too poor
VECTORS, WIDEST = 512, 1024  # most vectors, and most classes, that are combined
PAIRS = 1 << 22  # most logits of combined samples and errors


def logit_rows(tensor: Tensor, how: OutputMeasure) -> Tensor | None:
    """The vectors of an output as rows; None if errors can't be applied to other samples: there are too many, they are
    too wide, or they are no logits."""
    if how.measure not in (KL, BINARY) or how.probabilities or tensor.dim() < 2:
        return None
    rows = tensor.movedim(how.axis, -1).reshape(-1, tensor.shape[how.axis])
    return rows if 0 < len(rows) <= VECTORS and rows.shape[1] <= WIDEST else None


def join_rows(outputs: Sequence[Outputs], measures: Sequence[OutputMeasure]) -> dict[str, Tensor]:
    """The vectors of several batches, of every output whose errors can be applied to other samples."""
    found = {}
    for how in measures:
        parts = [logit_rows(one[how.name], how) for one in outputs]
        known = [one for one in parts if one is not None]
        if known and len(known) == len(parts) and len({one.shape[1] for one in known}) == 1:
            found[how.name] = torch.cat(known)[:VECTORS]
    return found


def crossed_damages(errors: Tensor, logits: Tensor, how: OutputMeasure) -> Tensor:
    """Damage of every error (columns) applied to every sample (rows).

    >>> crossed_damages(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([[0.0, 9.0]]), OutputMeasure("logits", KL)).round(decimals=1)
    tensor([[0.0000, 0.5000]], dtype=torch.float64)
    """
    how = replace(how, axis=-1)
    some = max(1, AT_ONCE // errors.numel())  # samples at once
    found = []
    for rows in logits.double().split(some):
        wanted = rows[:, None].expand(-1, *errors.shape)
        lost = damage_per_vector(wanted + errors.double(), wanted, how)
        found.append(torch.where(torch.isfinite(lost), lost, 1.0).reshape(len(rows), len(errors), -1).mean(-1))
    return torch.cat(found)


class LogitErrors:
    """Collects by how much a compressed model's logits are off, batch by batch, to estimate what it loses on other
    samples. `others`: logits of the original on further samples."""

    def __init__(self, measures: Sequence[OutputMeasure], others: Mapping[str, Tensor]) -> None:
        self.measures, self.others = {one.name: one for one in measures}, others
        self.pairs: list[tuple[Outputs, Outputs]] = []  # compressed, original

    def add(self, found: Outputs, wanted: Outputs) -> None:
        """Add one batch."""
        rows = join_rows([found], tuple(self.measures.values())), join_rows([wanted], tuple(self.measures.values()))
        self.pairs.append(rows)

    def expected(self, fidelity: Fidelity) -> Fidelity:
        """The fidelity, with its means replaced by expected ones where samples tell too little."""
        return Fidelity.of([self.expected_output(one) for one in fidelity.outputs])

    def expected_output(self, known: OutputFidelity) -> OutputFidelity:
        error, name = known.standard_error, known.name
        whole = all(name in found for found, _ in self.pairs)
        if error is None or error <= UNSURE * known.damage or not whole:
            return known
        found, wanted = (torch.cat([one[name] for one in some]) for some in zip(*self.pairs, strict=True))
        errors = found[:VECTORS] - wanted[:VECTORS]
        logits = torch.cat([wanted, self.others[name]]) if name in self.others else wanted
        each = crossed_damages(errors, logits[: max(1, PAIRS // errors.numel())], self.measures[name])
        spread = sum(float(one.var() / len(one)) for one in (each.mean(0), each.mean(1)) if len(one) > 1)
        return replace(known, mean=1 - float(each.mean()), standard_error=math.sqrt(spread))
