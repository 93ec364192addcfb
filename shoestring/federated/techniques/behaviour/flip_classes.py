"""Label flipping: a malicious device trains on flipped classes, y -> classes - 1 - y. Its held-out samples stay as they
are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from shoestring.core.errors import Mistake
from shoestring.federated.devices.records import Records


@dataclass(frozen=True)
class FlippedSamples:
    """A data set that flips classes as samples are read, for samples that can't be stacked."""

    data: Any = field(repr=False)
    places: frozenset[int]  # indices of the samples to flip
    classes: int

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> Any:
        found = self.data[place]
        if place not in self.places:
            return found
        check_class(int(found[1]), self.classes)
        return type(found)((found[0], self.classes - 1 - found[1]))


def flip_classes(records: Records, classes: int) -> Records:
    """The records with the classes of the training samples flipped."""
    found = stacked_pairs(records)
    if found is None:
        return replace(records, data=FlippedSamples(records.data, frozenset(records.trained.tolist()), classes))
    inputs, targets = found
    return replace(
        records,
        data=TensorDataset(inputs, targets.index_copy(0, records.trained, classes - 1 - targets[records.trained])),
    )


def stacked_pairs(records: Records) -> tuple[Tensor, Tensor] | None:
    """Inputs and classes of all samples as two tensors; None if the samples are something else."""
    whole = records.whole
    if (
        isinstance(whole, (tuple, list))
        and len(whole) == 2
        and isinstance(whole[0], Tensor)
        and is_class(whole[1], dimensions=1)
    ):
        return whole[0], whole[1]
    return None


def check_classes(records: Records, classes: int) -> None:
    """Refuse records whose samples are not (input, class) pairs."""
    found = stacked_pairs(records)
    sample = records.data[0]
    if found is None and not (
        isinstance(sample, (tuple, list)) and len(sample) == 2 and is_class(sample[1], dimensions=0)
    ):
        raise Mistake(
            "its samples are no (input, class) pairs, so Malicious can't flip classes; use another attack, sign-flip or noise"
        )
    for one in () if found is None else (int(found[1].min()), int(found[1].max())):
        check_class(one, classes)


def check_class(number: int, classes: int) -> None:
    if not 0 <= number < classes:
        raise Mistake(
            f"a sample's class is not from 0 to {classes - 1}, as Malicious expects; say how many classes there are with "
            f"Malicious(classes=…), and leave out samples that have no class"
        )


def is_class(value: Any, dimensions: int) -> bool:
    if isinstance(value, Tensor):
        return (
            value.dim() == dimensions
            and not value.is_floating_point()
            and not value.is_complex()
            and value.dtype != torch.bool
        )
    return dimensions == 0 and isinstance(value, Integral) and not isinstance(value, bool)
