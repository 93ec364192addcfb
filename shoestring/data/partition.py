"""Partition rules: how a job's data set is divided among devices. Every sample goes to one device, determined by the
seed.

Iid()                     all devices have the same mix and equally many samples
Dirichlet(alpha)          every device has its own mix of classes; the lower alpha, the fewer classes per device
QuantitySkew(alpha)       all have the same mix, but different numbers of samples; the lower alpha, the more unequal
ByColumn("author")        every device has the samples with one value of a column

Job(..., data=lambda: data_set, clients=Dirichlet(0.3))
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from shoestring.core.clients.clients import Clients, Named, Numbered
from shoestring.core.errors import Mistake
from shoestring.data.columns import classes_of, column_of

CALLS_USER = "data"  # core/user_code/seams.py

DRAWS = 100  # attempts of a rule to leave no client with too few samples


@dataclass(frozen=True)
class Iid:
    """Samples in random order, dealt in equal parts: all devices' records look alike."""

    def clients(self, data: Any, count: int, seed: int) -> Clients:
        check_count(data, count, 1, "Iid()")
        return deal_samples(data, even_sizes(len(data), count), permutation(len(data), seed))


@dataclass(frozen=True)
class QuantitySkew:
    """Devices with different numbers of samples of the same mix.

        n_i  =  least + (N - least K) q_i        q ~ Dirichlet(alpha) over the K devices

    Li, Diao, Chen, He 2022, Federated Learning on Non-IID Data Silos, arXiv 2102.02079, who draw again until every
    device has enough; here every device gets `least` first, and the rest is divided by q.
    """

    alpha: float = 1.0
    least: int = 1

    def __post_init__(self) -> None:
        check_knobs("QuantitySkew", self.alpha, self.least)

    def clients(self, data: Any, count: int, seed: int) -> Clients:
        check_count(data, count, self.least, f"QuantitySkew({self.alpha:g})")
        left = len(data) - self.least * count
        sizes = parts(left, mix([self.alpha] * count, random.Random(seed))) + self.least
        return deal_samples(data, sizes, permutation(len(data), seed))


@dataclass(frozen=True)
class Dirichlet:
    """Devices with different mixes of classes. `label` is the part of a sample with its class: sample[1],
    sample["label"].

    by="client" (Hsu, Qi, Brown 2019, Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335): every
    device has equally many samples, drawn without replacement by its own mix; a class that is used up is left out of
    later mixes.

        q_i ~ Dirichlet(alpha p)        p: frequencies of the classes in the data, times their number

    by="class" (Yurochkin et al. 2019, arXiv 1905.12022; Li et al. 2022, arXiv 2102.02079): each class is divided among
    all devices by its own mix, so that devices also have different numbers of samples. Drawn again until every device
    has `least`.

        q_c ~ Dirichlet(alpha) over devices
    """

    alpha: float = 0.3
    label: int | str = 1
    by: str = "client"
    least: int = 1

    def __post_init__(self) -> None:
        check_knobs("Dirichlet", self.alpha, self.least)
        if self.by not in ("client", "class"):
            raise Mistake(f'Dirichlet(by={self.by!r}): a mix is drawn for every "client" or for every "class"')

    def clients(self, data: Any, count: int, seed: int) -> Clients:
        check_count(data, count, self.least, f"Dirichlet({self.alpha:g})")
        classes = classes_of(data, self.label)
        drawn = random.Random(seed)
        if self.by == "client":
            table = mixed_clients(
                torch.bincount(classes).tolist(), even_sizes(len(data), count).tolist(), self.alpha, drawn
            )
        else:
            table = self.divided_classes(torch.bincount(classes).tolist(), count, drawn)
        # Samples sorted by class, in random order within a class: device i takes the next table[i, c] of class c
        order = permutation(len(data), seed)
        order = order[classes[order].argsort(stable=True)]
        owners = torch.arange(count).repeat(table.shape[1]).repeat_interleave(table.T.flatten())
        return deal_samples(data, table.sum(1), order[owners.argsort(stable=True)])

    def divided_classes(self, sizes: list[int], count: int, drawn: random.Random) -> Tensor:
        """Samples of every class (columns) for every device (rows)."""
        left = count
        for _ in range(DRAWS):
            table = torch.stack([parts(size, mix([self.alpha] * count, drawn)) for size in sizes], dim=1)
            left = min(left, poor := int((table.sum(1) < self.least).sum()))
            if not poor:
                return table
        raise Mistake(
            f'Dirichlet({self.alpha:g}, by="class") leaves at least {left:,} of {count:,} clients with fewer than {self.least} '
            f"samples, in each of {DRAWS} draws: alpha is too small for so many clients and {sum(sizes):,} samples; give fewer "
            f'clients, a larger alpha, or by="client", which gives all of them equally many'
        )


