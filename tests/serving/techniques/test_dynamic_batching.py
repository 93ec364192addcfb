"""Budgets of positions: those that are tried hold the longest request, and no other than a possible one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.serving.batching.policy import choose_batch
from shoestring.serving.technique import Deployment, ServingCost
from shoestring.serving.techniques.dynamic_batching import STEPS, DynamicBatching, PackedBatching, TokenBudget
from tests.serving.test_technique import cost, evidence


@pytest.mark.parametrize("kind", [DynamicBatching, PackedBatching])
def test_the_nth_choice_takes_n_of_the_longest_requests(kind: type[TokenBudget]) -> None:
    plain = ServingCost(replace(evidence(), lengths=(3, 37, 8)), Budget())
    for count, one in zip(STEPS, kind.choices(plain), strict=True):
        assert type(one) is kind
        how = one.apply(Deployment()).batching
        assert len(choose_batch([37] * 40, how)) == count and how.packed == (kind is PackedBatching)


def test_packing_is_refused_by_the_engine_that_is_chosen() -> None:
    """The engine comes first in the order, so that it is asked about the one that will compute."""
    assert PackedBatching().refusal(cost()) == ""
    assert PackedBatching().refusal(cost(Deployment("onnx-int8"))) == "a graph pads"
    assert DynamicBatching().refusal(cost(Deployment("onnx-int8"))) == ""


def test_what_is_rounded_otherwise_is_not_called_the_same_bits() -> None:
    assert {kind().exactness(cost()) for kind in (DynamicBatching, PackedBatching)} == {Exactness.ROUNDING}


@pytest.mark.parametrize("tokens", [0, -512])
@pytest.mark.parametrize("kind", [DynamicBatching, PackedBatching])
def test_a_budget_that_holds_nothing_is_refused(kind: type[TokenBudget], tokens: int) -> None:
    """It would be served, each request alone, under the name of a batching that does not happen."""
    with pytest.raises(Mistake, match=f"{kind.__name__}\\(tokens={tokens}\\)"):
        kind(tokens=tokens)
