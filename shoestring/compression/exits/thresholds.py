"""Choose the thresholds of all exits: least expected cost for a limited loss of quality, from outputs of all exits on
held-out rows.

    a row leaves at the first exit k with confidence_k >= threshold_k, else at the end
    cost(k)  = sum_{j<=k} part_j + sum_{j<=k, j used} head_j
    minimise mean cost   subject to   mean right_end - mean right_leaving <= limit

With the others fixed, the best value of one threshold is found in one pass over sorted confidences. For a given price
of quality, thresholds are improved in turn until none changes (coordinate descent); prices from small to large give the
frontier, and descents that keep the limit fill the gaps. With two or more exits this is a local optimum: on random
evidence with two exits its cost was never more than 5 % above the best of all pairs (tests). Without `delta`,
thresholds are fitted to these rows: on other rows the loss is somewhat above the limit, the more so the fewer rows
there were.

`delta`: with probability 1 - delta over the held-out rows, the loss on the population is at most `limit` (learn then
test, fixed sequence): half of the rows proposes a sequence of thresholds, the other half tests them from the most
conservative on, and stops at the first whose bound exceeds the limit; the cheapest that passed (or no exits) is chosen.
A test's bound uses Clopper-Pearson: upper bound of rows that became wrong minus lower bound of rows that became right,
each at delta / 2. Angelopoulos, Bates, Candes, Jordan, Lei: Learn then Test, 2021, arXiv 2110.01052; Schuster et al.:
CALM, 2022, arXiv 2207.07061.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoestring.compression.exits.bounds import at_least, at_most
from shoestring.core.errors import Mistake

NEVER = math.inf  # threshold of an exit that is off; its head is not computed
PRICES = tuple(
    10 ** (power / 4) for power in range(-6, 13)
)  # prices of quality, in units of the cost of the whole model
TURNS = 20
SHARES = tuple(share / 12 for share in range(12))  # shares of rows that stay, used as starting points of the search

Thresholds = tuple[float, ...]


@dataclass(frozen=True)
class ExitEvidence:
    """Outputs of every exit on held-out rows, and costs of the model's parts per row (seconds, operations: any unit)."""

    confidence: Tensor  # (rows, exits)
    right: Tensor  # (rows, exits + 1): 1 where the answer is right, or agrees with the whole model; the last column is the end
    parts: tuple[float, ...]  # cost from one exit to the next, the last to the end: exits + 1
    heads: tuple[float, ...]  # cost of each head
    fixed: tuple[
        float, ...
    ] = ()  # fixed cost of each part per batch, divided by the rows of a batch: exits + 1, or empty
    leaving: float = 0.0  # cost of removing rows from a batch, divided by its rows
    batch: int = 1  # rows per batch

    def __post_init__(self) -> None:
        exits = len(self.heads)
        rows = len(self.right)
        fits = (
            self.confidence.shape == (rows, exits)
            and self.right.shape == (rows, exits + 1)
            and len(self.parts) == exits + 1
        )
        if not fits or not rows or not exits:
            raise Mistake(
                f"evidence of {exits} heads and {len(self.parts)} parts with confidences {tuple(self.confidence.shape)} and "
                f"right {tuple(self.right.shape)}: give (rows, exits), (rows, exits + 1), and a part more than heads"
            )
        if bool(torch.isnan(self.confidence).any()):
            found = [exit for exit in range(exits) if bool(torch.isnan(self.confidence[:, exit]).any())]
            raise Mistake(
                f"the confidences of exits {found} are not numbers for some rows: the model's or a head's output is NaN there; "
                f"train it again with a lower rate, or look for rows that are broken"
            )
        each = (*self.parts, *self.heads, *self.fixed, self.leaving)
        if (
            not all(math.isfinite(cost) and cost >= 0 for cost in each)
            or not self.parts[0] > 0
            or len(self.fixed) not in (0, exits + 1)
        ):
            raise Mistake(
                f"costs {self.parts} of parts and {self.heads} of heads: give finite numbers, 0 or more, and the first part "
                f"more than 0"
            )
        object.__setattr__(self, "confidence", self.confidence.double())
        object.__setattr__(self, "right", self.right.double())

    @property
    def whole(self) -> float:
        """Cost per row without exits."""
        return sum(self.parts) + sum(self.fixed)

    def rows(self, numbers: Tensor) -> ExitEvidence:
        return replace(self, confidence=self.confidence[numbers], right=self.right[numbers])


@dataclass(frozen=True)
class Point:
    """The effect of thresholds: predicted from held-out rows, or measured on others."""

    thresholds: Thresholds
    shares: tuple[float, ...]  # shares of rows that leave at each exit, and at the end
    cost: float  # mean cost per row
    speedup: float  # cost of the whole model without exits / this cost
    quality: float  # share of rows that are right
    loss: float  # quality of the whole model - this quality
    harmed: float  # share of rows that became wrong
    helped: float  # share of rows that became right
    rows: int


