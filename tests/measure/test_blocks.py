"""Blocks are found in the module tree of any model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoestring.measure.blocks import blocks
from tests.models import MODELS


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("chain", [f"blocks.{k}" for k in range(6)]),
        ("gpt2", [f"transformer.h.{k}" for k in range(3)]),
        ("t5", [f"{side}.block.{k}" for side in ("encoder", "decoder") for k in range(2)]),
        ("resnet", [f"resnet.encoder.stages.{stage}.layers.{k}" for stage in range(2) for k in range(2)]),
        ("u-net", [f"{way}.{k}" for way in ("down", "up") for k in range(3)]),
        ("recurrent", ["words", "memory", "head"]),
    ],
)
def test_the_blocks_of_a_model(name: str, found: list[str]) -> None:
    assert list(blocks(MODELS[name][0]())) == found


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_scripted_modules_are_no_blocks() -> None:
    """Their class has a `forward` that nobody may look at, and takes no hooks."""
    assert not blocks(nn.Sequential(*(torch.jit.script(Scripted()) for _ in range(3))))


def test_a_module_with_two_names_is_one_block() -> None:
    part = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert len(blocks(nn.Sequential(part, part, nn.Sequential(nn.Linear(2, 2), nn.ReLU())))) == 2
