"""Finding codebooks for vectors, by a squared error in which every number has a weight.

    k-means        one codebook (Lloyd 1982, doi 10.1109/TIT.1982.1056489)
    residual       a codebook for what the ones before left over (Chen, Guan, Wang 2010, doi 10.3390/s101211259)
    additive       codes by a beam, all codebooks refitted at once (AQ: Babenko, Lempitsky 2014, doi 10.1109/CVPR.2014.124)
    local search   the same, and codes are drawn anew and searched for one at a time (LSQ: Martinez et al.
                   2016, doi 10.1007/978-3-319-46475-6_9)

All of it is torch. faiss has these too, and aborted the whole process for some weights (heap corruption), which no caller can catch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.compression.quantization.vector_codes import encoded, gains, refitted, summed

METHODS = ("residual", "additive", "local search")  # for sums of several entries
KMEANS = 20  # iterations
PARTS = 4  # in which the vectors to begin with are drawn
JOINT = 8  # rounds of codes and codebooks in turn, where all codebooks are refitted at once
SEARCHES = 4  # attempts of local search in each of them
RIDGE = 1e-4  # of a vector, added to every entry's count: entries that always come together have no single best value


def trained(vectors: Tensor, weights: Tensor, entries: int, stages: int, method: str, seed: int) -> Tensor:
    """Tables (stages, entries, length) for the vectors (count, length), whose numbers have these weights."""
    if len(vectors) <= entries:  # every vector is an entry
        tables = torch.zeros(stages, entries, vectors.shape[1])
        tables[0, : len(vectors)] = vectors
        return tables
    draw = torch.Generator().manual_seed(seed)
    tables = residual(vectors, weights, entries, stages, draw)
    if stages == 1 or method == "residual":
        return tables
    codes = encoded(vectors, weights, tables)
    for _ in range(JOINT):
        tables = jointly_refitted(vectors, weights, codes, tables)
        codes = (
            encoded(vectors, weights, tables)
            if method == "additive"
            else searched(vectors, weights, codes, tables, draw)
        )
    return tables


def residual(vectors: Tensor, weights: Tensor, entries: int, stages: int, draw: torch.Generator) -> Tensor:
    """A codebook for the vectors, then one for what it leaves over, and so on."""
    left, found = vectors, []
    for _ in range(stages):
        table = means(left, weights, entries, draw)
        left = left - table[encoded(left, weights, table[None])[:, 0]]
        found.append(table)
    return torch.stack(found)


def means(
    vectors: Tensor,
    weights: Tensor,
    entries: int,
    draw: torch.Generator,
    begin: Tensor | None = None,
    rounds: int = KMEANS,
) -> Tensor:
    """k-means, from vectors that are drawn or from a table on. An entry that no vector is nearest to becomes the vector that is
    worst off."""
    table = spread_out(vectors, weights, entries, draw) if begin is None else begin
    for _ in range(rounds):
        codes = encoded(vectors, weights, table[None])
        unused = (torch.bincount(codes[:, 0], minlength=entries) == 0).nonzero()[:, 0]
        after = refitted(vectors, weights, codes, table[None])[0]
        if len(unused):
            off = (weights * (vectors - after[codes[:, 0]]).square()).sum(1)
            after[unused] = vectors[off.topk(len(unused)).indices]
        if torch.equal(after, table):
            break
        table = after
    return table


def spread_out(vectors: Tensor, weights: Tensor, entries: int, draw: torch.Generator) -> Tensor:
    """Vectors to begin with, drawn in a few parts: each with a chance that grows with how far it is from those that were drawn before, so
    that a few long ones are not missed (k-means||: Bahmani et al. 2012, doi 10.14778/2180912.2180915)."""
    table = vectors[torch.randperm(len(vectors), generator=draw)[: -(-entries // PARTS)]]
    while len(table) < entries:
        codes = encoded(vectors, weights, table[None])[:, 0]
        off = (weights * (vectors - table[codes]).square()).sum(1).double()
        count = min(-(-entries // PARTS), entries - len(table))
        off = off + off.mean() * 1e-9 + 1e-300  # where all are met exactly, any will do
        table = torch.cat((table, vectors[torch.multinomial(off, count, generator=draw)]))
    return table


def jointly_refitted(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> Tensor:
    """The tables that are best for the codes, all at once: (B^T W B) C = B^T W X, with B a row of ones and zeros for each vector. A vector
    counts by the mean weight of its numbers, so that one system serves all of them. Unused entries stay."""
    stages, entries, length = tables.shape
    heavy = weights.mean(1).double()
    heavy = heavy / heavy.mean() if float(heavy.sum()) > 0 else torch.ones_like(heavy)
    places = codes + entries * torch.arange(stages)
    pairs = torch.zeros(stages * entries, stages * entries, dtype=torch.float64)
    for stage in range(stages):
        for other in range(stages):
            pairs.view(-1).index_add_(0, places[:, stage] * len(pairs) + places[:, other], heavy)
    sums = torch.zeros(stages * entries, length, dtype=torch.float64)
    for stage in range(stages):
        sums.index_add_(0, places[:, stage], heavy[:, None] * vectors.double())
    before = tables.view(-1, length).double()
    pairs.diagonal().add_(RIDGE)
    found: Tensor = torch.linalg.solve(pairs, sums + RIDGE * before)
    return found.float().view(stages, entries, length)


def searched(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor, draw: torch.Generator) -> Tensor:
    """Codes that are nowhere worse: one stage's is drawn anew, then every stage's is searched for while the others stay; what is better is
    kept."""
    stages, entries = tables.shape[:2]

    def errors(of: Tensor) -> Tensor:
        return (weights * (vectors - summed(of, tables)).square()).sum(1)

    best = errors(codes)
    for _ in range(SEARCHES):
        tried = codes.clone()
        stage = torch.randint(stages, (len(codes), 1), generator=draw)
        tried.scatter_(1, stage, torch.randint(entries, (len(codes), 1), generator=draw))
        for one in range(stages):
            left = vectors - summed(tried, tables) + tables[one][tried[:, one]]
            tried[:, one] = gains(left, weights, tables[one]).argmin(1)
        now = errors(tried)
        better = now < best
        codes, best = torch.where(better[:, None], tried, codes), torch.where(better, now, best)
    return codes
