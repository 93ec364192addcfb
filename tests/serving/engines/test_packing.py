"""Which models are computed without padding, what that costs, and why others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from shoestring.serving.engines import attention
from shoestring.serving.engines.attention import PackedAttention, Unpackable
from shoestring.serving.engines.comparison import difference
from shoestring.serving.engines.outputs import answers_alone
from shoestring.serving.engines.packing import Unpack, packed_answers
from shoestring.serving.engines.together import Together
from shoestring.serving.engines.torch_engine import TorchEngine
from shoestring.serving.sample import Sample
from tests.serving.engines.models import (
    Reader,
    Subject,
    from_config,
    reader,
    sharpened,
    sounds,
    texts,
    torch_layers,
    whole,
)

pytest.importorskip("transformers")

ROBERTA = {"pad_token_id": 1, "max_position_embeddings": 66}
MODERN = {"local_attention": 8, "num_hidden_layers": 4} | dict.fromkeys(
    ("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1
)
SOUND = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
TEXT = {"max_position_embeddings": 64, "projection_size": 32}


def bert(kind: str = "Model", **settings: Any) -> nn.Module:
    return from_config("Bert", kind, **settings)


def checkpointed() -> nn.Module:
    model: Any = bert()
    model.gradient_checkpointing_enable()
    return model


PACKED: dict[str, tuple[Callable[[], Subject], Unpack]] = {
    "BERT with a pooler and kinds of tokens": (lambda: Subject(bert(), texts(kinds=True)), Unpack.AFTER_LAST),
    "BERT whose samples have no mask": (lambda: Subject(bert(), texts(mask=False)), Unpack.AFTER_LAST),
    "BERT with all hidden states": (lambda: Subject(bert(output_hidden_states=True), texts()), Unpack.AFTER_LAST),
    "BERT that predicts words": (lambda: Subject(bert("ForMaskedLM"), texts()), Unpack.NEVER),
    "BERT that returns a tuple": (
        lambda: Subject(bert("ForSequenceClassification", return_dict=False), texts()),
        Unpack.AFTER_LAST,
    ),
    "BERT with gradient checkpointing": (lambda: Subject(checkpointed(), texts()), Unpack.AFTER_LAST),
    "RoBERTa": (
        lambda: Subject(from_config("Roberta", "ForSequenceClassification", **ROBERTA), texts()),
        Unpack.AFTER_LAST,
    ),
    "DistilBERT": (
        lambda: Subject(from_config("DistilBert", "ForTokenClassification", **DISTIL), texts()),
        Unpack.NEVER,
    ),
    "ELECTRA": (lambda: Subject(from_config("Electra", embedding_size=16), texts()), Unpack.NEVER),
    "ALBERT, one block called many times": (
        lambda: Subject(from_config("Albert", embedding_size=16), texts()),
        Unpack.AFTER_LAST,
    ),
    "ModernBERT, local and rotary": (lambda: Subject(from_config("ModernBert", **MODERN), texts()), Unpack.NEVER),
    "ModernBERT with a mean": (
        lambda: Subject(
            from_config("ModernBert", "ForSequenceClassification", classifier_pooling="mean", **MODERN), texts()
        ),
        Unpack.AFTER_LAST,
    ),
    "XLM-RoBERTa": (lambda: Subject(from_config("XLMRoberta", **ROBERTA), texts()), Unpack.AFTER_LAST),
    "CamemBERT": (lambda: Subject(from_config("Camembert", **ROBERTA), texts()), Unpack.AFTER_LAST),
    "ERNIE": (lambda: Subject(from_config("Ernie"), texts()), Unpack.AFTER_LAST),
    "CLIP's text": (lambda: Subject(from_config("CLIPText", eos_token_id=2, **TEXT), texts()), Unpack.AFTER_LAST),
    "wav2vec 2 behind convolutions": (lambda: Subject(from_config("Wav2Vec2", **SOUND), sounds()), Unpack.NEVER),
    "Llama with grouped queries": (
        lambda: Subject(from_config("Llama", "ForCausalLM", num_attention_heads=4, num_key_value_heads=2), texts()),
        Unpack.NEVER,
    ),
    "GPT-2": (
        lambda: Subject(
            from_config("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=2, n_positions=64), texts(mask=False)
        ),
        Unpack.AFTER_LAST,
    ),
    "torch's encoder": (torch_layers, Unpack.NEVER),
    "torch's encoder, positions first": (lambda: torch_layers(rows_first=False), Unpack.NEVER),
    "torch's encoder, causal": (lambda: torch_layers(causal=True), Unpack.NEVER),
    "by hand, without a mask": (lambda: reader(pooled="all"), Unpack.NEVER),
    "by hand, with batch norms": (lambda: reader(pooled="all", norm=nn.BatchNorm1d(32)), Unpack.NEVER),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_answers_are_those_of_each_sample_alone(name: str) -> None:
    make, unpack = PACKED[name]
    engine = make().engine()
    assert engine.packs and engine.why_not_packed == "" and engine.packing is not None
    assert engine.packing.unpack is unpack
    check_alone(engine, other_samples(engine))


def other_samples(engine: TorchEngine) -> list[Sample]:
    """Samples of lengths that were not tried, in no order."""
    longest = engine.interface.samples[-1]
    lengths = {
        longest.length - 1,
        longest.length * 2 // 3,
        longest.length // 2,
        longest.length // 2 + 3,
        longest.length // 3,
    }
    return [engine.interface.inputs.crop(longest, length) for length in lengths]


@torch.inference_mode()
def check_alone(engine: TorchEngine, samples: list[Sample]) -> None:
    alone = answers_alone(engine.compute, engine.interface.inputs, engine.interface.outputs, samples)
    assert engine.packing is not None
    found = packed_answers(engine.compute, engine.interface, engine.packing, samples)
    assert max(map(difference, alone, found)) <= engine.tolerance


@pytest.mark.parametrize("subject", [lambda: Subject(bert("ForMaskedLM"), texts()), lambda: reader(pooled="all")])
def test_no_padding_is_computed(subject: Callable[[], Subject]) -> None:
    """A packed batch has the operations of its samples alone, a padded one of 9 to 30 positions has more."""
    engine = subject().engine()
    samples = other_samples(engine)
    assert engine.packing is not None

    def operations(*batches: list[Sample]) -> int:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            for batch in batches:
                engine.answers(batch)
        return counter.get_total_flops()

    packed, alone = operations(samples), operations(*([one] for one in samples))
    engine.packing, engine.together = None, Together.PADDED
    assert packed == alone < 0.8 * operations(samples)


class AttentionShapes(TorchFunctionMode):
    """Notes the shapes of queries: a mode below the packed one sees what that one calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is attention.ATTENTION:
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_samples_of_equal_length_share_a_call_of_attention() -> None:
    engine = Subject(bert(), texts()).engine()
    samples = [engine.interface.inputs.crop(engine.interface.samples[-1], length) for length in (7, 4, 7, 4, 7)]
    with AttentionShapes() as shapes:
        engine.answers(samples)
    assert [(rows, length) for rows, _, length, _ in shapes.found] == [(2, 4), (3, 7)] * 2