@dataclass(frozen=True)
class ExitCalibration:
    """Thresholds for a limit, their expected effect, and the frontier."""

    point: Point  # with delta: on the rows that tested it
    limit: float
    frontier: tuple[Point, ...] = field(repr=False)  # by cost
    delta: float | None = None
    bound: float | None = None  # the true loss is higher with probability at most delta


def checked_thresholds(thresholds: Sequence[float], exits: int) -> Thresholds:
    if len(thresholds) != exits or any(math.isnan(one) for one in thresholds):
        raise Mistake(
            f"{len(thresholds)} thresholds ({', '.join(f'{one:g}' for one in thresholds)}) for {exits} exits: give a number for "
            f"each, and inf for one that is not used"
        )
    return tuple(float(one) for one in thresholds)


def leaving(evidence: ExitEvidence, thresholds: Sequence[float]) -> Tensor:
    """The number of the exit at which every row leaves; `exits` for the end.

    >>> toy = ExitEvidence(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.0, 0.0]]), torch.ones(3, 3), (1.0, 1.0, 1.0), (0.0, 0.0))
    >>> leaving(toy, (0.75, 0.5)).tolist()
    [0, 1, 2]
    """
    passes = evidence.confidence >= torch.tensor(thresholds, dtype=torch.float64)
    return torch.cat((passes, torch.ones(len(passes), 1, dtype=torch.bool)), 1).int().argmax(1)


def costs(evidence: ExitEvidence, thresholds: Sequence[float]) -> Tensor:
    """Cost of a row that leaves at each exit, and at the end."""
    heads = [head if threshold < NEVER else 0.0 for head, threshold in zip(evidence.heads, thresholds, strict=True)]
    return torch.tensor(
        [part + head for part, head in zip(evidence.parts, (*heads, 0.0), strict=True)], dtype=torch.float64
    ).cumsum(0)


def shared_cost(evidence: ExitEvidence, shares: Tensor, thresholds: Sequence[float]) -> float:
    """A row's share of fixed costs: a part's fixed cost is paid if any row of the batch reaches it."""
    coming = 1 - torch.cat((torch.zeros(1), shares[:-1])).cumsum(0)
    nobody = (1 - coming.clamp(0, 1)) ** evidence.batch
    parts = sum(fixed * (1 - float(one)) for fixed, one in zip(evidence.fixed, nobody, strict=False))
    return parts + (evidence.leaving if any(one < NEVER for one in thresholds) else 0.0)


def operate(evidence: ExitEvidence, thresholds: Sequence[float]) -> Point:
    """The effect of these thresholds on these rows."""
    checked = checked_thresholds(thresholds, len(evidence.heads))
    exits = leaving(evidence, checked)
    right, end = evidence.right.gather(1, exits[:, None])[:, 0], evidence.right[:, -1]
    shares = torch.bincount(exits, minlength=len(evidence.parts)).double() / len(exits)
    cost = float(costs(evidence, checked)[exits].mean()) + shared_cost(evidence, shares, checked)
    return Point(
        checked,
        tuple(shares.tolist()),
        cost,
        evidence.whole / cost,
        float(right.mean()),
        float((end - right).mean()),
        float((end - right).clamp(min=0).mean()),
        float((right - end).clamp(min=0).mean()),
        len(exits),
    )


def improve_threshold(
    evidence: ExitEvidence, thresholds: Thresholds, exit: int, price: float, limit: float
) -> Thresholds:
    """The best threshold of one exit with the others fixed: least cost + price * loss (sums over rows) among those
    within the limit."""
    used = tuple(0.0 if place == exit else one for place, one in enumerate(thresholds))  # its head is computed
    unused = tuple(NEVER if place == exit else one for place, one in enumerate(thresholds))
    on = leaving(evidence, unused)
    here = on > exit  # rows that reach this exit
    confidence, order = evidence.confidence[here, exit].sort(descending=True)
    if not len(order):
        return unused
    cost, end = costs(evidence, used), evidence.right[:, -1]
    goes_on = evidence.right.gather(1, on[:, None])[:, 0]
    gain = (cost[on] - cost[exit])[here][order].cumsum(0)  # saved cost if the first m leave here
    harm = (goes_on - evidence.right[:, exit])[here][order].cumsum(0)  # and the loss
    total, loss = cost[on].sum() - gain, (end - goes_on).sum() + harm
    most = limit * len(evidence.right) + 1e-9
    without = (
        costs(evidence, unused)[on].sum() + price * (end - goes_on).sum()
        if (end - goes_on).sum() <= most
        else torch.inf
    )
    cuts = torch.ones_like(confidence, dtype=torch.bool)
    cuts[:-1] = confidence[:-1] > confidence[1:]  # rows with equal confidence leave together
    cuts &= loss <= most
    objective = torch.where(cuts, total + price * loss, torch.inf)
    best = int(objective.argmin())
    if not objective[best] < without:
        return unused if without < torch.inf else thresholds  # else nothing is within the limit
    return tuple(between(confidence, best) if place == exit else one for place, one in enumerate(thresholds))


