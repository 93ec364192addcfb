"""Scalar codebook quantization: fit 2^bits values to a weight, by percentiles or by weighted k-means.

Each number w_i of a weight is replaced by the nearest of 2^bits values c. The layer's output changes least if each
number counts with m_i, the mean square of the activation that it is multiplied with. With a scale s_i per group, v_i =
w_i / s_i is coded:

    minimise   sum_i m_i (w_i - s_i c(v_i))^2  =  sum_i m_i s_i^2 (v_i - c(v_i))^2

percentile   each value is the mean of one of 2^bits equally populated bins; fast and unweighted
k-means      Lloyd 1982, Least Squares Quantization in PCM, doi 10.1109/TIT.1982.1056489. In one dimension clusters are
             intervals, so an iteration takes 2^bits differences of prefix sums. It is started twice and the better
             result kept: from the percentiles, and from the optimum for a histogram, found by dynamic programming
             (Wang, Song 2011, Ckmeans.1d.dp, doi 10.32614/RJ-2011-015; exact for up to 512 distinct numbers). Scales
             are fitted in turn: given the codes, a group's best scale is s = sum m w c / sum m c^2.

Measured on MiniLM (1 - cosine of sentence embeddings, 256 texts; benchmarks/compress/codebooks.py). Figures are for
weighted k-means, unweighted k-means and percentiles; for grids, round-to-nearest and GPTQ. All linear layers, groups of
64: 4 bits .027, .031, .050; grid .034 and .011. 3 bits .111, .136, .149; grid .121 and .039. 2 bits .767, .548, .409;
grid .376 and .154: there the smaller weighted error does more damage, and codebooks are of no use. 8 bits without
scales .00022, .00024, .024; grid .00027. Word embedding (weighted by word frequency): 4 bits .0012, like the grid;
without scales .0018 weighted and .0039 unweighted. So k-means beats round-to-nearest slightly at 4 and 8 bits of linear
layers, and GPTQ on a grid beats both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.grid import matrix_shape
from shoestring.core.errors import Mistake

SAMPLE = 1 << 19  # numbers that values are fitted to
OUTER = 2000  # one in so many numbers counts as an outlier, on each side
BINS = 512  # of the histogram for dynamic programming
ITERATIONS = 100  # of Lloyd's algorithm at most; it stops when no assignment changes
LARGEST = 65504.0  # largest float16
METHODS = ("percentile", "kmeans")


def fit_codebook(
    weight: Tensor,
    bits: int,
    group: int = 0,
    importance: Tensor | None = None,
    method: str = "kmeans",
    *,
    rounds: int = 3,
    seed: int = 0,
) -> CodebookFormat:
    """Quantize a weight to codes into 2^bits values.

    `importance`: weight of each number in the error, broadcast to (rows, columns), for instance the mean squares of the
    inputs, one per column. `rounds`: alternations between fitting scales and fitting values.

    >>> fit_codebook(torch.tensor([[1.0, 2.0, 1.0, 4.0, 8.0]]), bits=2).dense()
    tensor([[1., 2., 1., 4., 8.]])
    """
    if method not in METHODS:
        raise Mistake(f"a codebook by {method!r}: there are {', '.join(METHODS)}")
    matrix = matrix_to_code(weight, importance)
    units, weights = split_into_units(matrix, group), split_into_units(broadcast_importance(importance, matrix), group)
    if units.numel() > SAMPLE:
        values, _ = fit_values_and_scales(
            *sample_units(units, weights, method, seed), None, bits, group, method, rounds
        )
        values, coded = fit_values_and_scales(units, weights, values, bits, group, method, rounds)
    else:
        values, coded = fit_values_and_scales(units, weights, None, bits, group, method, rounds)
    rows, columns = matrix.shape
    codes = coded.codes.view(rows, -1)[:, :columns]
    scales = coded.scales.view(rows, -1) if group else None
    return CodebookFormat.of(codes, values, scales, bits, group, tuple(weight.shape), weight.dtype)


class ScalarCodes(NamedTuple):
    codes: Tensor  # (units, numbers per unit), uint8
    scales: Tensor  # (units, 1)
    error: float


def fit_values_and_scales(
    units: Tensor, weights: Tensor, values: Tensor | None, bits: int, group: int, method: str, rounds: int
) -> tuple[Tensor, ScalarCodes]:
    """Codes and scales for units, each of which shares one scale; and the values: the given ones, or newly fitted
    ones."""
    scales = max_scales(units) if group else torch.ones(1, 1)
    best: tuple[Tensor, ScalarCodes] | None = None
    for _ in range(max(rounds, 1) if group and method != "percentile" else 1):
        numbers, heavy = units / scales if group else units, weights * scales.square() if group else weights
        table = (
            fit_values(numbers, heavy, bits, method, None if best is None else best[0]) if values is None else values
        )
        codes = nearest_codes(numbers, table)
        decoded = torch.index_select(table, 0, codes.view(-1).to(torch.int32)).view(units.shape)
        error = float(((decoded - numbers).square_().mul_(heavy)).sum(dtype=torch.float64))
        if best is None or error < best[1].error:
            best = table, ScalarCodes(codes, scales, error)
        scales = refit_scales(units, decoded, weights, scales) if group else scales
    assert best is not None
    return best


def sample_units(units: Tensor, weights: Tensor, method: str, seed: int) -> tuple[Tensor, Tensor]:
    """A random sample of units, with their weights. Without scales, all outliers are included and the others are
    weighted up to stand for the rest: a missing value for a few large numbers does more damage than all other
    rounding."""
    chosen = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))[: -(-SAMPLE // units.shape[1])]
    if units.shape[1] > 1 or method == "percentile":
        return units[chosen], weights[chosen]
    ordered, tail = units[chosen, 0].sort().values, len(chosen) // OUTER
    outer = (units[:, 0] < ordered[tail]) | (units[:, 0] > ordered[-1 - tail])
    inner = chosen[~outer[chosen]]
    times = float((~outer).sum()) / max(len(inner), 1)
    return torch.cat((units[outer], units[inner])), torch.cat((weights[outer], weights[inner] * times))


def split_into_units(matrix: Tensor, group: int) -> Tensor:
    """Reshape to (units, group): numbers of a unit share a scale, and rows are padded with zeros. Without groups, every
    number is a unit of its own."""
    if not group:
        return matrix.reshape(-1, 1)
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % group)).reshape(-1, group)


def broadcast_importance(importance: Tensor | None, matrix: Tensor) -> Tensor:
    if importance is None:
        return torch.ones(1, 1).expand(matrix.shape)
    try:
        return importance.detach().float().broadcast_to(matrix.shape)
    except RuntimeError:
        rows, columns = matrix.shape
        raise Mistake(
            f"importances of shape {list(importance.shape)} for a weight of {rows} rows and {columns} columns: give one per "
            "column, or one per number"
        ) from None


def max_scales(units: Tensor) -> Tensor:
    """Largest absolute value of every unit, rounded to float16; 1 where all are zero."""
    scales = units.abs().amax(1, keepdim=True).half().float()
    return torch.where(scales > 0, scales, 1.0)


def refit_scales(units: Tensor, decoded: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    """Least-squares scale of every unit, s = sum m w c / sum m c^2; the previous one where this is undefined or
    overflows float16."""
    heavy = weights * decoded
    found = ((heavy * units).sum(1, keepdim=True) / (heavy * decoded).sum(1, keepdim=True)).half().float()
    return torch.where(torch.isfinite(found) & (found > 0), found, before)


def matrix_to_code(weight: Tensor, importance: Tensor | None) -> Tensor:
    """The weight as a float32 matrix (rows, columns). Raises Mistake for weights or importances that can't be coded."""
    matrix = weight.detach().float().reshape(matrix_shape(tuple(weight.shape)))
    if not matrix.numel():
        raise Mistake(
            f"a weight of shape {list(weight.shape)} is empty: there is nothing to fit values to, store it as it is"
        )
    if not bool(torch.isfinite(matrix).all()):
        raise Mistake(
            f"a weight of shape {list(weight.shape)} has numbers that are not finite: the training diverged to NaN, or the "
            "file is damaged; compress an earlier checkpoint"
        )
    if float(matrix.abs().max()) > LARGEST:
        raise Mistake(
            f"a weight of shape {list(weight.shape)} has numbers up to {float(matrix.abs().max()):.3g}, but values and scales "
            f"are float16, whose maximum is {LARGEST:.0f}: store it as it is"
        )
    if importance is not None and not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise Mistake("importances must be finite and not negative: they are mean squares of the activations")
    return matrix


