"""Jobs whose batches are of several sizes: text padded per batch, images, audio. `job` makes one of them by its kind and seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.job import Job


class Samples:
    """Samples of random lengths."""

    def __init__(self, seed: int, shapes: Any, count: int = 48) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.shapes = [
            shapes(lambda low, high: int(torch.randint(low, high, (1,), generator=drawn))) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, number: int) -> Any:
        return self.shapes[number], number


def padded_text(samples: list[Any]) -> dict[str, Tensor]:
    longest = max(shape[0] for shape, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, ((length,), number) in enumerate(samples):
        ids[row, :length], mask[row, :length] = number % 90 + 5, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([number % 2 for _, number in samples])}


def language(samples: list[Any]) -> dict[str, Tensor]:
    batch = padded_text(samples)
    return {**batch, "labels": batch["input_ids"]}


def translated(samples: list[Any]) -> dict[str, Tensor]:
    source = padded_text([((shape[0],), number) for shape, number in samples])
    target = padded_text([((shape[1],), number) for shape, number in samples])
    return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": target["input_ids"]}


def pair(samples: list[Any]) -> tuple[Tensor, Tensor]:
    batch = padded_text(samples)
    return batch["input_ids"], batch["labels"]


def images(samples: list[Any]) -> tuple[Tensor, Tensor]:
    high, wide = (max(shape[place] for shape, _ in samples) for place in (0, 1))
    return torch.ones(len(samples), 3, high, wide), torch.tensor([number % 2 for _, number in samples])


def audio(samples: list[Any]) -> tuple[Tensor, Tensor]:
    longest = max(shape[0] for shape, _ in samples)
    return torch.ones(len(samples), 1, longest), torch.tensor([number % 2 for _, number in samples])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 96), nn.Linear(96, 2)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True) for _ in range(3)]
        )

    def forward(self, ids: Tensor) -> Tensor:
        found = self.embed(ids)
        for layer in self.layers:
            found = layer(found)
        return self.head(found.mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory, self.head = nn.Embedding(100, 64), nn.GRU(64, 96, batch_first=True), nn.Linear(96, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(ids))[0][:, -1])  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 24), (24, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def waves() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv1d(before, after, 9, stride=2, padding=4), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 2))


def from_config(name: str) -> nn.Module:
    import transformers as t

    small = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "vocab_size": 100,
    }
    if name == "bert":
        return t.BertForSequenceClassification(
            t.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=4))
    if name == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=96, n_layer=3, n_head=4, vocab_size=100, n_positions=512))
    return t.T5ForConditionalGeneration(
        t.T5Config(d_model=96, d_ff=192, num_layers=2, num_heads=4, d_kv=24, vocab_size=100, decoder_start_token_id=0)
    )


def text(low: int, high: int) -> Any:
    return lambda draw: (draw(low, high),)


KINDS: dict[str, Any] = {  # kind -> model, shapes of samples, how they are made a batch
    "attention": (Attention, text(20, 300), pair),
    "recurrent": (Recurrent, text(10, 400), pair),
    "bert": (lambda: from_config("bert"), text(20, 300), padded_text),
    "gpt2": (lambda: from_config("gpt2"), text(20, 300), language),
    "llama": (lambda: from_config("llama"), text(20, 300), language),
    "t5": (lambda: from_config("t5"), lambda draw: (draw(20, 200), draw(10, 150)), translated),
    "images": (convolutions, lambda draw: (draw(48, 128), draw(48, 128)), images),
    "bucketed images": (convolutions, lambda draw: ((64, 96), (96, 64), (112, 112))[draw(0, 3)], images),
    "audio": (waves, text(4000, 32000), audio),
    "long audio": (waves, lambda draw: (draw(4000, 8000) if draw(0, 12) else 48000,), audio),
}


def job(kind: str = "attention", seed: int = 0, steps: int = 12, batch: int = 8) -> Job:
    model, shapes, collate = KINDS[kind]
    return Job(
        model=model,
        data=lambda: Samples(seed, shapes),
        collate=collate,
        batch=batch,
        steps=steps,
        seed=seed,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
