"""The contract of all engines: every sample is answered as the model answers it alone, also in a process that is forked. Each engine's own
tests check it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoestring.compression.onnx.interface import outputs_of
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.together import Together
from tests.serving.engines.models import WORDS

LONGEST = 40


@dataclass(frozen=True)
class Case:
    engine: ServingEngine
    model: nn.Module  # what it is compared with
    forward: Callable[[nn.Module, Any], Any]
    named: bool = False  # whether samples are mappings

    def value(self, length: int, seed: int) -> Any:
        ids = torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if self.named else ids

    def alone(self, value: Any) -> dict[str, Tensor]:
        batch = {name: one[None] for name, one in value.items()} if self.named else value[None]
        with torch.no_grad():
            return {name: one[0] for name, one in outputs_of(self.forward(self.model, batch)).items()}

    def worst_difference(self, lengths: list[int], seed: int) -> float:
        values = [self.value(length, seed + number) for number, length in enumerate(lengths)]
        random.Random(seed).shuffle(values)
        engine: Any = self.engine
        found = engine.answers([engine.interface.inputs.sample(value) for value in values])
        alone = [self.alone(value) for value in values]
        assert [one.keys() for one in found] == [one.keys() for one in alone]
        largest = {name: max(float(one[name].abs().max()) for one in alone) for name in alone[0]}
        assert all(mine[name].shape == own[name].shape for mine, own in zip(found, alone, strict=True) for name in own)
        return max(
            float((mine[name] - own[name]).abs().max()) / largest[name]
            for mine, own in zip(found, alone, strict=True)
            for name in own
        )


def refuses(made: Case, number: int) -> None:
    """A number that the model's embedding does not have is an error here too, not the answer to another number."""
    value = made.value(5, 0)
    (value["input_ids"] if made.named else value)[2] = number
    with pytest.raises(IndexError):
        made.alone(value)
    engine: Any = made.engine
    with pytest.raises(Exception, match=r"out of range|out of data bounds|below 0"):
        engine.answers([engine.interface.inputs.sample(value)])


def check_contract(made: Case, packs: bool, together: Together) -> None:
    assert made.engine.packs == packs == (not made.engine.why_not_packed)
    assert getattr(made.engine, "together", None) is together

    @settings(max_examples=12)
    @given(lengths=st.lists(st.integers(2, LONGEST), min_size=1, max_size=6), seed=st.integers(0, 1000))
    def answers_alone(lengths: list[int], seed: int) -> None:
        assert made.worst_difference(lengths, seed) <= made.engine.tolerance

    answers_alone()
    assert list(made.engine.answers([])) == []
    for number in (WORDS, -1):
        refuses(made, number)
    wanted = made.worst_difference([3, 9, 3], 7)
    child = os.fork()
    if not child:
        os._exit(0 if made.worst_difference([3, 9, 3], 7) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0, "a process that is forked from it answers too"
