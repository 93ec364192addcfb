"""Every allowed combination of techniques, costed on the ledger."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.core.exactness import Exactness
from shoestring.core.ledger import Ledger
from shoestring.core.training import TrainingTechnique as Technique
from shoestring.core.training import axes_not_united
from shoestring.planning.conflicts import clash


@dataclass(frozen=True)
class Candidate:
    techniques: tuple[Technique, ...]
    ledger: Ledger
    exactness: Exactness
    peak: float       # bytes of tensors, predicted by the ledger
    process: float    # bytes of the process, predicted by the ledger
    seconds: float    # of a step


def candidate(techniques: tuple[Technique, ...], ledger: Ledger, level: Exactness) -> Candidate:
    tensors, process = map(max, zip(*ledger.tops(), strict=True))
    return Candidate(techniques, ledger, level, tensors, process, ledger.seconds)


def candidates(ledger: Ledger, catalogue: tuple[type[Technique], ...], most: Exactness) -> Iterator[Candidate]:
    """All allowed combinations up to an inexactness, each ledger computed from the one it extends."""
    rows = sorted(catalogue, key=lambda kind: kind.order)

    def below(start: int, chosen: tuple[Technique, ...], now: Ledger, level: Exactness) -> Iterator[Candidate]:
        if not axes_not_united(chosen, {"data": now.world}):
            yield candidate(chosen, now, level)
        for row in range(start, len(rows)):
            for choice in rows[row].choices(now):
                closeness = max(level, choice.exactness(now))
                if closeness <= most and not choice.refusal(now) and not any(clash(one, choice) for one in chosen):
                    yield from below(row + 1, (*chosen, choice), choice.cost(now), closeness)

    return below(0, (), ledger, Exactness.BITS)


TIED = 0.02    # of a step's time: who is so close to the fastest is as fast
NOISE = 0.08   # of a step's time: so much two plannings of the same job may differ, because each timed its steps at another moment


def best_first(found: list[Candidate], memory: float, earlier: Candidate | None = None) -> list[Candidate]:
    """Those that fit by the ledger, fastest first; of those as fast, the more exact, the smaller by a percent of the memory, the simpler.

    Wherever the line between as fast and slower is drawn, some plan lies on it, and noise moves it across: no order of one planning's
    figures alone gives always the same plan. So the plan that an `earlier` planning chose stays the first, unless it is slower by
    more than noise.
    """
    fitting = [one for one in found if one.process <= memory]
    fastest = min((one.seconds for one in fitting), default=0.0)

    def rank(one: Candidate) -> tuple[object, ...]:
        slower = (one.seconds - fastest) / max(fastest, 1e-9)
        return 0.0 if slower <= TIED else round(slower, 2), one.exactness, round(one.process / memory, 2), len(one.techniques), one.process

    ranked = sorted(fitting, key=rank)
    if earlier is not None and earlier.process <= memory and earlier.seconds <= fastest * (1 + NOISE):
        ranked = [earlier, *(one for one in ranked if one.techniques != earlier.techniques)]
    return ranked
