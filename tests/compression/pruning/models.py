"""Models to cut: what each is, how it is run on inputs of some size, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.jobs.digits import Residual


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module, int], Tensor]  # (model, size of the batch) -> output
    shares: dict[str, float]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(batch: int) -> Tensor:
    return torch.randint(0, 50, (batch, 4 + batch), generator=torch.Generator().manual_seed(batch))


class Attending(nn.Module):
    """Throws the averaged attention weights away, as people do."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(24, 4, **how), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x)
        return self.out(x + mixed)


class OwnAttention(nn.Module):
    """Sizes as attributes with names of its own, and heads found by division."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.width = 4, 24
        self.all, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.view(*x.shape[:2], self.parts, self.width // self.parts).transpose(1, 2)
            for one in self.all(x).split(self.width, -1)
        )
        return x + self.out(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], self.width)
        )


class Grouped(nn.Module):
    """Depthwise and grouped convolutions, a skip, a flattened picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)
        )
        self.depthwise = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.SiLU())
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=3)
        self.last = nn.Linear(24 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.grouped(x + self.depthwise(x))
        return self.last(functional.max_pool2d(x, 2).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.out = (
            nn.Embedding(50, 12),
            nn.LSTM(12, 10, 2, batch_first=True),
            nn.Linear(10, 50),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x))[0])


class Tied(nn.Module):
    """One weight is the embedding and the output; one linear layer is called twice; one weight is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(16, 20))
        self.down = nn.Linear(20, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(2):
            h = functional.layer_norm(h + self.down(torch.relu(self.up(h))), (16,))
        return self.head(h)


def digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *(Residual(8) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, intermediate_size=40)
    )


def llama(key_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=24,
            num_hidden_layers=4,
            num_attention_heads=8,
            head_dim=6,
            intermediate_size=40,
            num_key_value_heads=key_heads,
            tie_word_embeddings=True,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=1)
    )


def bottleneck() -> nn.Module:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck"))


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=50, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4))


def logits(model: nn.Module, batch: int) -> Tensor:
    return model(tokens(batch)).logits  # type: ignore[no-any-return]


def hidden(model: nn.Module, batch: int) -> Tensor:
    return model(tokens(batch)).last_hidden_state  # type: ignore[no-any-return]


BOTH = {"heads": 0.5, "neurons": 0.5}
CASES: dict[str, Case] = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 3)),
        lambda model, batch: model(draw(batch, 24)),
        {"neurons": 0.5},
    ),
    "digits": Case(digits, lambda model, batch: model(draw(batch, 1, 8, 8)), {"channels": 0.5, "layers": 0.5}),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.ReLU(), nn.ConvTranspose2d(12, 2, 3)),
        lambda model, batch: model(draw(batch, 3, 8, 8)),
        {"channels": 0.5},
    ),
    "grouped": Case(Grouped, lambda model, batch: model(draw(batch, 3, 8, 8)), {"channels": 0.5}),
    "bottleneck": Case(
        bottleneck, lambda model, batch: model(draw(batch, 3, 16, 16)).last_hidden_state, {"channels": 0.5}
    ),
    "attention": Case(Attending, lambda model, batch: model(draw(batch, 5, 24)), {"heads": 0.5}),
    "attention of widths": Case(
        lambda: Attending(batch_first=True, kdim=24, vdim=24, bias=False),
        lambda model, batch: model(draw(batch, 5, 24)),
        {"heads": 0.25},
    ),
    "own attention": Case(OwnAttention, lambda model, batch: model(draw(batch, 5, 24)), {"heads": 0.5}),
    "encoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True), 4),
        lambda model, batch: model(draw(batch, 5, 24)),
        {**BOTH, "layers": 0.5},
    ),
    "lstm": Case(Recurrent, lambda model, batch: model(tokens(batch)), {"neurons": 0.5}),
    "tied": Case(Tied, lambda model, batch: model(tokens(batch)), {"neurons": 0.5}),
    "bert": Case(bert, hidden, {**BOTH, "layers": 0.5}),
    "llama": Case(lambda: llama(4), logits, {**BOTH, "layers": 0.5}),
    "llama, one key head": Case(lambda: llama(1), logits, BOTH),
    "gpt2": Case(gpt2, logits, {**BOTH, "layers": 0.5}),
    "t5": Case(t5, hidden, BOTH),
}
