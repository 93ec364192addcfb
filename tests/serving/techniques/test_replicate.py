"""Replicas are offered and accepted as many as were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoestring.core.budget import Budget
from shoestring.serving.technique import Deployment, ServingCost
from shoestring.serving.techniques.replicate import Replicate
from tests.serving.test_technique import evidence


@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_number_that_was_measured_is_tried_but_one(most: int) -> None:
    cost = ServingCost(replace(evidence(cores=most), slowdown=dict.fromkeys(range(most, 0, -1), 1.0)), Budget())
    assert [one.count for one in Replicate.choices(cost)] == list(range(2, most + 1))
    assert all(one.refusal(cost) == "" for one in Replicate.choices(cost))
    assert Replicate(3).apply(Deployment(engine="onnx")) == Deployment(engine="onnx", replicas=3)


@pytest.mark.parametrize("count", [0, -1, 3])
def test_a_number_that_was_not_measured_is_refused_with_what_was(count: int) -> None:
    cost = ServingCost(evidence(cores=2), Budget())
    assert Replicate(count).refusal(cost) == f"{count} replicas were not measured on 2 cores, but up to 2"
