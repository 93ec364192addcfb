"""A compressed model as an engine, with packed weights or decoded ones: decoded exactly where memory allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring
from shoestring.compression.formats.packed_modules import decode_weights, memory_of
from shoestring.serving.engines.packed_weights import load_within
from shoestring.serving.engines.together import Together
from shoestring.serving.engines.torch_engine import TorchEngine
from tests.serving.engines.contract import Case, check_contract
from tests.serving.engines.models import WORDS, Reader, reader, whole


def narrow() -> nn.Module:
    torch.manual_seed(5)
    model = Reader("all", layers=1).eval()
    model.blocks[0].out = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.blocks[0].out[1].weight = model.blocks[0].out[0].weight  # tied: stored once, decoded once
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("compressed") / "packed"
    data = [torch.randint(1, WORDS, (4, 24)) for _ in range(4)]
    job = shoestring.Job(narrow, data, forward=whole, loss=lambda output, batch: output.label.mean())
    shoestring.compress(job, target, use=["Quantize(bits=8)"], samples=8)
    return target


@pytest.mark.parametrize("memory", [0, None], ids=["packed", "decoded"])
def test_every_answer_is_the_models_to_the_sample_alone(folder: Path, memory: int | None) -> None:
    loaded = load_within(folder, memory, model=narrow)
    assert loaded.decoded == (memory is None)
    engine = TorchEngine(loaded.module, whole, reader(pooled="all", layers=1).interface())
    check_contract(Case(engine, load_within(folder, memory, model=narrow).module, whole), True, Together.EQUAL)


def test_weights_are_decoded_exactly_where_that_fits_the_memory(folder: Path) -> None:
    dense = memory_of(decode_weights(load_within(folder, 0, model=narrow).module))
    for memory, decoded in ((dense - 1, False), (dense, True)):
        found = load_within(folder, memory, model=narrow)
        assert found.decoded is decoded and found.bytes == memory_of(found.module)
        assert found.bytes <= memory