@dataclass(frozen=True)
class ByColumn:
    """A device for every value of a column (`sample["author"]`, `sample[2]`, or `columns` of the data set), named after
    it, in order of first appearance. The data determine their number; `clients_of` takes as many of them as were asked
    for."""

    column: int | str

    def clients(self, data: Any, count: int, seed: int) -> Clients:
        values = column_of(data, self.column)
        nothing = next((number for number, value in enumerate(values) if value is None or value != value), None)  # noqa: PLR0124
        if nothing is not None:
            raise Mistake(
                f"sample {nothing} has {values[nothing]} in its column {self.column!r}, so it is nobody's: leave such samples "
                f"out of the data, or give them a value"
            )
        names = list(dict.fromkeys(map(str, values)))
        if not names:
            raise Mistake(f"ByColumn({self.column!r}) of a data set without samples: nobody would have any")
        number = {name: place for place, name in enumerate(names)}
        owners = torch.tensor([number[str(value)] for value in values])
        return deal_samples(data, torch.bincount(owners), owners.argsort(stable=True), tuple(names))


def deal_samples(data: Any, sizes: Tensor, order: Tensor, names: tuple[str, ...] = ()) -> Clients:
    """Clients of whom the i-th gets the next sizes[i] samples of an order; a client's own samples are in the data's
    order."""
    stops = sizes.cumsum(0)

    def records(number: int) -> Subset[Any]:
        stop = int(stops[number])
        return Subset(data, order[stop - int(sizes[number]) : stop].sort().values.tolist())

    return Named(names, records) if names else Numbered(len(sizes), records)


def permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def even_sizes(total: int, count: int) -> Tensor:
    """
    >>> even_sizes(10, 4).tolist()
    [3, 3, 2, 2]
    """
    return torch.full((count,), total // count) + (torch.arange(count) < total % count)


def parts(total: int, shares: Sequence[float]) -> Tensor:
    """A whole number divided in proportion to shares, into whole numbers that add up to it.

    >>> parts(10, [0.5, 0.25, 0.25]).tolist()
    [5, 2, 3]
    """
    stops = (torch.tensor(shares, dtype=torch.float64).cumsum(0) * total + 1e-9).long()
    stops[-1] = total
    return stops.clamp(max=total).diff(prepend=torch.zeros(1, dtype=torch.long))


def mix(alphas: Sequence[float], drawn: random.Random) -> list[float]:
    """A draw from a Dirichlet distribution: gamma variables divided by their sum.

    In logarithms, log Gamma(a) = log Gamma(a + 1) + log(u) / a, because for small `a` all variables would be 0 in
    floating point.
    """
    logs = [math.log(drawn.gammavariate(alpha + 1, 1)) + math.log(1 - drawn.random()) / alpha for alpha in alphas]
    most = max(logs)
    weights = [math.exp(one - most) for one in logs]
    total = sum(weights)
    return [one / total for one in weights]


def mixed_clients(classes: list[int], sizes: list[int], alpha: float, drawn: random.Random) -> Tensor:
    """Samples of every class (columns) for every device (rows), if each device draws by its own mix, without
    replacement."""
    generator = torch.Generator().manual_seed(drawn.getrandbits(62))
    left = torch.tensor(classes)
    table = torch.zeros(len(sizes), len(classes), dtype=torch.long)
    prior = [alpha * size * len(classes) / sum(classes) for size in classes]
    for row, size in zip(table, sizes, strict=True):
        shares = torch.tensor(mix(prior, drawn), dtype=torch.float64)
        while (wanted := size - int(row.sum())) > 0:
            possible = shares * (left > 0)
            if not float(possible.sum()) > 0:  # all classes of the mix are used up: the rest is drawn from what is left
                possible = left.double()
            draws = torch.multinomial(possible, wanted, replacement=True, generator=generator)
            taken = torch.minimum(torch.bincount(draws, minlength=len(classes)), left)
            row += taken
            left -= taken
    return table


def check_knobs(name: str, alpha: float, least: int) -> None:
    if not 1e-6 <= alpha < math.inf:
        raise Mistake(
            f"{name}(alpha={alpha}): give a number above 0 (0.000001 or more); 0.1 is very unequal, 100 nearly equal"
        )
    if least < 1:
        raise Mistake(f"{name}(least={least}): a client without samples can't train; give 1 or more")


def check_count(data: Any, count: int, least: int, rule: str) -> None:
    if count < 1:
        raise Mistake(f"{count} clients: give 1 or more")
    if count * least > len(data):
        short = count - len(data) // least
        raise Mistake(
            f"{count:,} clients of {least} sample{'s' if least > 1 else ''} or more for {rule}, and the data set has "
            f"{len(data):,} samples: {short:,} would have too few; give {len(data) // least:,} clients or fewer, or more data"
        )
