"""Values of a codebook for single numbers: by percentiles, or by k-means with weights.

Each number w_i of a weight becomes the nearest of 2^bits values c. What a layer computes changes least if each number counts by the mean
square m_i of the input that it is multiplied with; with a scale s_i for its group, v_i = w_i / s_i is what is coded:

    least   sum_i m_i (w_i - s_i c(v_i))^2  =  sum_i m_i s_i^2 (v_i - c(v_i))^2

percentile   the values are the means of 2^bits parts with equally many numbers: quick, no weights, many values where many numbers are
k-means      Lloyd 1982, Least Squares Quantization in PCM, doi 10.1109/TIT.1982.1056489; in one dimension the clusters are intervals, so
             that an iteration is 2^bits differences of prefix sums. It begins where dynamic programming over a histogram finds the least
             (Wang, Song 2011, Ckmeans.1d.dp, doi 10.32614/RJ-2011-015), which is exact for up to 512 different numbers, and from the
             percentiles; the better one is taken. Scales are fitted too: given the codes, s = sum m w c / sum m c^2 is a group's best.

Measured on MiniLM (1 - cosine of sentence embeddings, 256 texts; benchmarks/compress/codebooks.py). All linear layers, groups of 64: 4 bits
.027 weighted, .031 plain, .050 by percentiles; the grid .034 rounded to the nearest, .011 with GPTQ. 3 bits .111, .136, .149; grid .121
and .039. 2 bits .767, .548, .409; grid .376 and .154: there the smaller weighted error does more damage, and codebooks are no use.
8 bits without scales .00022, .00024, .024; grid .00027. Word embedding (weights: how often words were seen): 4 bits .0012 as the grid,
without scales .0018 weighted and .0039 plain. So k-means beats rounding to the nearest a little at 4 and 8 bits of linear layers, and GPTQ
on a grid beats both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.grid import matrix_shape
from shoestring.core.errors import Mistake

SAMPLE = 1 << 19  # numbers that values are fitted to
OUTER = 2000  # one of so many numbers, on each side, is among the outermost
BINS = 512  # of the histogram for dynamic programming
ITERATIONS = 100  # of Lloyd at most; it ends when no number changes its value
LARGEST = 65504.0  # that float16 has
METHODS = ("percentile", "kmeans")


def fitted_codebook(
    weight: Tensor,
    bits: int,
    group: int = 0,
    importance: Tensor | None = None,
    method: str = "kmeans",
    *,
    rounds: int = 3,
    seed: int = 0,
) -> CodebookFormat:
    """A weight as codes into 2^bits values. `importance`: of each number, or what can be broadcast to (rows, columns), for instance the
    mean squares of the inputs (columns); `rounds`: times that scales and values are fitted to each other.

    >>> fitted_codebook(torch.tensor([[1.0, 2.0, 1.0, 4.0, 8.0]]), bits=2).dense()
    tensor([[1., 2., 1., 4., 8.]])
    """
    if method not in METHODS:
        raise Mistake(f"a codebook by {method!r}: there are {', '.join(METHODS)}")
    matrix = checked(weight, importance)
    units, weights = in_units(matrix, group), in_units(broadcast(importance, matrix), group)
    if units.numel() > SAMPLE:
        values, _ = fitted(*sampled(units, weights, method, seed), None, bits, group, method, rounds)
        values, coded = fitted(units, weights, values, bits, group, method, rounds)
    else:
        values, coded = fitted(units, weights, None, bits, group, method, rounds)
    rows, columns = matrix.shape
    codes = coded.codes.view(rows, -1)[:, :columns]
    scales = coded.scales.view(rows, -1) if group else None
    return CodebookFormat.of(codes, values, scales, bits, group, tuple(weight.shape), weight.dtype)


class Coded(NamedTuple):
    codes: Tensor  # (units, numbers of each), uint8
    scales: Tensor  # (units, 1)
    error: float


def fitted(
    units: Tensor, weights: Tensor, values: Tensor | None, bits: int, group: int, method: str, rounds: int
) -> tuple[Tensor, Coded]:
    """Values (those that are given, or the best that are found) and codes and scales of units that share a scale each."""
    scales = largest(units) if group else torch.ones(1, 1)
    best: tuple[Tensor, Coded] | None = None
    for _ in range(max(rounds, 1) if group and method != "percentile" else 1):
        numbers, heavy = units / scales if group else units, weights * scales.square() if group else weights
        table = (
            fitted_values(numbers, heavy, bits, method, None if best is None else best[0]) if values is None else values
        )
        codes = nearest(numbers, table)
        decoded = torch.index_select(table, 0, codes.view(-1).to(torch.int32)).view(units.shape)
        error = float(((decoded - numbers).square_().mul_(heavy)).sum(dtype=torch.float64))
        if best is None or error < best[1].error:
            best = table, Coded(codes, scales, error)
        scales = refitted_scales(units, decoded, weights, scales) if group else scales
    assert best is not None
    return best


def sampled(units: Tensor, weights: Tensor, method: str, seed: int) -> tuple[Tensor, Tensor]:
    """Some units. Without scales, all of the outermost numbers are among them, and the others stand for as many as they were drawn from:
    a value that is missing for a few large numbers does more damage than all other rounding."""
    chosen = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))[: -(-SAMPLE // units.shape[1])]
    if units.shape[1] > 1 or method == "percentile":
        return units[chosen], weights[chosen]
    ordered, tail = units[chosen, 0].sort().values, len(chosen) // OUTER
    outer = (units[:, 0] < ordered[tail]) | (units[:, 0] > ordered[-1 - tail])
    inner = chosen[~outer[chosen]]
    times = float((~outer).sum()) / max(len(inner), 1)
    return torch.cat((units[outer], units[inner])), torch.cat((weights[outer], weights[inner] * times))


def in_units(matrix: Tensor, group: int) -> Tensor:
    """(units, group): numbers that share a scale, the last of a row filled up with zeros; without groups, every number alone."""
    if not group:
        return matrix.reshape(-1, 1)
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % group)).reshape(-1, group)


def broadcast(importance: Tensor | None, matrix: Tensor) -> Tensor:
    if importance is None:
        return torch.ones(1, 1).expand(matrix.shape)
    try:
        return importance.detach().float().broadcast_to(matrix.shape)
    except RuntimeError:
        rows, columns = matrix.shape
        raise Mistake(
            f"importances {list(importance.shape)} for a weight of {rows} rows and {columns} columns: give one for every column, "
            "or for every number"
        ) from None


def largest(units: Tensor) -> Tensor:
    """The largest number of every unit, as float16 has it; 1 where all are zero."""
    scales = units.abs().amax(1, keepdim=True).half().float()
    return torch.where(scales > 0, scales, 1.0)


def refitted_scales(units: Tensor, decoded: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    """s = sum m w c / sum m c^2 of every unit; as before where that says nothing, or float16 does not have it."""
    heavy = weights * decoded
    found = ((heavy * units).sum(1, keepdim=True) / (heavy * decoded).sum(1, keepdim=True)).half().float()
    return torch.where(torch.isfinite(found) & (found > 0), found, before)


def checked(weight: Tensor, importance: Tensor | None) -> Tensor:
    """The weight as (rows, columns) of float32; what can't be coded is refused."""
    matrix = weight.detach().float().reshape(matrix_shape(tuple(weight.shape)))
    if not matrix.numel():
        raise Mistake(
            f"a weight of {list(weight.shape)} has no numbers: there is nothing to fit values to, store it as it is"
        )
    if not bool(torch.isfinite(matrix).all()):
        raise Mistake(
            f"a weight of {list(weight.shape)} has numbers that are not finite, which no value is near to: the model was trained "
            "to NaN, or its file is damaged; compress a checkpoint from before that"
        )
    if float(matrix.abs().max()) > LARGEST:
        raise Mistake(
            f"a weight of {list(weight.shape)} has numbers up to {float(matrix.abs().max()):.3g}, and values and scales are "
            f"float16, which ends at {LARGEST:.0f}: store it as it is"
        )
    if importance is not None and not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise Mistake(
            "importances must be finite and not negative: they are mean squares of what the numbers are multiplied with"
        )
    return matrix


