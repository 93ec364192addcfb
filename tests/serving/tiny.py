"""A tiny engine for tests of the server: it multiplies by a weight, and misbehaves where a sample's first number says so."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shoestring.serving.batching.admission import AffineTime
from shoestring.serving.batching.policy import Batching
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.sample import Answers, Sample, Signature, TensorForm

POISON, REFUSED, BROKEN, GATED, KNOWN = -1001.0, -1002.0, -1003.0, -1004.0, -1005.0
SIGNATURE = Signature(
    (TensorForm("x", "float32", (-1,)),), (TensorForm("y", "float32", (-1,)), TensorForm("total", "float32", ())), dict
)


class Scale(ServingEngine):
    """y = weight * x, total = the sum of y; `gate`: a file whose lock a gated sample waits for."""

    signature, tolerance, packs, why_not_packed = SIGNATURE, 0.0, True, ""
    known: Sample | None = Sample({"x": torch.tensor([KNOWN])}, 1)

    def __init__(self, weight: float, gate: str) -> None:
        self.weight, self.gate, self.broken = torch.tensor(weight).share_memory_(), gate, False

    def answers(self, samples: Sequence[Sample]) -> Answers:
        return [self.answer(one.inputs["x"]) for one in samples]

    def answer(self, x: Tensor) -> dict[str, Tensor]:
        first = float(x[0]) if len(x) else 0.0
        if first == POISON:
            os._exit(3)
        if first == REFUSED:
            raise IndexError("index out of range")
        if first == BROKEN or (first == KNOWN and self.broken):
            self.broken = first == BROKEN  # until somebody asked whether it is
            raise RuntimeError("it broke")
        if first == GATED:
            with suppress(FileNotFoundError), open(self.gate) as file:  # it was opened since
                fcntl.flock(file, fcntl.LOCK_SH)
        return {"y": self.weight * x, "total": (self.weight * x).sum()}


def scale(weight: float = 2.0, gate: str = "") -> ServingEngine:
    return Scale(weight, gate)


def scale_unless(exists: str) -> ServingEngine:
    if os.path.exists(exists):
        raise ValueError("the weights are elsewhere now")
    return Scale(2.0, "")


def unloadable() -> ServingEngine:
    raise ValueError("no weights here")


def dies() -> ServingEngine:
    os._exit(7)


def spec(weight: float = 2.0, gate: str = "", **more: object) -> ModelSpec:
    given = {"load": scale, "batching": Batching(tokens=64, packed=True), "arguments": {"weight": weight, "gate": gate}}
    return ModelSpec(**given | more)  # type: ignore[arg-type]


def sample(*numbers: float) -> Sample:
    return Sample({"x": torch.tensor(numbers)}, len(numbers))


SLOW = AffineTime(base=0.0, per_row=0.0, per_token=1.0)  # a second for each number


def answer(text: str, scale: float = 1.0):  # type: ignore[no-untyped-def]
    """A job's answer: the numbers of a text, through the model, twice."""
    numbers = torch.tensor([[float(one) for one in text.split()]])
    output = yield {"x": numbers * scale}
    first, second = yield [{"x": output.y}, {"x": output["y"][:1]}]
    return {"total": first.total, "first": float(second[0]), "embedding": output.y}
