"""Rules for the running statistics of norm layers in a federation; federated/model/statistics.py applies them. Imports
nothing heavy."""

from __future__ import annotations

from enum import StrEnum


class StatisticsRule(StrEnum):
    AVERAGED = "averaged"  # the server's become the mean of the devices', weighted by samples
    LOCAL = "local"  # every device keeps its own; the server's stay as initialised
    FROZEN = "frozen"  # none change: norm layers use the initial ones, in training too
