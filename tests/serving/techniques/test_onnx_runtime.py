"""An engine is offered with what was measured of it, and refused with why it was not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.serving.room import plan_serving
from shoestring.serving.technique import Deployment, ServingCost
from shoestring.serving.techniques.onnx_runtime import OnnxRuntime
from tests.serving.test_technique import cost, evidence


def test_int8_drifts_by_what_it_changes_and_float32_rounds() -> None:
    assert OnnxRuntime(int8=True).drift(cost()) == pytest.approx(0.01)
    assert OnnxRuntime(int8=True).exactness(cost()) is Exactness.CHANGED
    assert OnnxRuntime().exactness(cost()) is Exactness.ROUNDING
    assert [one.apply(Deployment(replicas=2)) for one in OnnxRuntime.choices(cost())] == [
        Deployment("onnx", replicas=2),
        Deployment("onnx-int8", replicas=2),
    ]


def test_an_engine_that_is_missing_is_refused_with_its_reason() -> None:
    found = ServingCost(replace(evidence(), missing={"onnx": "the forward can't be traced"}), Budget())
    assert OnnxRuntime().refusal(found) == "the forward can't be traced"
    assert OnnxRuntime().refusal(cost()) == "it was not measured" and OnnxRuntime(int8=True).refusal(found) == ""
    with pytest.raises(Mistake, match="the forward can't be traced"):
        plan_serving(found, ["OnnxRuntime()"])


def test_a_lower_fidelity_is_chosen_only_where_it_is_allowed() -> None:
    def engine(least: float) -> str:
        found = plan_serving(cost(budget=Budget(quality=least)), catalogue=(OnnxRuntime,)).chosen
        return found.details.engine

    assert engine(0.99) == "onnx-int8" and engine(0.991) == "torch"
