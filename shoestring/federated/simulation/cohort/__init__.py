"""The local training of many simulated devices at once, in one process: hand-written steps, a stacked forward, or one after the other."""

from __future__ import annotations

from shoestring.federated.simulation.cohort.engine import Engine, TrainedDevices, work_of
from shoestring.federated.simulation.cohort.how import How, how_to_work, plainly
from shoestring.federated.simulation.cohort.way import Differs

__all__ = ["Differs", "Engine", "How", "TrainedDevices", "how_to_work", "plainly", "work_of"]