def fit_values(numbers: Tensor, weights: Tensor, bits: int, method: str, before: Tensor | None) -> Tensor:
    """Fit 2^bits sorted values, rounded to float16; `before`: values to start from."""
    sums, entries = PrefixSums.of(numbers.reshape(-1), weights.reshape(-1)), 2**bits
    by_percentile = percentiles(sums.numbers, entries) if before is None else before.double()
    if method == "percentile":
        return by_percentile.half().float()
    starts = [by_percentile]
    if before is None:
        found = optimal_values(sums, entries)  # fewer, if there are fewer numbers
        starts.append(torch.nn.functional.pad(found, (0, entries - len(found)), value=float(found[-1])))
    tried = [one.half().float() for one in (by_percentile, *(lloyd(sums, start) for start in starts))]
    errors = [sums.error(one) for one in tried]
    return tried[errors.index(min(errors))]


def percentiles(ordered: Tensor, entries: int) -> Tensor:
    """Means of `entries` equally populated bins of sorted numbers. With fewer numbers than bins, some values repeat."""
    edges = torch.arange(entries + 1) * len(ordered) // entries
    first, last = edges[:-1], torch.maximum(edges[1:], edges[:-1] + 1)
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    return ((sums[last] - sums[first]) / (last - first)).clamp(ordered[0], ordered[-1])


