"""Compute the factors of a layer in closed form, weighted by the second moments of its inputs where these are known.

Linear, rank r     minimise |(W - U V) L|, with M = L L^T the second moment of the inputs: U holds the first r left singular
                   vectors of W L, and V = U^T W. Eckart, Young 1936, The Approximation of One Matrix by Another of
                   Lower Rank, doi 10.1007/BF02288367; weighted by inputs: Wang, Zheng, Wan, Zhang 2024, SVD-LLM, arXiv
                   2403.07378. No inverse of L is needed.
Convolution        Tucker-2: W[o, i, h, w] = sum U[o, p] C[p, q, h, w] V[q, i], by orthogonal iteration. Kim, Park, Yoo, Choi, Yang, Shin
                   2016, Compression of Deep Convolutional Neural Networks for Fast and Low Power Mobile Applications,
                   arXiv 1511.06530.
Embedding          tensor train by successive singular value decompositions. Oseledets 2011, Tensor-Train Decomposition, doi
                   10.1137/090752286; for embeddings: Hrinchuk, Khrulkov, Mirvakhabova, Orlova, Oseledets 2020,
                   Tensorized Embedding Layers, arXiv 1901.10787.

Measured without training afterwards (benchmarks/compress/factorization.py): MiniLM's linear layers with .9, .75, .5 of
their parameters have a damage (1 - cosine) of .077, .119, .218 if weighted by inputs, .315, .434, .622 if not; all
weights in 4 bits on a grid with GPTQ cost .011. Its word embedding as a tensor train with .9, .75, .5: .014, .384,
.427, against .0012 for 4 bits. Tucker, mean accuracy on digits of 5 networks with .979: at a share of .5 .979 (.977
unweighted), .25 .976 (.977), .1 .947 (.916). So factorize convolutions, or train afterwards.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from shoestring.compression.factorization.chains import core_shapes
from shoestring.core.errors import Mistake

DAMPING = 1e-2  # fraction of the mean second moment added to the diagonal, so that errors in unseen inputs count too
SWEEPS = 4  # of Tucker's orthogonal iteration


def cholesky_root(moment: Tensor) -> Tensor:
    """L with M = L L^T, of the damped moment."""
    moment = moment.double()
    if moment.dim() != 2 or moment.shape[0] != moment.shape[1] or not bool(torch.isfinite(moment).all()):
        raise Mistake(
            f"a second moment of shape {list(moment.shape)} must be a square matrix of finite numbers, the sum of x x^T over "
            f"inputs x"
        )
    mean = float(moment.diagonal().mean())
    lower: Tensor = torch.linalg.cholesky(
        moment + (DAMPING * mean if mean > 0 else 1.0) * torch.eye(len(moment), dtype=torch.float64)
    )
    return lower


def low_rank(weight: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """U (out, rank) and V (rank, in) that minimise the error of the layer's output.

    >>> from torch import outer, tensor
    >>> left, right = low_rank(outer(tensor([1.0, 2.0]), tensor([3.0, 4.0, 5.0])), 1)
    >>> torch.allclose(left @ right, torch.tensor([[3.0, 4.0, 5.0], [6.0, 8.0, 10.0]]))
    True
    """
    whole = weight.detach().double()
    if moment is not None and len(moment) != whole.shape[1]:
        raise Mistake(
            f"a second moment of {len(moment)} inputs for a weight with {whole.shape[1]} inputs: they belong to different layers"
        )
    left = singular_vectors(whole if moment is None else whole @ cholesky_root(moment), rank)
    return left.to(weight.dtype), (left.T @ whole).to(weight.dtype)


def singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """The first left singular vectors; the largest element of each is positive, so they do not depend on the
    library."""
    return fix_signs(torch.linalg.svd(matrix, full_matrices=False).U[:, :rank])


def fix_signs(vectors: Tensor) -> Tensor:
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    return vectors * torch.where(signs == 0, 1.0, signs)


def tucker(weight: Tensor, ranks: tuple[int, int], moment: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U (out, p), C (p, q, h, w), V (q, in). `moment`: of the input's channels, or of whole patches (channels h w)."""
    whole = weight.detach().double()
    outputs, inputs = whole.shape[:2]
    lower = None
    if moment is not None:
        lower = cholesky_root(channel_moment(moment, inputs, prod(whole.shape[2:])))
        whole = torch.einsum("oihw,ij->ojhw", whole, lower)
    right = singular_vectors(whole.transpose(0, 1).reshape(inputs, -1), ranks[1])
    left = torch.zeros(0)
    for _ in range(SWEEPS):
        left = singular_vectors(torch.einsum("oihw,iq->oqhw", whole, right).reshape(outputs, -1), ranks[0])
        right = singular_vectors(torch.einsum("oihw,op->iphw", whole, left).reshape(inputs, -1), ranks[1])
    core = torch.einsum("oihw,op,iq->pqhw", whole, left, right)
    back = right.T if lower is None else torch.linalg.solve_triangular(lower.T, right, upper=True).T
    return left.to(weight.dtype), core.to(weight.dtype), back.to(weight.dtype)


def channel_moment(moment: Tensor, channels: int, pixels: int) -> Tensor:
    """The second moment of channels; a moment of patches is averaged over the kernel's pixels."""
    if len(moment) == channels:
        return moment
    if len(moment) != channels * pixels:
        raise Mistake(
            f"a second moment of {len(moment)} inputs for a convolution of {channels} channels and {pixels} kernel pixels: give "
            f"that of its channels ({channels}) or of its patches ({channels * pixels})"
        )
    return moment.view(channels, pixels, channels, pixels).diagonal(dim1=1, dim2=3).mean(-1)


def tensor_train(
    table: Tensor, rows: tuple[int, int, int], columns: tuple[int, int, int], ranks: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Three cores of a table (count, width), padded with zero rows to v1 v2 v3."""
    whole = torch.nn.functional.pad(table.detach().double(), (0, 0, 0, prod(rows) - len(table)))
    whole = (
        whole.view(*rows, *columns).permute(0, 3, 1, 4, 2, 5).reshape(rows[0] * columns[0], -1)
    )  # (v1 d1, v2 d2 v3 d3)
    first = gram_vectors(whole, ranks[0])
    rest = (first.T @ whole).view(ranks[0] * rows[1] * columns[1], -1)  # (r1 v2 d2, v3 d3)
    third = gram_vectors(rest.T, ranks[1])
    second = (rest @ third).view(ranks[0], rows[1], columns[1], ranks[1]).transpose(0, 1)
    shapes = core_shapes(rows, columns, ranks)
    third = third.view(rows[2], columns[2], ranks[1]).transpose(1, 2)
    return tuple(
        one.to(table.dtype).contiguous().view(shape) for one, shape in zip((first, second, third), shapes, strict=True)
    )


def gram_vectors(matrix: Tensor, rank: int) -> Tensor:
    """The first left singular vectors of a wide matrix A, as eigenvectors of A A^T."""
    return fix_signs(torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)[:, :rank])
