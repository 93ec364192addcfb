"""Decoders of transformers hand their blocks a key-value cache, which recomputation leaves out: keys then lie otherwise in memory, and T5
differs in the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from shoestring import Job, plan

IDS = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def t5() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize(("model", "word"), [(t5, "to rounding"), (llama, "to rounding"), (bert, "same bits")])
def test_a_block_without_its_cache_is_the_same_to_rounding_only(model: object, word: str) -> None:
    job = Job(model=model, data=[{"input_ids": IDS, "labels": IDS}], steps=1)  # type: ignore[arg-type]
    assert plan(job, use=["Checkpoint(every=1)"]).chosen.exactness.word == word