def between(confidence: Tensor, last: int) -> float:
    """A threshold that `last` passes and the next confidence does not, half way between them, so that rounding changes
    nothing."""
    value = float(confidence[last])
    if last + 1 == len(confidence):
        return value
    middle = (value + float(confidence[last + 1])) / 2
    return middle if float(confidence[last + 1]) < middle <= value else value


def coordinate_descent(
    evidence: ExitEvidence, thresholds: Thresholds, price: float, limit: float = math.inf, held: int | None = None
) -> Thresholds:
    """Coordinate descent over exits, from the last to the first, until none changes; one may be fixed in the first
    round."""
    for turn in range(TURNS):
        before = thresholds
        for exit in reversed(range(len(thresholds))):
            if turn or exit != held:
                thresholds = improve_threshold(evidence, thresholds, exit, price, limit)
        if thresholds == before:
            break
    return thresholds


def proposals(evidence: ExitEvidence) -> Iterator[Thresholds]:
    never = (NEVER,) * len(evidence.heads)
    yield never
    for price in PRICES:
        for start in (never, (0.0,) * len(never)):
            yield coordinate_descent(evidence, start, price * evidence.whole)


def within(evidence: ExitEvidence, limit: float, known: Sequence[Point]) -> Iterator[Thresholds]:
    """Thresholds with a loss of at most `limit`: starting from the best known ones, and from each single exit with
    several shares of rows leaving."""
    allowed = sorted((point for point in known if point.loss <= limit + 1e-12), key=lambda point: point.cost)
    for point in allowed[:3]:
        yield coordinate_descent(evidence, point.thresholds, 0.0, limit)
    shares = torch.tensor(SHARES if len(evidence.heads) > 1 else (), dtype=torch.float64)
    for exit in range(len(evidence.heads)):
        for value in torch.quantile(evidence.confidence[:, exit], shares).tolist():
            start = tuple(value if place == exit else NEVER for place in range(len(evidence.heads)))
            if operate(evidence, start).loss <= limit + 1e-12:
                yield coordinate_descent(evidence, start, 0.0, limit, held=exit)


def frontier(evidence: ExitEvidence, limits: Sequence[float] = ()) -> tuple[Point, ...]:
    """The Pareto-optimal points, by cost; `limits`: also search for the cheapest point for each of these losses."""
    found = {thresholds: operate(evidence, thresholds) for thresholds in proposals(evidence)}
    for limit in limits:
        for thresholds in list(within(evidence, limit, list(found.values()))):
            found[thresholds] = operate(evidence, thresholds)
    kept: list[Point] = []
    for point in sorted(found.values(), key=lambda one: (one.cost, one.loss)):
        if not kept or point.loss < kept[-1].loss:
            kept.append(point)
    return tuple(kept)


def calibrate(evidence: ExitEvidence, limit: float, delta: float | None = None, seed: int = 0) -> ExitCalibration:
    """The cheapest thresholds for a loss of at most `limit` (0.005: half a point) on these rows or, with delta, on
    their population."""
    if not limit >= 0:
        raise Mistake(f"limit={limit}: a loss of quality is 0 or more; 0.005 is half a point")
    if delta is None:
        found = frontier(evidence, (limit,))
        allowed = [point for point in found if point.loss <= limit + 1e-12]
        point = allowed[0] if allowed else operate(evidence, (NEVER,) * len(evidence.heads))
        return ExitCalibration(point, limit, found)
    rows = len(evidence.right)
    if rows < 2:
        raise Mistake(
            f"{rows} row and delta={delta}: half of the rows propose thresholds and half test them; give some hundred"
        )
    if not bool(((evidence.right == 0) | (evidence.right == 1)).all()):
        raise Mistake(
            "delta with a quality that is not right or wrong (0 or 1): the bound is of a share; leave delta out, or give 0 and 1"
        )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    proposing, testing = evidence.rows(order[: rows // 2]), evidence.rows(order[rows // 2 :])
    found = frontier(proposing, tuple(limit * share for share in (0.0, 0.25, 0.5, 0.7, 0.85, 1.0)))
    passed = [
        (operate(testing, (NEVER,) * len(evidence.heads)), 0.0)
    ]  # without exits: all rows go to the end, and nothing is lost
    for proposed in sorted(found, key=lambda one: -one.cost):
        if all(one == NEVER for one in proposed.thresholds):
            continue
        tested = operate(testing, proposed.thresholds)
        upper = upper_loss(tested, delta)
        if upper > limit:
            break
        passed.append((tested, upper))
    point, bound = min(
        passed, key=lambda one: one[0].cost
    )  # all that passed keep the limit: take the cheapest, never dearer than no exits
    return ExitCalibration(point, limit, found, delta, bound)


def upper_loss(point: Point, delta: float) -> float:
    """An upper bound of the loss on the population, exceeded with probability at most delta."""
    harmed, helped = round(point.harmed * point.rows), round(point.helped * point.rows)
    return at_most(harmed, point.rows, delta / 2) - at_least(helped, point.rows, delta / 2)
