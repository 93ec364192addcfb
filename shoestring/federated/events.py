"""What happens in a federated run beside what happens in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoestring.runs.event import RoomEvent, left_out


@dataclass(frozen=True, kw_only=True)
class RoundFinished(RoomEvent):
    """A federated round is over. `step` is its number, from 1; its loss and its seconds are those of that step."""

    kind: ClassVar[str] = "round"
    participants: int  # devices whose updates are in it
    samples: float = 0.0  # that they trained on
    up: int = 0  # bytes that all devices sent together,
    senders: int = 0  # by so many of them,
    down: int = 0  # and that they were given,
    ordered: int = 0  # so many of them
    missing: int = left_out(0)  # devices that did not answer,
    missing_names: tuple[str, ...] = left_out(())  # the first of them by name
    rejected: tuple[tuple[str, str], ...] = left_out(())  # devices whose update could not be used, and why
    epsilon: float | None = left_out(None)  # spent so far; None: nothing is private
    epsilon_in_all: float | None = left_out(None)  # by all runs on the ledger; None: there is no other one
    before: Mapping[str, float | None] | None = left_out(
        None
    )  # metrics of devices on what they hold out, before their work; None: not
    after: Mapping[str, float | None] | None = left_out(None)  # a number; and after
    simulated: float | None = left_out(
        None
    )  # seconds that the round would take devices, in units of a usual one's work

    @classmethod
    def measured(
        cls, told: Sequence[RoundFinished], seconds: Sequence[float], step_seconds: float
    ) -> Mapping[str, float]:
        """Bytes that a device sends and is given in a round, its seconds, and the privacy loss of all rounds."""
        senders, ordered = sum(one.senders for one in told), sum(one.ordered for one in told)
        spent = {"epsilon": told[-1].epsilon} if told[-1].epsilon is not None else {}
        return {
            "up_bytes": sum(one.up for one in told) / max(senders, 1),
            "down_bytes": sum(one.down for one in told) / max(ordered, 1),
            **spent,
            "round_seconds": step_seconds,
            "total_seconds": sum(seconds),
        }
