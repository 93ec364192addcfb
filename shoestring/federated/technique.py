"""The interface of federated techniques: `apply` changes a `Round`, `cost` changes a `RoundCost`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoestring.core.technique import Technique
from shoestring.federated.model.layout import Layout
from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.round import Round


@dataclass(frozen=True)
class RoundCost:
    """What a round costs. Bytes are per device."""

    size: int  # trained weights sent to a device, and numbers of its update
    values: int  # numbers sent up in their place: fewer after sparsification
    up: int  # bytes sent by a device,
    down: int  # and to it
    clients: int  # in the population
    per_round: int  # clients that take part in a round
    rounds: int
    device_seconds: float = 0.0  # local training of one device, on this machine
    server_seconds: float = 0.0  # aggregation of a round, on this machine
    error: float = 0.0  # expected |combined - exact|^2 / |exact|^2 of the first round, made by compression and noise
    clip: float = 0.0  # largest norm of a client update (sensitivity of the sum); 0: unlimited
    noise: float = 0.0  # noise multiplier: standard deviation of the sum's noise, in units of the clipping norm
    counted: float = (
        0.0  # standard deviation of the noise on AdaptiveClip's count of unclipped updates; 0: nobody counts them
    )
    epsilon: float = inf  # privacy loss of all rounds
    delta: float = 0.0  # probability that epsilon does not hold; 0: no privacy was asked for
    wanted: float = inf  # the epsilon that was asked for
    device_bytes: int = 0  # state that a device keeps between rounds
    evidence: UpdateEvidence | None = None
    upload: int = 0  # bytes that a device may send; 0: no limit
    layout: Layout | None = None  # of the trained weights
    statistics: int = 0  # numbers of norm-layer statistics sent each way, uncompressed

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
    """What a federated technique says of itself beside `cost` and `apply`.

    `seam`: which part of a round it changes, for the documentation: work, send, combine, advance, private or devices;
    empty for techniques from other packages. `slot`: a round can have one technique of each slot; empty: no such limit.
    `needs`: the technique is of use only together with one of these; empty: it is of use alone.
    """

    seam: ClassVar[str] = ""
    slot: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False
