"""Six small models of different kinds, each with a job. `times`: how much wider than usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring import Job


def batches(count: int, make: Callable[[torch.Generator], Any], seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [make(generator) for _ in range(count)]


def vectors(width: int) -> Callable[[torch.Generator], Any]:
    return lambda generator: (
        torch.randn(8, width, generator=generator),
        torch.randint(0, 4, (8,), generator=generator),
    )


def images(generator: torch.Generator) -> Any:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def words(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 40, (4, 6), generator=generator)}


class Skipping(nn.Module):
    """A conv net with skips, batch norms and a depthwise convolution."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        wide = 8 * times
        self.stem = nn.Conv2d(3, wide, 3, padding=1)
        self.norm = nn.BatchNorm2d(wide)
        self.work = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.ReLU(), nn.Conv2d(wide, wide, 1))
        self.head = nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.head((x + self.work(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        wide = 16 * times
        self.table = nn.Embedding(40, wide)
        self.lstm = nn.LSTM(wide, wide, 2, batch_first=True)
        self.head = nn.Linear(wide, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(input_ids))[0][:, -1])


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        wide = 16 * times
        self.table = nn.Embedding(40, wide)
        self.work = nn.Linear(wide, wide)
        self.head = nn.Linear(wide, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.work(self.table(input_ids))))


def mlp(times: int = 1) -> nn.Module:
    wide = 32 * times
    return nn.Sequential(nn.Linear(16, wide), nn.ReLU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, 4))


def bert(times: int = 1) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=40,
            hidden_size=16 * times,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32 * times,
            max_position_embeddings=16,
        ),
        add_pooling_layer=False,
    )


def llama(times: int = 1) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16 * times,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32 * times,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def called(model: nn.Module, batch: Any) -> Any:
    if not isinstance(batch, dict):
        return model(batch[0])
    found = model(**batch)
    return found if isinstance(found, Tensor) else found[0]


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[torch.Generator], Any]]] = {
    "mlp": (mlp, vectors(16)),
    "cnn with skips": (Skipping, images),
    "lstm": (Recurrent, words),
    "bert": (bert, words),
    "llama": (llama, words),
    "tied embeddings": (Tied, words),
}


def job_of(name: str, times: int = 1) -> Job:
    """The job of a model; it is made with the same weights every time."""
    make, batch = MODELS[name]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make(times)

    return Job(
        model=model,
        data=lambda: batches(6, batch),
        held_out=lambda: batches(6, batch, seed=1),
        forward=called,
        loss=loss,
    )
