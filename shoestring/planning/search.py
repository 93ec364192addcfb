"""Every allowed combination of techniques, costed on the ledger."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.core.ledger import Ledger
from shoestring.core.technique import Exactness, Technique, choices, exactness, order, refusal
from shoestring.planning.conflicts import clash, unites


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
    rows = sorted(catalogue, key=order)

    def below(start: int, chosen: tuple[Technique, ...], now: Ledger, level: Exactness) -> Iterator[Candidate]:
        if now.world == 1 or any(map(unites, chosen)):
            yield candidate(chosen, now, level)
        for row in range(start, len(rows)):
            for choice in choices(rows[row], now):
                closeness = max(level, exactness(choice, now))
                if closeness <= most and not refusal(choice, now) and not any(clash(one, choice) for one in chosen):
                    yield from below(row + 1, (*chosen, choice), choice.cost(now), closeness)

    return below(0, (), ledger, Exactness.BITS)


def best_first(found: list[Candidate], memory: float) -> list[Candidate]:
    """Those that fit by the ledger, fastest first; within one percent of time, the simpler and then the smaller first."""
    fitting = [one for one in found if one.process <= memory]
    fastest = min((one.seconds for one in fitting), default=1.0) or 1.0
    return sorted(fitting, key=lambda one: (round(one.seconds / fastest, 2), len(one.techniques), one.process))
