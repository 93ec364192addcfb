"""Replacements of factorized layers: sequences of ordinary smaller layers that still have the original's attributes.

    X.weight  ->  X.0.weight, X.1.weight         reading X.weight gives the product of the factors

They are not subclasses of the original layer: the factors are ordinary layers, which are quantized, pruned and exported
like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LayerChain(nn.Sequential):
    """Abstract: a sequence of layers. Its bias is that of the last layer."""

    def factor(self, place: int) -> Tensor:
        """A layer's weight as a matrix; the kernel of a 1 x 1 convolution is flattened."""
        layer: Any = self[place]
        found: Tensor = layer.weight
        return found.flatten(1)

    @property
    def bias(self) -> Tensor | None:
        last: Any = self[-1]
        found: Tensor | None = last.bias
        return found


class LowRankLinear(LayerChain):
    """y = U (V x) + b for y = W x + b, with V (rank, in) as "0" and U (out, rank) as "1". `transposed`: for a Conv1D of
    transformers, whose weight is (in, out)."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool, transposed: bool = False, **kind: Any) -> None:
        super().__init__(nn.Linear(inputs, rank, bias=False, **kind), nn.Linear(rank, outputs, bias=bias, **kind))
        self.in_features, self.out_features, self.rank, self.transposed = inputs, outputs, rank, transposed
        self.nx, self.nf = inputs, outputs  # as Conv1D has them

    @property
    def weight(self) -> Tensor:
        product = self.factor(1) @ self.factor(0)
        return product.T if self.transposed else product


class LowRankConv(LayerChain):
    """A 1 x 1 convolution as two: V (rank, in) with the original's stride and padding as "0", U (out, rank) as "1"."""

    def __init__(self, first: nn.Conv2d, second: nn.Conv2d) -> None:
        super().__init__(first, second)
        self.in_channels, self.out_channels, self.rank = first.in_channels, second.out_channels, first.out_channels

    @property
    def weight(self) -> Tensor:
        return (self.factor(1) @ self.factor(0))[..., None, None]


class TuckerConv(LayerChain):
    """A convolution as three: 1 x 1 to fewer channels as "0", the core with kernel, stride and padding as "1", 1 x 1 to
    all channels as "2"."""

    def __init__(self, first: nn.Conv2d, core: nn.Conv2d, last: nn.Conv2d) -> None:
        super().__init__(first, core, last)
        self.in_channels, self.out_channels = first.in_channels, last.out_channels

    @property
    def weight(self) -> Tensor:
        core: Any = self[1]
        return torch.einsum("op,pqhw,qi->oihw", self.factor(2), core.weight, self.factor(0))


class TrainEmbedding(nn.Module):
    """An embedding whose table is a tensor train of three cores: a row is a product of three small matrices. Only rows
    that are looked up are computed.

        row(i)[j] = G1[i1, j1] G2[i2, j2] G3[i3, j3],    i = (i1 v2 + i2) v3 + i3,  j = (j1 d2 + j2) d3 + j3

    with cores (v1, d1, r1), (v2, r1, d2, r2), (v3, r2, d3). v1 v2 v3 may exceed the vocabulary; the extra rows are
    unused.
    """

    def __init__(
        self,
        count: int,
        rows: tuple[int, int, int],
        columns: tuple[int, int, int],
        ranks: tuple[int, int],
        padding_idx: int | None = None,
        **kind: Any,
    ) -> None:
        super().__init__()
        shapes = core_shapes(rows, columns, ranks)
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            count,
            columns[0] * columns[1] * columns[2],
            padding_idx,
        )
        self.row_parts, self.ranks = rows, ranks
        self.cores = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, **kind) * shape[-1] ** -0.5) for shape in shapes]
        )

    def forward(self, index: Tensor) -> Tensor:
        _, second, third = self.row_parts
        flat = index.reshape(-1)
        if (
            can_read_values(index)
            and flat.numel()
            and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings
        ):
            raise IndexError(
                f"index out of range in an embedding of {self.num_embeddings}: {int(flat.min())} to {int(flat.max())}"
            )
        one, two, three = (
            core[part]
            for core, part in zip(
                self.cores, (flat // (second * third), flat // third % second, flat % third), strict=True
            )
        )
        left = torch.bmm(one, two.flatten(2)).view(
            len(flat), one.shape[1] * two.shape[2], two.shape[3]
        )  # (n, d1 d2, r2)
        return torch.bmm(left, three).view(*index.shape, self.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """The whole table, which `forward` avoids computing."""
        one, two, three = self.cores
        whole = torch.einsum("aip,bpjq,cqk->abcijk", one, two, three)
        return whole.reshape(-1, self.embedding_dim)[: self.num_embeddings]


def can_read_values(index: Tensor) -> bool:
    """Whether values can be read: not of a meta tensor, and not while a graph is captured."""
    jit: Any = torch.jit
    return not (index.is_meta or torch.compiler.is_compiling() or jit.is_tracing())


def core_shapes(
    rows: tuple[int, int, int], columns: tuple[int, int, int], ranks: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    return ((rows[0], columns[0], ranks[0]), (rows[1], ranks[0], columns[1], ranks[1]), (rows[2], ranks[1], columns[2]))
