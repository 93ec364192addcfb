"""`cost` of a technique makes another cost: the one it was given, and what other plans see, stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from shoestring.compression.catalogue import CATALOGUE
from shoestring.compression.room import plan_compression
from shoestring.compression.technique import ModelCost
from shoestring.compression.techniques.restructure import DeriveModel
from shoestring.core.budget import Budget
from shoestring.core.technique import parse_technique
from tests.compression.test_matrix import SETTINGS, WIDER, studied

REMEMBERED = {"ways", "damages", "derived"}  # of a calibration: what was asked of it is kept


def contents(cost: ModelCost) -> dict[str, Any]:
    """All that a cost holds, and what its calibration does beside its memory; figures that were computed from them are not."""
    found = {field.name: getattr(cost, field.name) for field in fields(cost)}
    study = {
        f"study.{one.name}": getattr(cost.study, one.name) for one in fields(cost.study) if one.name not in REMEMBERED
    }
    return {key: dict(one) if isinstance(one, Mapping) else one for key, one in (found | study).items()}


@pytest.mark.parametrize("written", [some[0] for some in SETTINGS.values()])
@pytest.mark.parametrize("forced", [False, True])
def test_cost_leaves_what_it_was_given_alone(written: str, forced: bool) -> None:
    technique, cost = parse_technique(written, CATALOGUE), replace(studied("lstm")[2], forced=forced)
    before, weights = contents(cost), {name: one.clone() for name, one in cost.study.values.items()}
    refused = technique.refusal(cost)
    first = None if refused else technique.cost(cost)
    assert contents(cost) == before and all(
        bool((one == weights[name]).all()) for name, one in cost.study.values.items()
    )
    if first is None:  # a technique that can't be used is asked why not, and never what it costs
        assert technique.refusal(cost) == refused
    else:
        assert contents(technique.cost(cost)) == contents(first), "asked twice, it says the same"


@pytest.mark.parametrize("written", ["Prune(layers=0.5)", "Factorize(share=0.6)", "Sparsify()"])
def test_another_model_is_made_once(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    technique, cost = parse_technique(written, CATALOGUE), studied("llama", WIDER)[2]
    assert isinstance(technique, DeriveModel) and not technique.refusal(cost)
    monkeypatch.setattr(type(technique), "derive", lambda self, study: pytest.fail("made again"))
    assert technique.cost(cost).study is technique.cost(cost).study is not cost.study


def test_what_one_plan_leaves_alone_is_not_told_of_another() -> None:
    source, given, cost = studied("mlp")
    left = plan_compression(
        cost, source.model, given.checked, ("ProductQuantize(length=2, bits=7)",)
    ).chosen.details.cost
    other = plan_compression(cost, source.model, given.checked, ("Half()",)).chosen.details.cost
    assert any(note.startswith("ProductQuantize left") for note in left.messages) and not other.messages


def test_an_allocation_is_one_of_the_options_it_was_chosen_from() -> None:
    source, given, cost = studied("mlp")
    chosen = plan_compression(cost, source.model, given.checked, ("Quantize()",)).chosen.details.cost
    assert chosen.choice is chosen.choice
    for name, taken in chosen.allocation.items():
        assert any(one.what is taken.what and one.damages == taken.damages for one in chosen.options[name])
        if taken.damage and (name, taken.what.label) in chosen.study.damages:
            assert taken.damages == chosen.study.damages[name, taken.what.label], "its damage was measured"


def test_a_predicted_latency_is_never_negative() -> None:
    cost = studied("mlp")[2]
    assert 0 < cost.seconds(-1e3)["median_seconds"] < cost.clock.median


@pytest.mark.parametrize("budget", [Budget(), Budget(latency=1.0)])
def test_formats_that_no_plan_takes_are_only_timed_for_a_limit_on_latency(budget: Budget) -> None:
    cost = replace(studied("tied embeddings")[2], wanted=budget)
    cost.clock.known.clear()
    offered = parse_technique("Codebook(bits=4)", CATALOGUE).cost(parse_technique("Quantize()", CATALOGUE).cost(cost))
    assert offered.known_figures["median_seconds"] > 0 and any("latency_ms" in one for one in offered.frontier())
    formats = {(one.what.stored.kind, str(one.what.stored.settings)) for one in offered.allocation.values()}
    assert len(cost.clock.known) > len(formats) if budget.latency else len(cost.clock.known) <= len(formats)
