"""The local training of many simulated devices at once, in one process: hand-written steps, a stacked forward, or one after the other."""
from __future__ import annotations

from shoestring.federated.cohort.engine import Engine, Trained, work_of
from shoestring.federated.cohort.how import How, how_to_work, plainly
from shoestring.federated.cohort.way import Differs

__all__ = ["Differs", "Engine", "How", "Trained", "how_to_work", "plainly", "work_of"]