def fitted_values(numbers: Tensor, weights: Tensor, bits: int, method: str, before: Tensor | None) -> Tensor:
    """2^bits values in order, as float16 has them; from those that there were before on."""
    sums, entries = PrefixSums.of(numbers.reshape(-1), weights.reshape(-1)), 2**bits
    by_percentile = percentiles(sums.numbers, entries) if before is None else before.double()
    if method == "percentile":
        return by_percentile.half().float()
    starts = [by_percentile]
    if before is None:
        found = least(sums, entries)  # fewer, if there are fewer numbers
        starts.append(torch.nn.functional.pad(found, (0, entries - len(found)), value=float(found[-1])))
    tried = [one.half().float() for one in (by_percentile, *(lloyd(sums, start) for start in starts))]
    errors = [sums.error(one) for one in tried]
    return tried[errors.index(min(errors))]


def percentiles(ordered: Tensor, entries: int) -> Tensor:
    """The means of `entries` parts of sorted numbers with equally many each. Fewer numbers than that: some are there several times."""
    edges = torch.arange(entries + 1) * len(ordered) // entries
    first, last = edges[:-1], torch.maximum(edges[1:], edges[:-1] + 1)
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    return ((sums[last] - sums[first]) / (last - first)).clamp(ordered[0], ordered[-1])


class PrefixSums(NamedTuple):
    """Of sorted numbers: sums before each place, so that those of an interval are a difference."""

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
        """Where the numbers begin that are nearest to each of the values, and where the last ones end."""
        inside = torch.searchsorted(self.numbers, (values[1:] + values[:-1]) / 2)
        return torch.nn.functional.pad(torch.nn.functional.pad(inside, (1, 0)), (0, 1), value=len(self.numbers))

    def error(self, values: Tensor) -> float:
        values = values.double()
        mass, first, second = (one[self.edges(values)].diff() for one in self[1:])
        return float((second - 2 * values * first + values.square() * mass).sum())


def lloyd(sums: PrefixSums, values: Tensor) -> Tensor:
    """Values that are the weighted means of the numbers nearest to them, from these values on. The error never grows."""
    values, edges = values.double(), torch.zeros(0)
    for _ in range(ITERATIONS):
        before, edges = edges, sums.edges(values)
        if torch.equal(before, edges):
            break
        mass = sums.weight[edges].diff()
        values = torch.where(mass > 1e-15, sums.first[edges].diff() / mass.clamp(min=1e-15), values).sort().values
    return values


def least(sums: PrefixSums, entries: int) -> Tensor:
    """The best values for numbers in at most `BINS` bins: D[k, j] = min_i D[k - 1, i] + cost(i, j), the cost of bins i to j with one value.

    Bins are narrow where the cube root of the density is large, as the best values are (Panter, Dite 1951, doi 10.1109/JRPROC.1951.230523).
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
    """Where bins of the sorted numbers begin; every different number is one where they are few."""
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


def nearest(numbers: Tensor, values: Tensor) -> Tensor:
    """The codes of the values (in order) next to the numbers."""
    return torch.bucketize(numbers, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
