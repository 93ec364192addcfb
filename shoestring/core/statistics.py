"""What may become of the running statistics of norm layers in a federation; federated/statistics.py does it. Nothing heavy is imported."""

from __future__ import annotations

from enum import StrEnum


class StatisticsRule(StrEnum):
    AVERAGED = "averaged"  # the server's become the mean of what devices send, by samples
    LOCAL = "local"  # every device keeps its own; the server's stay as the model began
    FROZEN = "frozen"  # nobody's change: norm layers use those that the model began with, in training too
