"""Learn the rotation of optimized product quantization (OPQ): after it, product codes of the rows lose less."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoestring.compression.quantization.codebook_training import kmeans
from shoestring.compression.quantization.vector_codes import encode

POINTS = 1 << 13  # rows used to learn a rotation
ROUNDS = 8  # alternations between rotation and codebooks
FIRST, NEXT = 8, 4  # k-means iterations in the first round, and in later ones, which start from the previous tables
MOST_BITS = 8  # of the temporary codebooks


def learn_rotation(rows: Tensor, length: int, bits: int, seed: int) -> Tensor:
    """An orthogonal R (width, width) for rows X (n, width), chosen so that product codes of X R lose least: each run of
    `length` columns has a codebook of its own.

    Given the decoded rows Y, the best rotation is U V^T of X^T Y = U S V^T (Ge, He, Ke, Sun 2013,
    doi 10.1109/CVPR.2013.379, section 3; orthogonal Procrustes: Schönemann 1966, doi 10.1007/BF02289451).
    """
    width, entries = rows.shape[1], 2 ** min(bits, MOST_BITS)
    if len(rows) <= entries:  # too few to learn a rotation from
        return torch.eye(width)
    draw = torch.Generator().manual_seed(seed)
    rows = rows[torch.randperm(len(rows), generator=draw)[:POINTS]]
    tables: list[Tensor | None] = [None] * (width // length)
    rotation = balanced_axes(rows, length)
    best, least = rotation, torch.inf
    for number in range(ROUNDS):
        turned = rows @ rotation
        parts = [one.contiguous() for one in turned.split(length, 1)]
        ones = torch.ones_like(parts[0])
        found = [
            kmeans(part, ones, entries, draw, table, NEXT if number else FIRST)
            for part, table in zip(parts, tables, strict=True)
        ]
        coded = torch.cat(
            [table[encode(part, ones, table[None])[:, 0]] for part, table in zip(parts, found, strict=True)], 1
        )
        error = float((coded - turned).square().sum(dtype=torch.float64))
        if error < least:
            best, least = rotation, error
        tables = [*found]
        left, _, right = torch.linalg.svd(rows.double().T @ coded.double())
        rotation = (left @ right).float()
    return best


def balanced_axes(rows: Tensor, length: int) -> Tensor:
    """Initial rotation: principal axes, distributed so that every part has about the same product of variances. This is
    optimal for normally distributed rows (Ge et al., section 4)."""
    variances, axes = torch.linalg.eigh(torch.cov(rows.double().T).view(rows.shape[1], -1))
    parts: list[list[int]] = [[] for _ in range(len(axes) // length)]
    logs = [0.0] * len(parts)
    least = max(float(variances.max()) * 1e-9, 1e-30)
    for place in reversed(range(len(axes))):  # the largest first
        part = min((one for one in range(len(parts)) if len(parts[one]) < length), key=lambda one: logs[one])
        parts[part].append(place)
        logs[part] += math.log(max(float(variances[place]), least) / least)
    found: Tensor = axes[:, [place for part in parts for place in part]]
    return found.float()