class PrefixSums(NamedTuple):
    """Prefix sums of sorted numbers: the sum over an interval is a difference of two."""

    numbers: Tensor
    weight: Tensor
    first: Tensor  # sum of m v
    second: Tensor  # sum of m v^2

    @classmethod
    def of(cls, numbers: Tensor, weights: Tensor) -> PrefixSums:
        ordered, order = numbers.double().sort()
        heavy = weights.double()[order]
        heavy = heavy / heavy.sum() if float(heavy.sum()) > 0 else torch.full_like(heavy, 1 / len(heavy))
        return cls(
            ordered,
            *(
                torch.nn.functional.pad(one.cumsum(0), (1, 0))
                for one in (heavy, heavy * ordered, heavy * ordered.square())
            ),
        )

    def edges(self, values: Tensor) -> Tensor:
        """Boundaries, as indices into the sorted numbers, of the intervals nearest to each value."""
        inside = torch.searchsorted(self.numbers, (values[1:] + values[:-1]) / 2)
        return torch.nn.functional.pad(torch.nn.functional.pad(inside, (1, 0)), (0, 1), value=len(self.numbers))

    def error(self, values: Tensor) -> float:
        values = values.double()
        mass, first, second = (one[self.edges(values)].diff() for one in self[1:])
        return float((second - 2 * values * first + values.square() * mass).sum())


def lloyd(sums: PrefixSums, values: Tensor) -> Tensor:
    """Lloyd's algorithm from the given values: move each to the weighted mean of its nearest numbers. The error never
    grows."""
    values, edges = values.double(), torch.zeros(0)
    for _ in range(ITERATIONS):
        before, edges = edges, sums.edges(values)
        if torch.equal(before, edges):
            break
        mass = sums.weight[edges].diff()
        values = torch.where(mass > 1e-15, sums.first[edges].diff() / mass.clamp(min=1e-15), values).sort().values
    return values


def optimal_values(sums: PrefixSums, entries: int) -> Tensor:
    """Optimal values for numbers in at most `BINS` bins, by dynamic programming: D[k, j] = min_i D[k - 1, i] + cost(i,
    j), where cost(i, j) is the error of bins i to j with one value.

    Bins are spaced by the cube root of the density, as optimal values are (Panter, Dite 1951,
    doi 10.1109/JRPROC.1951.230523).
    """
    edges = bin_edges(sums)
    bins, entries = len(edges) - 1, min(entries, len(edges) - 1)
    mass, first, second = (one[edges] for one in sums[1:])
    span, moment = mass[:, None] - mass, first[:, None] - first  # (end, begin)
    cost = second[:, None] - second - moment.square() / span.clamp(min=1e-300)
    cost = torch.where(span > 0, cost.clamp(min=0), 0.0)
    cost[torch.ones_like(cost, dtype=torch.bool).triu(0)] = torch.inf
    best, room = [cost[:, 0]], torch.empty_like(cost)
    for _ in range(entries - 1):
        best.append(torch.add(cost, best[-1], out=room).amin(1))
    cuts = [bins]
    for number in reversed(range(entries - 1)):
        cuts.append(int((cost[cuts[-1]] + best[number]).argmin()))
    ends = torch.tensor([0, *reversed(cuts)])
    heavy = mass[ends].diff()
    return torch.where(heavy > 0, first[ends].diff() / heavy.clamp(min=1e-300), sums.numbers[edges[ends[:-1]]])


def bin_edges(sums: PrefixSums) -> Tensor:
    """Where bins of the sorted numbers begin; if there are few distinct numbers, each is a bin."""
    numbers = sums.numbers
    begins = torch.nn.functional.pad(numbers[1:] != numbers[:-1], (1, 0), value=True).nonzero()[:, 0]
    if len(begins) > BINS:
        grid = torch.linspace(float(numbers[0]), float(numbers[-1]), 4 * BINS + 1, dtype=torch.float64)
        places = torch.nn.functional.pad(torch.searchsorted(numbers, grid[1:-1]), (1, 0))
        mass = torch.nn.functional.pad(sums.weight[places], (0, 1), value=float(sums.weight[-1])).diff()
        density = torch.nn.functional.pad((mass.clamp(min=0) ** (1 / 3)).cumsum(0), (1, 0))
        wanted = torch.linspace(0, float(density[-1]), BINS + 1, dtype=torch.float64)[1:-1]
        cell = (torch.searchsorted(density, wanted, right=True) - 1).clamp(0, 4 * BINS - 1)
        part = (wanted - density[cell]) / (density[cell + 1] - density[cell]).clamp(min=1e-300)
        inside = torch.searchsorted(numbers, grid[cell] + part * (grid[1] - grid[0]))
        begins = torch.nn.functional.pad(inside, (1, 0)).unique()
        begins = begins[begins < len(numbers)]
    return torch.nn.functional.pad(begins, (0, 1), value=len(numbers))


def nearest_codes(numbers: Tensor, values: Tensor) -> Tensor:
    """Index of the nearest value for every number; `values` are sorted."""
    return torch.bucketize(numbers, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
