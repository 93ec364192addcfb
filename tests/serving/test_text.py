"""What the terminal says about a server that was planned."""

from __future__ import annotations

import pytest

from shoestring.core.budget import Budget
from shoestring.serving.room import ServingOutcome, plan_serving
from shoestring.serving.techniques.replicate import Replicate
from shoestring.serving.text import cost_text, outcome_text, shares
from shoestring.show.terminal import PIPE
from tests.serving.test_technique import cost


def planned(budget: Budget = Budget(), *use: str) -> ServingOutcome:
    return plan_serving(cost(budget=budget), use or None, catalogue=(Replicate,))


def test_the_plan_the_others_and_every_load_are_told() -> None:
    found = planned(Budget(latency=0.1, memory=10_000))
    lines = outcome_text(found, PIPE).splitlines()
    assert lines[0] == "plan for memory 9.77 KiB and latency 100 ms, same bits: Replicate()"
    assert sum(line.rstrip().endswith("chosen") for line in lines) == 1
    (plain,) = [line for line in lines if line.startswith("plain ")]
    assert plain.endswith("% slower"), "plain serving is compared, and told once"
    begin = next(number for number, line in enumerate(lines) if line.startswith("at "))
    assert "50 % within" in lines[begin] and "99 % within" in lines[begin]
    rates = [line.split(" requests/s")[0] for line in lines[begin:] if " requests/s (" in line]
    assert rates == ["60", "120", "180"], "shares of what two replicas do in a second"


def test_a_plan_that_is_plain_is_told_once() -> None:
    text = outcome_text(planned(Budget(memory=6_040)), PIPE)
    assert text.count("one request at a time") == 0 and text.startswith("plan for memory 5.90 KiB")


def test_a_million_requests_cost_what_their_hours_cost() -> None:
    plan = planned().plain
    assert plan is not None and plan.numbers()["requests_per_second"] == pytest.approx(100)
    assert cost_text(plan, 0.36) == "a million requests cost 1 at 100 requests/s"  # 10,000 s are 2.78 h
    assert cost_text(plan, 0.0) == "a million requests cost 0 at 100 requests/s"
    assert shares(plan) == [0.5, 0.99]
