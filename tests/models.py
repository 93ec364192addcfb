"""Models for the tests: ours and transformers', small, of many kinds. Each is a factory and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shoestring import Job

SAMPLES = 4


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens(length: int = 24, words: int = 100) -> dict[str, Tensor]:
    ids = torch.randint(3, words, (SAMPLES, length), generator=draw())
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(side: int = 32) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(SAMPLES, 3, side, side, generator=draw()),
        "labels": torch.randint(10, (SAMPLES,), generator=draw()),
    }


def sound() -> dict[str, Tensor]:
    return {"input_features": torch.randn(SAMPLES, 16, 100, generator=draw()), "labels": tokens()["labels"]}


def waves() -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(SAMPLES, 2000, generator=draw()),
        "labels": torch.randint(1, 30, (SAMPLES, 8), generator=draw()),
    }


def hugging(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**settings))


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
TWO_SIDED = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


class Recurrent(nn.Module):
    """An LSTM with dropout and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.memory = nn.LSTM(64, 64, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 100)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.memory(self.words(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())}


class UNet(nn.Module):
    """Skips across the middle, batch norm on the way."""

    def __init__(self) -> None:
        super().__init__()

        def step(inside: int, out: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())

        self.down = nn.ModuleList([step(3, 16), step(16, 16), step(16, 16)])
        self.up = nn.ModuleList([step(32, 16), step(32, 16), step(32, 16)])
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, kept = pixel_values, []
        for step in self.down:
            x = step(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        for step in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = step(torch.cat([x, kept.pop()], 1))
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


class SharedUNet(nn.Module):
    """A convolutional U-Net that goes up through the blocks, batch norm and all, that it came down by."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, kept = self.first(pixel_values), []
        for block in self.blocks:
            kept.append(x)
            x = nn.functional.max_pool2d(block(x), 2)
        for block in reversed(self.blocks):
            x = block(nn.functional.interpolate(x, scale_factor=2.0)) + kept.pop()
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


class Chain(nn.Module):
    """Uneven residual blocks with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64 * k), nn.GELU(), nn.Dropout(dropout), nn.Linear(64 * k, 64))
            for k in (1, 4, 1, 2, 6, 1)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 64, generator=draw()), torch.randint(10, (32,), generator=draw())


def frozen_bottom() -> nn.Module:
    """A transformer whose embedding and lower half are not trained, frozen in its factory."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL
            | {"num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 256, "tie_word_embeddings": False}
        )
    )
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "chain": (Chain, rows),
    "dropout chain": (lambda: Chain(0.2), rows),
    "recurrent": (Recurrent, tokens),
    "u-net": (UNet, pictures),
    "shared u-net": (SharedUNet, pictures),
    "torch encoder": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True) for _ in range(3)),
            nn.Flatten(),
            nn.Linear(64 * 8, 10),
        ),
        lambda: (torch.randn(SAMPLES, 8, 64, generator=draw()), torch.randint(10, (SAMPLES,), generator=draw())),
    ),
    "gpt2": (
        hugging("GPT2LMHeadModel", "GPT2Config", n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=64),
        tokens,
    ),
    "llama": (hugging("LlamaForCausalLM", "LlamaConfig", **SMALL), tokens),
    "frozen bottom": (frozen_bottom, tokens),
    "gemma": (
        hugging(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **SMALL,
            head_dim=32,
            sliding_window=8,
            num_key_value_heads=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        tokens,
    ),
    "bert": (hugging("BertForMaskedLM", "BertConfig", **SMALL), tokens),
    "albert": (hugging("AlbertForMaskedLM", "AlbertConfig", **SMALL, embedding_size=32), tokens),
    "t5": (
        hugging(
            "T5ForConditionalGeneration",
            "T5Config",
            num_layers=2,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_heads=4,
            vocab_size=100,
            decoder_start_token_id=0,
        ),
        tokens,
    ),
    "bart": (hugging("BartForConditionalGeneration", "BartConfig", **TWO_SIDED), tokens),
    "vit": (
        hugging(
            "ViTForImageClassification",
            "ViTConfig",
            **{k: v for k, v in SMALL.items() if k != "vocab_size"},
            image_size=32,
            patch_size=8,
            num_labels=10,
        ),
        pictures,
    ),
    "swin": (
        hugging(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            num_labels=10,
        ),
        pictures,
    ),
    "resnet": (
        hugging(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            num_labels=10,
            layer_type="basic",
        ),
        pictures,
    ),
    "convnext": (
        hugging(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 2, 1],
            num_labels=10,
        ),
        pictures,
    ),
    "whisper": (
        hugging(
            "WhisperForConditionalGeneration", "WhisperConfig", **TWO_SIDED, num_mel_bins=16, max_source_positions=50
        ),
        sound,
    ),
    "wav2vec2": (
        hugging(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **{**SMALL, "vocab_size": 30},
            conv_dim=(32, 32),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
        ),
        waves,
    ),
    "mixtral": (
        hugging("MixtralForCausalLM", "MixtralConfig", **SMALL, num_key_value_heads=1, num_local_experts=4),
        tokens,
    ),
    "mamba": (
        hugging("MambaForCausalLM", "MambaConfig", num_hidden_layers=3, hidden_size=64, vocab_size=100, state_size=8),
        lambda: tokens(8),
    ),
    "rwkv": (
        hugging(
            "RwkvForCausalLM",
            "RwkvConfig",
            num_hidden_layers=2,
            hidden_size=64,
            vocab_size=100,
            attention_hidden_size=64,
        ),
        lambda: tokens(8),
    ),
    "deberta": (
        hugging(
            "DebertaV2ForMaskedLM", "DebertaV2Config", **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]
        ),
        tokens,
    ),
}


def job(name: str, **changes: Any) -> Job:
    """A job that trains a model of the list on its batch."""
    factory, batch = MODELS[name]
    settings = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), "steps": 3} | changes
    return Job(model=factory, data=lambda: [batch()] * 16, **settings)


def seeded(made: Job) -> nn.Module:
    """The job's model, and the random state in which its training begins."""
    torch.manual_seed(made.seed)
    model = made.model()
    torch.manual_seed(made.seed)
    return model
