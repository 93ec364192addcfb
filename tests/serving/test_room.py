"""Which server is chosen, for parts that were measured somewhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoestring.core.budget import Budget
from shoestring.core.errors import OverBudget
from shoestring.serving.measuring.evidence import EngineEvidence, ServingEvidence
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.room import deployment_of, plan_serving
from shoestring.serving.technique import ServingCost
from shoestring.serving.techniques.dynamic_batching import PackedBatching
from shoestring.serving.techniques.onnx_runtime import OnnxRuntime
from shoestring.serving.techniques.replicate import Replicate

PACKED = ServiceTime(2e-3, 1e-4, 1.5e-4, 0.0, packed=True)
TORCH = EngineEvidence(replace(PACKED, packed=False), PACKED, "", 90 << 20, 60 << 20, 90 << 20, 1.0)
INT8 = EngineEvidence(ServiceTime(1e-3, 1e-4, 4e-5, 0.0, False), None, "a graph pads", 0, 120 << 20, 23 << 20, 0.995)
LENGTHS = tuple(int(one) for one in np.random.default_rng(0).lognormal(3.4, 0.9, 300).clip(2, 256))
EVIDENCE = ServingEvidence(
    {"torch": TORCH, "onnx-int8": INT8},
    {"onnx": "the forward can't be traced"},
    LENGTHS,
    5e-4,
    200 << 20,
    {1: 1.0, 2: 1.1},
    2,
)


def test_packing_and_replicas_are_chosen_where_exactness_counts() -> None:
    cost = ServingCost(EVIDENCE, Budget(latency=0.1, quality=1.0))
    found = plan_serving(cost, catalogue=(OnnxRuntime, PackedBatching, Replicate))
    chosen = deployment_of(found.chosen)
    assert chosen.replicas == 2 and chosen.batching.packed and chosen.engine == "torch"
    assert found.plain is not None
    assert found.chosen.numbers()["requests_per_second"] > 1.5 * found.plain.numbers()["requests_per_second"]
    assert found.chosen.numbers()["latency_seconds"] <= 0.1


def test_bytes_are_multiplied_where_fidelity_may_be_less() -> None:
    cost = ServingCost(EVIDENCE, Budget(latency=0.1, quality=0.99))
    assert deployment_of(plan_serving(cost, catalogue=(OnnxRuntime,)).chosen).engine == "onnx-int8"


def test_a_tighter_target_means_smaller_batches() -> None:
    def tokens(target: float) -> int:
        cost = ServingCost(EVIDENCE, Budget(latency=target, quality=1.0))
        return deployment_of(plan_serving(cost, catalogue=(PackedBatching,)).chosen).batching.tokens

    assert tokens(0.06) <= tokens(0.6)


def test_a_target_that_no_request_alone_can_meet_is_refused_with_the_nearest() -> None:
    with pytest.raises(OverBudget, match="an answer"):
        plan_serving(ServingCost(EVIDENCE, Budget(latency=0.001)), catalogue=(PackedBatching,))
    with pytest.raises(OverBudget, match="of memory"):
        plan_serving(ServingCost(EVIDENCE, Budget(memory=100 << 20)), catalogue=(Replicate,))


def test_what_is_named_is_used() -> None:
    cost = ServingCost(EVIDENCE, Budget())
    found = plan_serving(cost, ["PackedBatching(tokens=300)", "Replicate()"])
    assert deployment_of(found.chosen).batching.tokens == 300 and found.asked
