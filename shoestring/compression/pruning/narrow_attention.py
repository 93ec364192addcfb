"""Multi-head attention whose heads together are narrower than the model, which nn.MultiheadAttention does not
support."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.errors import Mistake


class NarrowAttention(nn.Module):
    """nn.MultiheadAttention with pruned heads: the same parameters with the same names, but num_heads * head_dim may be
    less than embed_dim.

        concat_h softmax(Q_h K_h^T / sqrt(d)) V_h  W_out      with any number of heads h of width d

    Vaswani et al.: Attention Is All You Need, 2017, arXiv 1706.03762.
    """

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.in_proj_weight: Tensor | None
        self.in_proj_bias: Tensor | None
        self.q_proj_weight: Tensor
        self.k_proj_weight: Tensor
        self.v_proj_weight: Tensor
        if whole.bias_k is not None or whole.add_zero_attn:
            raise Mistake(
                "heads of an attention with add_bias_kv or add_zero_attn can't be removed: make it without them"
            )
        self.embed_dim, self.num_heads, self.head_dim = whole.embed_dim, whole.num_heads, whole.head_dim
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        self._qkv_same_embed_dim = False  # tells nn.TransformerEncoderLayer not to call its own kernel
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            self.register_parameter(name, getattr(whole, name))
        self.out_proj = whole.out_proj
        self.training = whole.training

    def project(self, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Queries, keys and values: (batch, head, position, width)."""
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        return [
            functional.linear(one, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for one, weight, bias in zip(inputs, weights, biases, strict=True)
        ]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        whole = query.dim() == 3
        inputs = (query, key, value) if whole else (query[None], key[None], value[None])
        if whole and not self.batch_first:
            inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        queries, keys, values = self.project(inputs)
        mask = self.mask(
            attn_mask, key_padding_mask if whole or key_padding_mask is None else key_padding_mask[None], queries
        )
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = queries @ keys.mT / self.head_dim**0.5  # (batch, head, query, key)
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ values
            told = weights.mean(1) if average_attn_weights else weights
        else:
            mixed, told = functional.scaled_dot_product_attention(queries, keys, values, mask, dropout), None
        out = self.out_proj(
            mixed.permute(2, 0, 1, 3).flatten(2)
        )  # rows in torch's order, because a repair compares them one by one
        if not whole:
            return out[:, 0], None if told is None else told[0]
        return (out.transpose(0, 1) if self.batch_first else out), told

    def mask(self, attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as an addend of the scores; True in a boolean mask means: do not attend."""
        total: Tensor | None = None
        if attention is not None:
            total = additive_mask(attention, like)
            if total.dim() == 3:
                total = total.unflatten(0, (like.shape[0], -1))  # a mask per head: keep those of the remaining heads
        if padding is not None:
            hidden = additive_mask(padding, like)[:, None, None]
            total = hidden if total is None else total + hidden
        return total


def additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
