"""Train codebooks for vectors: minimise a squared error in which every number has its own weight.

    k-means        one codebook (Lloyd 1982, doi 10.1109/TIT.1982.1056489)
    residual       each codebook codes the residual of the previous ones (Chen, Guan, Wang 2010, doi 10.3390/s101211259)
    additive       beam search for codes, joint least squares for all codebooks (AQ: Babenko, Lempitsky 2014,
                   doi 10.1109/CVPR.2014.124)
    local search   additive, with codes perturbed and searched one stage at a time (LSQ: Martinez et al. 2016,
                   doi 10.1007/978-3-319-46475-6_9)

Everything is written in torch. faiss has these methods too, but for some weights it aborted the whole process (heap
corruption), which no caller can catch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.compression.quantization.vector_codes import encode, error_changes, refit_tables, sum_entries

METHODS = ("residual", "additive", "local search")  # for sums of several entries
KMEANS_ITERATIONS = 20
INITIAL_DRAWS = 4  # rounds in which the initial entries of k-means are drawn
JOINT_ROUNDS = 8  # alternations between finding codes and refitting all codebooks
SEARCHES = 4  # attempts of local search per round
RIDGE = 1e-4  # added to every entry's count: entries that always occur together have no unique best value


def train_codebooks(vectors: Tensor, weights: Tensor, entries: int, stages: int, method: str, seed: int) -> Tensor:
    """Codebook tables (stages, entries, length) for vectors (count, length) with weights of the same shape."""
    if len(vectors) <= entries:  # every vector becomes an entry
        tables = torch.zeros(stages, entries, vectors.shape[1])
        tables[0, : len(vectors)] = vectors
        return tables
    draw = torch.Generator().manual_seed(seed)
    tables = residual_codebooks(vectors, weights, entries, stages, draw)
    if stages == 1 or method == "residual":
        return tables
    codes = encode(vectors, weights, tables)
    for _ in range(JOINT_ROUNDS):
        tables = refit_jointly(vectors, weights, codes, tables)
        codes = (
            encode(vectors, weights, tables)
            if method == "additive"
            else local_search(vectors, weights, codes, tables, draw)
        )
    return tables


def residual_codebooks(vectors: Tensor, weights: Tensor, entries: int, stages: int, draw: torch.Generator) -> Tensor:
    """Train one codebook for the vectors, the next one for the residuals, and so on."""
    left, found = vectors, []
    for _ in range(stages):
        table = kmeans(left, weights, entries, draw)
        left = left - table[encode(left, weights, table[None])[:, 0]]
        found.append(table)
    return torch.stack(found)


def kmeans(
    vectors: Tensor,
    weights: Tensor,
    entries: int,
    draw: torch.Generator,
    begin: Tensor | None = None,
    rounds: int = KMEANS_ITERATIONS,
) -> Tensor:
    """Weighted k-means, from `begin` or from drawn vectors. An unused entry is replaced by the vector with the largest
    error."""
    table = initial_entries(vectors, weights, entries, draw) if begin is None else begin
    for _ in range(rounds):
        codes = encode(vectors, weights, table[None])
        unused = (torch.bincount(codes[:, 0], minlength=entries) == 0).nonzero()[:, 0]
        after = refit_tables(vectors, weights, codes, table[None])[0]
        if len(unused):
            off = (weights * (vectors - after[codes[:, 0]]).square()).sum(1)
            after[unused] = vectors[off.topk(len(unused)).indices]
        if torch.equal(after, table):
            break
        table = after
    return table


def initial_entries(vectors: Tensor, weights: Tensor, entries: int, draw: torch.Generator) -> Tensor:
    """Initial entries for k-means, drawn in a few rounds with a probability proportional to the error so far, so that
    outliers are not missed (k-means||: Bahmani et al. 2012, doi 10.14778/2180912.2180915)."""
    table = vectors[torch.randperm(len(vectors), generator=draw)[: -(-entries // INITIAL_DRAWS)]]
    while len(table) < entries:
        codes = encode(vectors, weights, table[None])[:, 0]
        off = (weights * (vectors - table[codes]).square()).sum(1).double()
        count = min(-(-entries // INITIAL_DRAWS), entries - len(table))
        off = off + off.mean() * 1e-9 + 1e-300  # if every vector is already an entry, draw any
        table = torch.cat((table, vectors[torch.multinomial(off, count, generator=draw)]))
    return table


def refit_jointly(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor) -> Tensor:
    """Solve for all tables at once, given the codes: (B^T W B) C = B^T W X, where B has a 0/1 row per vector.

    Each vector counts with the mean weight of its numbers, so that one system serves all columns. Unused entries stay.
    """
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


def local_search(vectors: Tensor, weights: Tensor, codes: Tensor, tables: Tensor, draw: torch.Generator) -> Tensor:
    """Improve codes by local search: redraw one stage's code at random, optimise each stage's code while the others
    stay fixed, and keep the result where the error fell."""
    stages, entries = tables.shape[:2]

    def errors(of: Tensor) -> Tensor:
        return (weights * (vectors - sum_entries(of, tables)).square()).sum(1)

    best = errors(codes)
    for _ in range(SEARCHES):
        tried = codes.clone()
        stage = torch.randint(stages, (len(codes), 1), generator=draw)
        tried.scatter_(1, stage, torch.randint(entries, (len(codes), 1), generator=draw))
        for one in range(stages):
            left = vectors - sum_entries(tried, tables) + tables[one][tried[:, one]]
            tried[:, one] = error_changes(left, weights, tables[one]).argmin(1)
        now = errors(tried)
        better = now < best
        codes, best = torch.where(better[:, None], tried, codes), torch.where(better, now, best)
    return codes
