"""Encode vectors as sums of codebook entries, and refit codebooks to given codes, under a weighted squared error.

    error(x, codes) = sum_j m_j (x_j - sum_s table_s[code_s, j])^2

Up to a term that does not depend on c, the errors of residuals r against all entries c of a table are one matrix
product: (m r) (-2 c)^T + m (c^2)^T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BEAM = 4  # candidates kept from one stage to the next
CHUNK = 1 << 23  # elements of the error matrix computed at once


class VectorCodes(NamedTuple):
    codes: Tensor  # (vectors, stages), int64
    tables: Tensor  # (stages, entries, length), values representable in float16


def encode(vectors: Tensor, weights: Tensor, tables: Tensor) -> Tensor:
    """Codes (vectors, stages) found by beam search over the stages; exact if there is one stage."""
    stages, entries = tables.shape[:2]
    at_once = max(1, CHUNK // (entries * (1 if stages == 1 else BEAM)))
    found = [
        beam_search(vectors[first : first + at_once], weights[first : first + at_once], tables)
        for first in range(0, len(vectors), at_once)
    ]
    return torch.cat(found) if found else torch.zeros(0, stages, dtype=torch.int64)


def beam_search(vectors: Tensor, weights: Tensor, tables: Tensor) -> Tensor:
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
        errors = already + error_changes(left.reshape(-1, length), heavy.reshape(-1, length), tables[stage]).view(
            count, kept, entries
        )
        wanted = 1 if stage == stages - 1 else min(BEAM, kept * entries)
        flat = errors.view(count, -1)
        best = flat.argmin(1, keepdim=True) if wanted == 1 else flat.topk(wanted, 1, largest=False).indices
        parent, code = best // entries, best % entries
        left = left.gather(1, parent[..., None].expand(-1, -1, length)) - tables[stage][code]
        codes = torch.cat((codes.gather(1, parent[..., None].expand(-1, -1, stage)), code[..., None]), -1)
    return codes[:, 0]


def error_changes(residuals: Tensor, weights: Tensor, table: Tensor) -> Tensor:
    """How much subtracting each entry of a table would change the error of each residual: (vectors, entries)."""
    return torch.cat((weights * residuals, weights), 1) @ torch.cat((-2 * table, table.square()), 1).T


def alternate_codes_and_tables(vectors: Tensor, weights: Tensor, tables: Tensor, rounds: int) -> Tensor:
    """Alternate between finding codes and refitting tables; return the float16-rounded tables with the least error."""
    best, least = tables, torch.inf
    for number in range(rounds + 1):
        tables = tables.clamp(-65504, 65504).half().float()
        codes = encode(vectors, weights, tables)
        error = error_of(vectors, weights, codes, tables)
        if error < least:
            best, least = tables, error
        if number < rounds:
            tables = refit_tables(vectors, weights, codes, tables)
    return best


def refit_tables(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> Tensor:
    """Refit tables to codes, one stage after the other: each entry becomes the weighted mean of the residuals it codes.
    Unused entries stay."""
    tables = tables.clone()
    for stage in range(len(tables)):
        others = sum_entries(codes, tables) - tables[stage][codes[:, stage]]
        top, bottom = (
            torch.zeros_like(tables[stage], dtype=torch.float64).index_add_(0, codes[:, stage], one.double())
            for one in (weights * (vectors - others), weights)
        )
        tables[stage] = torch.where(bottom > 0, top / bottom.clamp(min=1e-300), tables[stage].double()).float()
    return tables


def sum_entries(codes: Tensor, tables: Tensor) -> Tensor:
    return torch.stack([table[codes[:, stage]] for stage, table in enumerate(tables)]).sum(0)


def error_of(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> float:
    return float((weights * (vectors - sum_entries(codes, tables)).square()).sum(dtype=torch.float64))
