"""A byte-level transformer on text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.core.errors import Mistake


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.part = heads, width // heads  # part: width of a head
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        parts = self.queries_keys_values(self.before(x)).unflatten(-1, (3, self.heads, self.part))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (batch, head, time, part)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        changed: Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + changed


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(TransformerLayer(width, heads) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for weights in (self.bytes.weight, self.places.weight, self.head.weight):
            nn.init.normal_(weights, std=0.02)

    def forward(
        self, text: Tensor, start: int = 0
    ) -> Tensor:  # `start`: the position of the text's first byte, if others come before it
        x = self.bytes(text) + self.places(torch.arange(start, start + text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.last(x))
        return scores


@torch.no_grad()
def continue_text(model: nn.Module, prompt: bytes, count: int, context: int) -> str:
    """Text that the model writes after a prompt."""
    text = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    draw = torch.Generator(text.device).manual_seed(0)
    for _ in range(count):
        chances = model(text[:, -context:])[:, -1].div(0.6).softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=draw)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def library_source(most: int = 8_000_000) -> Tensor:
    """Bytes of the standard library's modules, without its tests."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)[:most]), dtype=torch.uint8)


def batches(count: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = library_source()
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(source) - context - 1, (count,), generator=draw)
        rows = torch.stack([source[start : start + context + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]


def job(
    width: int = 320,
    depth: int = 8,
    heads: int = 5,
    context: int = 128,
    batch: int = 8,
    steps: int = 40,
    rate: float = 1e-3,
    seed: int = 0,
) -> Job:
    if width % heads:
        raise Mistake(
            f"a --width of {width} can't be divided among {heads} --heads: give a multiple of {heads}, or other heads"
        )
    return Job(
        model=lambda: Gpt(width, depth, heads, context),
        data=lambda: batches(batch, context, seed),
        loss=lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        weight=lambda batch: batch[1].numel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98)),
        batch=batch,
        steps=steps,
        seed=seed,
        show=lambda model: continue_text(model, b"def main(", 160, context),
    )
