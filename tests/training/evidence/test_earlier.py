"""The same command leads to the same plan: times are measured and never twice the same, so what was chosen before is chosen again."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.measure import probe
from shoestring.measure.timeline import peak
from shoestring.planning.choose import LENIENT, NOISE, best_first, requested_candidate
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.earlier import chosen_earlier, place_of, remember_choice
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.evidence.step import Anchor, half_log, plain_ledger, traits_of
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.plan import training_plan
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.predict import Combination
from shoestring.training.room import combinations
from tests.models import job

MACHINE = Hardware(cores=2, fault=2.5e-10, huge_fault=1e-10)


@cache
def logs() -> tuple[Any, ...]:
    made = job("gpt2")
    log = rehearse(made, ())
    return made, log, half_log(made), frozenset(traits_of(made, log, True))


def anchor(draw: random.Random) -> Anchor:
    """A real step as some machine might have done it."""
    log = logs()[1]
    times = {
        f"{moment.phase} {moment.block}".strip(): count / 1e9 * draw.uniform(0.9, 1.1)
        for moment, count in log.flops.items()
    }
    update = sum(times.values()) * draw.uniform(0.03, 0.2)
    step = sum(times.values()) + update
    tensors = peak(log).bytes
    return Anchor(
        times | {"update (update)": update, "step": step},
        ((2.0, draw.uniform(0.97, 1.06)), (4.0, draw.uniform(1.0, 1.2))),
        update / 10,
        {"call": update / 500, "fused": update * draw.uniform(0.2, 0.9)},
        step * draw.uniform(1.02, 1.25),
        int(1.2 * tensors) + (1 << 20),
        tensors,
        dict.fromkeys(times, 1 << 20),
    )


def timed_again(before: Anchor, draw: random.Random, by: float = 0.02) -> Anchor:
    """The same step at another moment: every time off by up to so much."""

    def off(seconds: float) -> float:
        return seconds * (1 + draw.uniform(-by, by))

    return replace(
        before,
        times={name: off(seconds) for name, seconds in before.times.items()},
        paces=tuple((pieces, off(seconds)) for pieces, seconds in before.paces),
        adding=off(before.adding),
        probes={name: off(seconds) for name, seconds in before.probes.items()},
        following=off(before.following),
    )


def ledger_of(measured: Anchor) -> Ledger:
    made, log, half, traits = logs()
    return plain_ledger(made, log, half, MACHINE, measured, traits)


def found(ledger: Ledger) -> list[Combination]:
    return list(combinations(ledger, CATALOGUE, Exactness.DISTRIBUTION))


def ranked(some: list[Combination], memory: float, earlier: Combination | None = None) -> list[Combination]:
    """Those that fit in so many bytes, best first."""
    return best_first(some, Budget(memory=int(memory / LENIENT)), "step_seconds", earlier)


def seconds(one: Combination) -> float:
    return one.known["step_seconds"]


def process(one: Combination) -> float:
    return one.known["process_bytes"]


def but(one: Combination, **numbers: float) -> Combination:
    return replace(one, known={**one.known, **numbers})


def test_whatever_noise_does_to_times_the_plan_chosen_before_is_chosen_again() -> None:
    """Three machines, each measured five times with times up to 2 % off, eight budgets from the least that fits to plenty."""
    draw = random.Random(0)
    alone = 0
    for _ in range(3):
        first = anchor(draw)
        before = found(ledger_of(first))
        least, most = min(map(process, before)) * 1.01, max(process(one) for one in before if not one.techniques) * 1.05
        chosen = {
            memory: ranked(before, memory)[0] for memory in (least + (most - least) * part / 7 for part in range(8))
        }
        for _ in range(5):
            ledger = ledger_of(timed_again(first, draw))
            now = found(ledger)
            for memory, choice in chosen.items():
                again = requested_candidate(choice.techniques, ledger)
                assert ranked(now, memory, again)[0].techniques == choice.techniques, seconds(again) / min(
                    map(seconds, now)
                )
                alone += ranked(now, memory)[0].techniques != choice.techniques
    assert alone > 0, "without knowing the earlier choice, noise leads to others"


def test_a_plan_chosen_before_is_not_chosen_again_if_it_is_slower_by_more_than_noise_or_does_not_fit() -> None:
    now = found(ledger_of(anchor(random.Random(1))))
    memory = max(map(process, now)) + 10
    fastest = ranked(now, memory)[0]
    slow = next(one for one in now if seconds(one) > 1.5 * seconds(fastest))
    close = but(slow, step_seconds=min(map(seconds, now)) * (1 + 0.9 * NOISE))
    assert ranked(now, memory, slow)[0] == fastest
    assert ranked(now, memory, close)[0] == close
    assert ranked(now, memory, but(close, process_bytes=memory + 1))[0] == fastest


def test_of_plans_that_are_as_fast_the_more_exact_then_the_smaller_then_the_simpler_is_first() -> None:
    blank = found(ledger_of(anchor(random.Random(1))))[0]

    def one(seconds: float, process: float, exactness: Exactness, *techniques: Any) -> Combination:
        return replace(
            but(blank, step_seconds=seconds, process_bytes=process), exactness=exactness, techniques=techniques
        )

    fastest = one(1.0, 90.0, Exactness.ROUNDING, Accumulate(2))
    exact = one(1.015, 95.0, Exactness.BITS, Checkpoint(every=1))
    smaller = one(1.019, 60.0, Exactness.BITS, Checkpoint(every=2), OffloadModel())
    simpler = one(1.0, 60.1, Exactness.BITS, Checkpoint(every=3))
    slower = one(1.03, 10.0, Exactness.BITS)
    assert ranked([slower, fastest, smaller, exact, simpler], 100.0) == [simpler, smaller, exact, fastest, slower]


def test_the_planner_takes_what_was_chosen_before_if_it_is_allowed() -> None:
    def chosen(*earlier: Any) -> tuple[Any, ...]:
        planner = Planner(logs()[0], Hardware(), earlier=earlier)
        return planner.outcome_of(planner.ledger(), 8 << 30).chosen.techniques

    first = Planner(logs()[0], Hardware()).outcome(8 << 30).chosen.techniques
    assert chosen(*first) == first
    assert chosen(FusedOptimizer(), StepInBackward()) == first, (
        "by operations alone it is as fast, and has nothing to save in an idle budget"
    )
    assert chosen(OffloadModel()) == first, "it can't be used in this process"
    assert chosen(Checkpoint(every=1)) == first, "it is slower"


def test_a_choice_is_remembered_for_the_same_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.py").write_text("one")
    place = place_of(str(tmp_path / "job.py"), {"memory": 1})
    assert place.is_relative_to(probe.hardware_file().parent) and chosen_earlier(place) is None
    remember_choice(place, training_plan((Accumulate(2),)))
    assert chosen_earlier(place) == (Accumulate(2),)
    assert place_of(str(tmp_path / "job.py"), {"memory": 2}) != place
    (tmp_path / "job.py").write_text("another")
    assert place_of(str(tmp_path / "job.py"), {"memory": 1}) != place
    for damaged in ("", "[]", '{"techniques": [{"name": "Nothing", "knobs": {}}]}', '{"techniques": 3}'):
        place.write_text(damaged)
        assert chosen_earlier(place) is None
