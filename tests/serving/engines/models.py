"""Small models of many kinds, with what an `answer` would yield for them. Their weights are larger than transformers draws
them, so that attention looks at some positions and not at all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.job import default_forward
from shoestring.serving.engines.signature import ModelInterface, find_interface
from shoestring.serving.engines.torch_engine import TorchEngine

WORDS = 99
LENGTHS = (5, 9, 17, 30, 9)


@dataclass(frozen=True)
class Subject:
    """A model, and what is asked of it."""

    model: nn.Module
    values: list[Any]
    forward: Callable[[nn.Module, Any], Any] = default_forward

    def interface(self) -> ModelInterface:
        return find_interface(self.model, self.forward, values=self.values)

    def engine(self) -> TorchEngine:
        return TorchEngine(self.model, self.forward, self.interface())


def texts(mask: bool = True, kinds: bool = False, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    found = []
    for length in lengths:
        ids = torch.randint(3, WORDS, (1, length))
        one = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})
        if kinds:
            one["token_type_ids"] = (torch.arange(length) > length // 2).long()[None]
        found.append(one)
    return found


def sounds(lengths: tuple[int, ...] = (120, 240, 330, 240)) -> list[dict[str, Tensor]]:
    return [
        {"input_values": torch.randn(1, length), "attention_mask": torch.ones(1, length, dtype=torch.long)}
        for length in lengths
    ]


def sharpened(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim == 2:
                one.mul_(4)
    return model.eval()


def from_config(name: str, kind: str = "Model", **settings: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": WORDS,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**(small | settings))
    return sharpened(getattr(transformers, f"{name}{kind}")(config))


# Models of other kinds


class Attention(nn.Module):
    """A block of a hand-written transformer."""

    def __init__(self, width: int = 32, convolved: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = norm or nn.LayerNorm(width)
        self.local = nn.Conv1d(width, width, 3, padding=1) if convolved else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.local is not None:
            x = x + self.local(x.transpose(1, 2)).transpose(1, 2)
        if isinstance(self.norm, nn.BatchNorm1d):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


class Spoken(NamedTuple):
    label: Tensor
    states: Tensor


class Reader(nn.Module):
    """A hand-written transformer that knows no mask. `pooled`: what its answer is read off."""

    def __init__(
        self, pooled: str = "first", drop: float = 0.0, width: int = 32, layers: int = 2, **block: Any
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Attention(width, **block) for _ in range(layers))
        self.head = nn.Linear(width, 5)
        self.pooled, self.drop = pooled, drop

    def forward(self, ids: Tensor) -> Spoken:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        x = F.dropout(x, self.drop)
        for block in self.blocks:
            x = block(x)
        pooled = x.mean(1) if self.pooled == "mean" else x[:, 0] if self.pooled == "first" else x
        return Spoken(self.head(pooled), x)


class Layers(nn.Module):
    """torch's own encoder."""

    def __init__(self, rows_first: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 32), nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=rows_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=rows_first)
        self.rows_first, self.causal = rows_first, causal

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        past = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) < 0 if self.causal else None
        x = x if self.rows_first else x.transpose(0, 1)
        x = self.layers(x, mask=past, src_key_padding_mask=padding)
        return x if self.rows_first else x.transpose(0, 1)


def ids_alone(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [torch.randint(1, WORDS, (1, length)) for length in lengths]


def ids_and_padding() -> list[tuple[Tensor, Tensor]]:
    return [(ids, torch.zeros_like(ids, dtype=torch.bool)) for ids in ids_alone()]


def both(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def whole(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def reader(**settings: Any) -> Subject:
    return Subject(sharpened(Reader(**settings)), ids_alone(), whole)


def torch_layers(**settings: Any) -> Subject:
    return Subject(sharpened(Layers(**settings)), ids_and_padding(), both)