BUCKETED: dict[str, tuple[Callable[[], Subject], str, Together]] = {
    "DeBERTa": (
        lambda: Subject(
            from_config("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8), texts()
        ),
        "attention is not scaled_dot_product_attention",
        Together.PADDED,
    ),
    "MPNet": (
        lambda: Subject(from_config("MPNet", **ROBERTA), texts()),
        "attention is not scaled_dot_product_attention",
        Together.PADDED,
    ),
    "Longformer": (
        lambda: Subject(from_config("Longformer", attention_window=4), texts()),
        "attention is not scaled_dot",
        Together.PADDED,
    ),
    "BigBird": (
        lambda: Subject(from_config("BigBird"), texts()),
        "attention is not scaled_dot_product_attention",
        Together.PADDED,
    ),
    "FNet": (
        lambda: Subject(from_config("FNet"), texts(mask=False)),
        "attention is not scaled_dot_product_attention",
        Together.EQUAL,
    ),
    "T5, whose blocks know distances": (
        lambda: Subject(
            from_config("T5", "EncoderModel", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2), texts()
        ),
        "its blocks can't take packed states",
        Together.PADDED,
    ),
    "wav2vec 2 with norms over time": (
        lambda: Subject(
            from_config("Wav2Vec2", **(SOUND | {"feat_extract_norm": "group", "do_stable_layer_norm": False})), sounds()
        ),
        "what comes before its blocks depends on padding",
        Together.EQUAL,
    ),
    "SigLIP's text, which reads the last position": (
        lambda: Subject(from_config("SiglipText", **TEXT), texts(mask=False)),
        "what follows its blocks depends on padding",
        Together.EQUAL,
    ),
    "ViT": (
        lambda: Subject(
            from_config("ViT", image_size=16, patch_size=4),
            [{"pixel_values": torch.randn(1, 3, 16, 16)} for _ in range(3)],
        ),
        "all samples have one shape",
        Together.EQUAL,
    ),
    "a convolution beside attention": (
        lambda: reader(convolved=True),
        "blocks mix positions otherwise (blocks.0.local, Conv1d): outputs differ by",
        Together.EQUAL,
    ),
    "a mean over all positions": (
        lambda: reader(pooled="mean"),
        "what follows its blocks depends on padding",
        Together.EQUAL,
    ),
    "batch norms without statistics": (
        lambda: reader(norm=nn.BatchNorm1d(32, track_running_stats=False)),
        "a sample's answer depends on the others in its batch",
        Together.ALONE,
    ),
}


@pytest.mark.parametrize("name", BUCKETED)
def test_what_can_not_be_packed_says_why_and_answers_right(name: str) -> None:
    make, why, together = BUCKETED[name]
    engine = make().engine()
    assert not engine.packs and engine.why_not_packed.startswith(why)
    assert engine.together is together
    samples = [*engine.interface.samples[1:], engine.interface.samples[0]]
    with torch.inference_mode():
        alone = answers_alone(engine.compute, engine.interface.inputs, engine.interface.outputs, samples)
    assert max(map(difference, alone, engine.answers(samples))) <= engine.tolerance


@pytest.mark.parametrize(
    "name", ["BERT that predicts words", "torch's encoder, causal", "GPT-2", "by hand, without a mask"]
)
def test_attention_over_all_samples_at_once_is_not_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_all(self: PackedAttention, query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
        return attention.ATTENTION(query, key, value)

    monkeypatch.setattr(PackedAttention, "attend", over_all)
    engine = PACKED[name][0]().engine()
    assert not engine.packs and "outputs differ by" in engine.why_not_packed


def test_a_mask_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "effective", lambda mask: None)
    engine = Subject(bert(), texts()).engine()
    assert not engine.packs and "outputs differ by" in engine.why_not_packed


class Moody(Reader):
    """Its blocks are called once more for long batches."""

    def forward(self, ids: Any) -> Any:
        for _ in range(ids.shape[1] > 40):
            self.blocks[0](self.table(ids))
        return super().forward(ids)


def test_a_forward_that_takes_another_way_than_tried_is_answered_without_packing() -> None:
    engine = Subject(sharpened(Moody("all")), [torch.randint(1, 99, (1, length)) for length in (9, 30)], whole).engine()
    samples = [engine.interface.inputs.sample(torch.randint(1, 99, (length,))) for length in (50, 20)]
    assert engine.packing is not None
    with torch.inference_mode():
        with pytest.raises(Unpackable, match="3 blocks were called, and 2 when packing was tried"):
            packed_answers(engine.compute, engine.interface, engine.packing, samples)
        alone = answers_alone(engine.compute, engine.interface.inputs, engine.interface.outputs, samples)
    assert max(map(difference, alone, engine.answers(samples))) <= engine.tolerance
