"""Techniques of a federated round: their subject is a `Round`, and a `RoundCost` is what it costs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoestring.core.technique import Technique
from shoestring.federated.evidence import UpdateEvidence
from shoestring.federated.layout import Layout
from shoestring.federated.round import Round


@dataclass(frozen=True)
class RoundCost:
    """What a round costs. Bytes are those of one device."""

    size: int  # numbers that are sent each way
    values: int  # numbers that stand for them on the way up: fewer where some are left out
    up: int  # bytes on the way up,
    down: int  # and on the way down
    clients: int  # devices that there are,
    per_round: int  # that take part in a round,
    rounds: int
    device_seconds: float = 0.0  # of one device's work, here
    server_seconds: float = 0.0  # of a round's combination, here
    error: float = 0.0  # expected |combined - exact|^2 / |exact|^2 of the first round: what coding and noise do to it
    clip: float = 0.0  # largest norm of a device's update; 0: it is not limited
    noise: float = 0.0  # noise multiplier: standard deviation of the sum's noise, in units of the clipping norm
    counted: float = (
        0.0  # standard deviation of the noise on how many updates are within the clip; 0: nobody counts them
    )
    epsilon: float = inf  # privacy loss of all rounds
    delta: float = 0.0  # at this chance of a greater one; 0: none was asked for
    wanted: float = inf  # the epsilon that was asked for
    device_bytes: int = 0  # that a device keeps between rounds
    evidence: UpdateEvidence | None = None
    upload: int = 0  # bytes that a device may send, if that is limited; 0: it is not
    layout: Layout | None = None  # of the weights that are trained
    statistics: int = 0  # numbers of norm layers that are sent each way beside them, as they are

    def numbers(self) -> Mapping[str, float]:
        round_seconds = self.per_round * self.device_seconds + self.server_seconds
        return {
            "up_bytes": self.up,
            "down_bytes": self.down,
            "round_seconds": round_seconds,
            "total_seconds": self.rounds * round_seconds,
            "error": self.error,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "device_bytes": self.device_bytes,
        }


class FederatedTechnique(Technique[Round, RoundCost], ABC):
    """What the room asks of a technique beside `cost` and `apply`.

    `seam`: the part of a round that it changes, for the catalogue: work, send, combine, advance, private or devices;
    empty: it is somebody else's.
    `slot`: of techniques with the same one, a round can have one; empty: any number.
    `needs`: names of techniques of which a round must have one, too; empty: it is of use alone.
    """

    seam: ClassVar[str] = ""
    slot: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False
