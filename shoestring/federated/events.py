"""Events that only federated runs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoestring.runs.events.event import RoomEvent, left_out


@dataclass(frozen=True, kw_only=True)
class RoundFinished(RoomEvent):
    """A federated round is over. `step`: its number, from 1; loss and seconds are in the event of that step."""

    kind: ClassVar[str] = "round"
    participants: int  # devices whose updates were used
    samples: float = 0.0  # that they trained on
    up: int = 0  # bytes sent by all devices together,
    senders: int = 0  # number of devices that sent,
    down: int = 0  # bytes sent to devices,
    ordered: int = 0  # and number of devices they were sent to
    missing: int = left_out(0)  # devices that did not answer,
    missing_names: tuple[str, ...] = left_out(())  # and the names of the first of them
    rejected: tuple[tuple[str, str], ...] = left_out(())  # devices whose update could not be used, and why
    epsilon: float | None = left_out(None)  # spent so far; None: not private
    epsilon_in_all: float | None = left_out(None)  # spent by all runs on the ledger; None: no other run
    before: Mapping[str, float | None] | None = left_out(
        None
    )  # held-out metrics on devices before their training; None: NaN or infinite,
    after: Mapping[str, float | None] | None = left_out(None)  # and after it
    simulated: float | None = left_out(None)  # simulated time of the round, in units of a typical device's work

    @classmethod
    def measured_figures(
        cls, told: Sequence[RoundFinished], seconds: Sequence[float], step_seconds: float
    ) -> Mapping[str, float]:
        """Bytes up and down per device and round, simulated seconds, and the epsilon of all rounds."""
        senders, ordered = sum(one.senders for one in told), sum(one.ordered for one in told)
        spent = {"epsilon": told[-1].epsilon} if told[-1].epsilon is not None else {}
        return {
            "up_bytes": sum(one.up for one in told) / max(senders, 1),
            "down_bytes": sum(one.down for one in told) / max(ordered, 1),
            **spent,
            "round_seconds": step_seconds,
            "total_seconds": sum(seconds),
        }
