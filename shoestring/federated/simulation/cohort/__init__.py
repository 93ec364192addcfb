"""Local training of many simulated devices at once in one process, by one of three methods: fused, stacked or
sequential."""

from __future__ import annotations

from shoestring.federated.simulation.cohort.engine import Engine, TrainedDevices, engine_work
from shoestring.federated.simulation.cohort.method import MethodDiffers
from shoestring.federated.simulation.cohort.method_choice import MethodChoice, choose_method, sequential_choice

__all__ = [
    "Engine",
    "MethodChoice",
    "MethodDiffers",
    "TrainedDevices",
    "choose_method",
    "engine_work",
    "sequential_choice",
]
