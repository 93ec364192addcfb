"""What a deployment costs, for parts whose times are round numbers: the answers are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.budget import Budget
from shoestring.serving.batching.policy import Batching
from shoestring.serving.catalogue import CATALOGUE
from shoestring.serving.measuring.evidence import EngineEvidence, ServingEvidence
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.technique import USUAL_LOAD, Deployment, ServingCost, ServingTechnique

HUNDREDTH = ServiceTime(0.01, 0.0, 0.0, 0.0, packed=False)  # seconds of any batch
TORCH = EngineEvidence(HUNDREDTH, replace(HUNDREDTH, packed=True), "", 1000, 30, 900, 1.0)
INT8 = EngineEvidence(replace(HUNDREDTH, batch=0.002), None, "a graph pads", 200, 50, 150, 0.99)


def evidence(cores: int = 4, front: float = 0.0, slowdown: float = 1.0) -> ServingEvidence:
    return ServingEvidence({"torch": TORCH, "onnx-int8": INT8}, {}, (4,), front, 5000, {1: 1.0, 2: slowdown}, cores)


def cost(deployment: Deployment = Deployment(), budget: Budget = Budget(), **found: float) -> ServingCost:
    return ServingCost(evidence(**found), budget, deployment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicas", "cores", "front", "slowdown", "wanted"),
    [
        (1, 1, 0.0, 1.0, 100),
        (2, 4, 0.0, 1.0, 200),
        (2, 4, 0.0, 1.5, 2 / 0.015),  # each of them is half as slow again
        (1, 1, 0.01, 1.0, 1 / 0.02),  # one core computes a hundredth, and listens for a hundredth
        (1, 2, 0.01, 1.0, 100),  # the front has a core of its own
        (2, 2, 0.01, 1.0, 2 / 0.02),  # two cores for two hundredths a request
        (1, 1, 0.001, 1.0, 1 / 0.011),
    ],
)
def test_replicas_and_the_front_share_the_cores(
    replicas: int, cores: int, front: float, slowdown: float, wanted: float
) -> None:
    found = cost(Deployment(replicas=replicas), cores=cores, front=front, slowdown=slowdown)
    assert found.capacity == pytest.approx(wanted, rel=1e-9)


def test_what_a_batch_costs_is_shared_by_its_requests() -> None:
    assert cost(Deployment(batching=Batching(tokens=40))).capacity == pytest.approx(1000)
    assert cost(Deployment(batching=Batching(tokens=40, packed=True))).time == TORCH.packed
    assert cost(Deployment("onnx-int8", Batching(tokens=40, packed=True))).time == INT8.padded, "it can't pack"


def test_weights_are_in_memory_once_and_replicas_each_with_their_own() -> None:
    assert cost(Deployment(replicas=2)).known_figures["process_bytes"] == 5000 + 1000 + 2 * 30
    found = cost(Deployment("onnx-int8")).known_figures
    assert (found["process_bytes"], found["size_bytes"], found["quality"]) == (5000 + 200 + 50, 150, 0.99)


def test_the_latency_is_told_at_the_rate_that_is_asked_for() -> None:
    assert cost(budget=Budget(throughput=7.0, latency=0.1)).rate == 7.0
    assert cost().rate == pytest.approx(USUAL_LOAD * 100)
    kept = cost(budget=Budget(latency=0.1))
    assert kept.rate == kept.most_rate == kept.known_figures["requests_per_second"] < 100
    assert kept.known_figures["latency_seconds"] <= 0.1
    assert cost(budget=Budget(throughput=150.0, latency=0.1)).known_figures["latency_seconds"] > 1, (
        "the queue only grows"
    )


def test_a_target_below_a_request_alone_has_no_rate_and_still_all_figures() -> None:
    found = cost(budget=Budget(latency=0.001), front=0.0005)
    assert found.most_rate == found.rate == 0.0 and found.known_figures["requests_per_second"] == 0.0
    assert found.known_figures["latency_seconds"] == pytest.approx(0.0105), "a request alone, with the front"
    assert all(map(isfinite, found.known_figures.values()))


@settings(max_examples=20)
@given(st.data())
def test_the_cost_of_a_technique_is_that_of_the_deployment_it_makes(data: st.DataObject) -> None:
    plain = cost(slowdown=1.2)
    kinds = data.draw(st.lists(st.sampled_from(CATALOGUE), max_size=3))
    chosen: list[ServingTechnique] = [data.draw(st.sampled_from(kind.choices(plain))) for kind in kinds]
    deployment, known = plain.deployment, plain
    for one in sorted(chosen, key=lambda one: one.order):
        deployment, known = one.apply(deployment), one.cost(known)
    assert known.deployment == deployment and known.evidence is plain.evidence
