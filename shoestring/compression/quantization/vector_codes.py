"""Codes for vectors in tables whose entries are added up, and tables for codes: by a squared error in which every number has a weight.

    error(x, codes) = sum_j m_j (x_j - sum_s table_s[code_s, j])^2

The errors of residuals r with all entries c of a table are  (m r) (-2 c)^T + m (c^2)^T  and what does not depend on c: one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BEAM = 4  # best sums that are kept from one stage to the next
CHUNK = 1 << 23  # numbers of a matrix of errors that are computed at once


class VectorCodes(NamedTuple):
    codes: Tensor  # (vectors, stages), int64
    tables: Tensor  # (stages, entries, length), numbers that float16 has


def encoded(vectors: Tensor, weights: Tensor, tables: Tensor) -> Tensor:
    """The best codes that a beam finds, stage after stage; of one stage, the best there are."""
    stages, entries = tables.shape[:2]
    at_once = max(1, CHUNK // (entries * (1 if stages == 1 else BEAM)))
    found = [
        beam(vectors[first : first + at_once], weights[first : first + at_once], tables)
        for first in range(0, len(vectors), at_once)
    ]
    return torch.cat(found) if found else torch.zeros(0, stages, dtype=torch.int64)


def beam(vectors: Tensor, weights: Tensor, tables: Tensor) -> Tensor:
    stages, entries, length = tables.shape
    count = len(vectors)
    left, codes = (
        vectors[:, None],
        torch.zeros(count, 1, 0, dtype=torch.int64),
    )  # (vectors, kept, length), (vectors, kept, stages)
    for stage in range(stages):
        kept = left.shape[1]
        heavy = weights[:, None].expand(-1, kept, -1)
        already = (heavy * left.square()).sum(-1, keepdim=True)
        errors = already + gains(left.reshape(-1, length), heavy.reshape(-1, length), tables[stage]).view(
            count, kept, entries
        )
        wanted = 1 if stage == stages - 1 else min(BEAM, kept * entries)
        flat = errors.view(count, -1)
        best = flat.argmin(1, keepdim=True) if wanted == 1 else flat.topk(wanted, 1, largest=False).indices
        parent, code = best // entries, best % entries
        left = left.gather(1, parent[..., None].expand(-1, -1, length)) - tables[stage][code]
        codes = torch.cat((codes.gather(1, parent[..., None].expand(-1, -1, stage)), code[..., None]), -1)
    return codes[:, 0]


def gains(residuals: Tensor, weights: Tensor, table: Tensor) -> Tensor:
    """What every entry of a table changes of the error: (vectors, entries)."""
    return torch.cat((weights * residuals, weights), 1) @ torch.cat((-2 * table, table.square()), 1).T


def refined(vectors: Tensor, weights: Tensor, tables: Tensor, rounds: int) -> Tensor:
    """Tables as float16 has them: codes and tables in turn; those with the least error."""
    best, least = tables, torch.inf
    for number in range(rounds + 1):
        tables = tables.clamp(-65504, 65504).half().float()
        codes = encoded(vectors, weights, tables)
        error = error_of(vectors, weights, codes, tables)
        if error < least:
            best, least = tables, error
        if number < rounds:
            tables = refitted(vectors, weights, codes, tables)
    return best


def refitted(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> Tensor:
    """Tables whose entries are weighted means of what they are to stand for, one stage after the other; unused ones stay."""
    tables = tables.clone()
    for stage in range(len(tables)):
        others = summed(codes, tables) - tables[stage][codes[:, stage]]
        top, bottom = (
            torch.zeros_like(tables[stage], dtype=torch.float64).index_add_(0, codes[:, stage], one.double())
            for one in (weights * (vectors - others), weights)
        )
        tables[stage] = torch.where(bottom > 0, top / bottom.clamp(min=1e-300), tables[stage].double()).float()
    return tables


def summed(codes: Tensor, tables: Tensor) -> Tensor:
    return torch.stack([table[codes[:, stage]] for stage, table in enumerate(tables)]).sum(0)


def error_of(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> float:
    return float((weights * (vectors - summed(codes, tables)).square()).sum(dtype=torch.float64))
