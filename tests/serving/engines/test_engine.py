"""The contract of all engines: every sample is answered as the model answers it alone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoestring
from shoestring.compression.onnx.interface import outputs_of
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.onnx_engine import OnnxEngine
from shoestring.serving.engines.packed_weights import load_within
from shoestring.serving.engines.together import Together
from shoestring.serving.engines.torch_engine import TorchEngine
from tests.serving.engines.models import WORDS, Reader, from_config, ids_alone, reader, texts, whole

pytest.importorskip("onnxruntime")
FOLDER = TemporaryDirectory(prefix="engines")
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


def by_torch(**settings: Any) -> Case:
    subject = reader(**settings)
    return Case(subject.engine(), subject.model, whole)


def with_padding() -> Case:
    model = from_config("MPNet", pad_token_id=1, max_position_embeddings=66)
    forward = shoestring.Job(lambda: model, ()).forward
    from shoestring.serving.engines.signature import find_interface

    return Case(TorchEngine(model, forward, find_interface(model, forward, values=texts())), model, forward, True)


def wide() -> nn.Module:
    torch.manual_seed(5)
    return Reader("all", width=64).eval()


def wide_job() -> shoestring.Job:
    return shoestring.Job(
        wide,
        [torch.stack([torch.randint(1, WORDS, (24,)) for _ in range(4)]) for _ in range(4)],
        forward=whole,
        loss=lambda output, batch: output.label.mean(),
    )


def by_packed_weights(memory: int | None) -> Case:
    folder = Path(FOLDER.name) / f"packed{memory}"
    shoestring.compress(wide_job(), folder, use=["Quantize(bits=8)"], samples=8)
    loaded = load_within(folder, memory, model=wide)
    assert loaded.decoded == (memory is None)
    subject = reader(pooled="all", width=64)
    return Case(
        TorchEngine(loaded.module, whole, subject.interface()), load_within(folder, memory, model=wide).module, whole
    )


def by_onnx(fast: bool) -> Case:
    from shoestring.serving.engines.signature import find_interface

    model = wide()
    interface = find_interface(model, whole, values=ids_alone((5, 24, 11)))
    return Case(OnnxEngine(model, whole, interface, Path(FOLDER.name) / f"{fast}.onnx", fast=fast), model, whole)


MADE: dict[str, tuple[Callable[[], Case], bool, Together]] = {
    "torch, packed": (lambda: by_torch(pooled="all"), True, Together.EQUAL),
    "torch, padded": (with_padding, False, Together.PADDED),
    "torch, equal lengths": (lambda: by_torch(pooled="mean"), False, Together.EQUAL),
    "torch, one at a time": (
        lambda: by_torch(norm=nn.BatchNorm1d(32, track_running_stats=False)),
        False,
        Together.ALONE,
    ),
    "packed weights": (lambda: by_packed_weights(0), True, Together.EQUAL),
    "packed weights, decoded": (lambda: by_packed_weights(None), True, Together.EQUAL),
    "onnxruntime": (lambda: by_onnx(False), False, Together.EQUAL),
    "onnxruntime, int8": (lambda: by_onnx(True), False, Together.EQUAL),
}


@cache
def case(name: str) -> Case:
    torch.manual_seed(1)
    return MADE[name][0]()


def worst_difference(case: Case, lengths: list[int], seed: int) -> float:
    values = [case.value(length, seed + number) for number, length in enumerate(lengths)]
    random.Random(seed).shuffle(values)
    engine: Any = case.engine
    found = engine.answers([engine.interface.inputs.sample(value) for value in values])
    alone = [case.alone(value) for value in values]
    assert [one.keys() for one in found] == [one.keys() for one in alone]
    largest = {name: max(float(one[name].abs().max()) for one in alone) for name in alone[0]}
    assert all(mine[name].shape == own[name].shape for mine, own in zip(found, alone, strict=True) for name in own)
    return max(
        float((mine[name] - own[name]).abs().max()) / largest[name]
        for mine, own in zip(found, alone, strict=True)
        for name in own
    )


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=12)
@given(lengths=st.lists(st.integers(2, LONGEST), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_every_answer_is_the_models_to_the_sample_alone(name: str, lengths: list[int], seed: int) -> None:
    made = case(name)
    assert made.engine.packs == MADE[name][1] == (not made.engine.why_not_packed)
    assert getattr(made.engine, "together", None) is MADE[name][2]
    assert worst_difference(made, lengths, seed) <= made.engine.tolerance


@pytest.mark.parametrize("name", MADE)
def test_a_process_that_is_forked_from_it_answers_too(name: str) -> None:
    made = case(name)
    wanted = worst_difference(made, [3, 9, 3], 7)
    child = os.fork()
    if not child:
        os._exit(0 if worst_difference(made, [3, 9, 3], 7) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_samples_have_no_answers() -> None:
    assert [list(case(name).engine.answers([])) for name in ("torch, packed", "onnxruntime")] == [[], []]
