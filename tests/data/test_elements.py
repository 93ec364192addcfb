"""Samples or batches: data and held-out data of every kind, with and without `collate`, work as meant or are refused before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoestring
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.training.validation import once_through, validation_feed

SAMPLES = [(torch.full((3,), float(number)), number % 2) for number in range(8)]


class Rows:
    """A map-style data set."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return SAMPLES[number]


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def named(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    x, y = stacked(samples)
    return {"x": x, "y": y}


def batches(collate: Callable[[list[Any]], Any]) -> list[Any]:
    return [collate(SAMPLES[begin : begin + 4]) for begin in (0, 4)]


KINDS: dict[str, Callable[[Callable[[list[Any]], Any]], Any]] = {  # each gives two batches of four
    "data set": lambda collate: Rows(),
    "samples": lambda collate: SAMPLES,
    "batches": batches,
    "loader": lambda collate: DataLoader(SAMPLES, 4, collate_fn=collate),  # type: ignore[arg-type]
    "generator": lambda collate: lambda: iter(batches(collate)),
}
MADE_OF_SAMPLES = ("data set", "samples")


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def made(data: str, held: str | None, collate: Callable[[list[Any]], Any], given: bool) -> Job:
    return Job(
        model=lambda: nn.Linear(3, 2),
        data=KINDS[data](collate),
        batch=4,
        steps=2,
        collate=collate if given else None,
        held_out=None if held is None else KINDS[held](collate),
        forward=lambda model, batch: model(parts(batch)[0]),
        loss=lambda out, batch: nn.functional.cross_entropy(out, parts(batch)[1]),
        every=1,
    )


def works(data: str, held: str | None, collate: Callable[[list[Any]], Any], given: bool) -> bool:
    """Whether a job is trained as meant: on batches of four, and validated on all eight samples. Where it is not, that is a Mistake."""
    try:
        job = made(data, held, collate, given)
        if held is not None:
            assert [parts(batch)[0].shape for batch, _ in once_through(validation_feed(job))] == [(4, 3), (4, 3)]
        assert len(list(shoestring.train(job))) == 2
    except Mistake as error:
        assert "collate" in str(error) or "samples" in str(error), error
        return False
    return True


@pytest.mark.parametrize("collate", [stacked, named])
@pytest.mark.parametrize("held", KINDS)
@pytest.mark.parametrize("data", MADE_OF_SAMPLES)
def test_held_out_data_beside_collate_are_what_they_look_like(
    data: str, held: str, collate: Callable[[list[Any]], Any]
) -> None:
    assert works(data, held, collate, given=True)


@pytest.mark.parametrize("held", KINDS)
@pytest.mark.parametrize("data", ["data set", "batches", "loader", "generator"])
def test_held_out_data_without_collate_are_what_they_look_like(data: str, held: str) -> None:
    refused = held == "samples" and data != "data set"
    assert works(data, held, stacked, given=False) is not refused


@pytest.mark.parametrize("collate", [stacked, named])
@pytest.mark.parametrize("data", KINDS)
def test_data_beside_collate_are_samples_or_refused(data: str, collate: Callable[[list[Any]], Any]) -> None:
    assert works(data, None, collate, given=True) is (data in MADE_OF_SAMPLES)


def test_a_refusal_says_what_was_found_and_what_to_do() -> None:
    few, many = made("batches", None, named, given=True), made("batches", None, named, given=True)
    with pytest.raises(
        Mistake, match=r"2 samples for batches of 4.*a list beside collate= is one of samples.*leave collate out"
    ):
        next(iter(shoestring.train(few)))
    with pytest.raises(Mistake, match=r"each a dict, in .*test_elements.*a list beside collate= is one of samples"):
        next(iter(shoestring.train(Job(**{**vars(many), "batch": 2}))))
    with pytest.raises(Mistake, match=r"list of samples, each \(Tensor of 1 dimension, int\).*held_out=DataLoader"):
        next(iter(shoestring.train(made("batches", "samples", stacked, given=False))))


def test_held_out_data_that_are_neither_are_refused_before_the_first_step() -> None:
    job = made("data set", None, stacked, given=True)
    with pytest.raises(Mistake, match="collate fails on elements of a list"):
        next(iter(shoestring.train(Job(**{**vars(job), "held_out": [torch.zeros(4, 3, 3)]}))))
