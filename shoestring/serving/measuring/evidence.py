"""What is known of a model on this machine before its server is planned: measured in about ten seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoestring.serving.measuring.service_time import ServiceTime

TORCH, ONNX, ONNX_INT8 = "torch", "onnx", "onnx-int8"  # engines; every model has the first


@dataclass(frozen=True)
class EngineEvidence:
    """What was measured of one engine."""

    padded: ServiceTime
    packed: ServiceTime | None  # None: it can't,
    why_not_packed: str  # and this is the reason
    shared_bytes: int  # weights: once, however many replicas there are
    replica_bytes: int  # that each replica needs of its own
    size_bytes: int  # on disk
    quality: float  # fidelity to the job's model; 1: it is that model
    tolerance: float = 0.0  # largest relative difference to the model on a sample alone


@dataclass(frozen=True)
class ServingEvidence:
    """A model, its engines and its requests."""

    engines: Mapping[str, EngineEvidence]  # by name; TORCH is always among them
    missing: Mapping[str, str]  # engines that can't run the model, and why
    lengths: tuple[int, ...]  # of samples like those that will be asked for
    front_seconds: float  # CPU time of a request outside of the replicas: HTTP, the job's answer function
    front_bytes: int  # of the process that listens and the one that holds the model, without the model
    slowdown: Mapping[int, float]  # number of replicas that compute at once -> how much slower each is; 1 -> 1.0
    cores: int
    load: float = 0.0  # processes that ran beside while measuring; above 0.5 a core, times are too long

    @property
    def most_replicas(self) -> int:
        return max(self.slowdown)
