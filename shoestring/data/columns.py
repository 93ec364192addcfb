"""One column of a data set: the same part of every sample, such as its label or its author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from shoestring.core.errors import Mistake

CALLS_USER = "data"  # core/user_code/seams.py

TARGETS = 1  # the column that torchvision's data sets provide as `targets`


def column_of(data: Any, column: int | str) -> Sequence[Any]:
    """The values of a column, one per sample. Taken from these places if a data set has one; else every sample is
    fetched.

    columns     a mapping of names to values that a user's data set may have
    tensors     of a TensorDataset
    targets     of torchvision's data sets: column 1
    Subset      of any of these
    """
    if isinstance(getattr(data, "columns", None), Mapping) and column in data.columns:
        return check_length(plain(data.columns[column]), len(data), column)
    if type(data) is Subset:
        inside = column_of(data.dataset, column)
        return [inside[number] for number in data.indices]
    if type(data) is TensorDataset and isinstance(column, int) and -len(data.tensors) <= column < len(data.tensors):
        return plain(data.tensors[column])
    if column == TARGETS and isinstance(targets := getattr(data, "targets", None), (Tensor, list, tuple)):
        return check_length(plain(targets), len(data), column)
    return plain([fetch_value(data, number, column) for number in range(len(data))])


def plain(values: Any) -> Sequence[Any]:
    """Values as plain numbers and texts; a tensor with more than one value per sample is refused."""
    if isinstance(values, Tensor):
        if values.dim() != 1:
            raise Mistake(
                f"a column of the shape {tuple(values.shape)}: a column with one value a sample is needed, such as its label"
            )
        found: list[Any] = values.tolist()
        return found
    return [one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in values]


def check_length(values: Sequence[Any], count: int, column: int | str) -> Sequence[Any]:
    if len(values) != count:
        raise Mistake(
            f"the data set says {len(values)} values of its column {column!r} and has {count} samples: give one a sample"
        )
    return values


def fetch_value(data: Any, number: int, column: int | str) -> Any:
    sample = data[number]
    try:
        return sample[column]
    except (KeyError, IndexError, TypeError) as error:
        has = (
            f"a mapping with {', '.join(map(repr, sample))}"
            if isinstance(sample, Mapping)
            else f"a {type(sample).__name__} of {len(sample)}"
            if isinstance(sample, (tuple, list))
            else f"a {type(sample).__name__}"
        )
        raise Mistake(
            f"sample {number} has no column {column!r}: it is {has}; name a part that every sample has, or give the data set an "
            f"attribute columns={{{column!r}: [...]}} with one value a sample"
        ) from error


def classes_of(data: Any, column: int | str) -> Tensor:
    """Every sample's class number, from 0, by the values of a column; classes are in the order of their values."""
    values = column_of(data, column)
    kinds = sorted(set(map(label, values)), key=lambda one: (isinstance(one, str), one))
    number = {kind: place for place, kind in enumerate(kinds)}
    return torch.tensor([number[label(value)] for value in values], dtype=torch.long)


def label(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    try:
        if int(value) == value:
            return int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise Mistake(
        f"a label is {str(value)[:60]} ({type(value).__name__}): a rule that divides samples by their class needs labels that "
        f'are whole numbers or texts; say which part of a sample it is, such as Dirichlet(0.3, label="label"), or use Iid()'
    )
