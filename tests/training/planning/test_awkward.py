"""Awkward models x every technique: 0 bytes off or measured and said so, the stated exactness kept, or a refusal with its reason.

A technique may meet a trait in four ways, and each cell of the matrix must be one of them: it works as stated; it is refused in
planning; it is refused in the rehearsal; or it is stopped with a message in training. Never anything silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor

from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.running import random_state
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.rehearse import build_run, track
from shoestring.training.group_technique import uniting
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.awkward import AWKWARD
from tests.ledgers import with_traits
from tests.models import seeded

STEPS = 3
TOLERANCE = 1e-4  # of sums in another order, relative to the largest weight
QUICK = (Checkpoint(every=1), Checkpoint(every=2), OffloadActivations(), Accumulate(2))


@cache
def planner(name: str, inexact: bool = False) -> tuple[Planner, Ledger]:
    reset()
    found = Planner(AWKWARD[name].job(), Hardware(dtypes={"bf16": "", "fp16": ""}), inexact=inexact)
    ledger = found.ledger()
    return found, with_traits(ledger, "own process")


def settings(name: str) -> Iterator[Technique]:
    """Of every technique for one process, the first setting worth trying, and the quick ones."""
    ledger = planner(name, inexact=True)[1]
    yield from QUICK
    for kind in CATALOGUE:
        for one in kind.choices(ledger)[:1]:
            if not uniting([one]) and one not in QUICK:
                yield one


def weights_after(name: str, techniques: tuple[Technique, ...]) -> Tensor:
    made = AWKWARD[name].job()
    reset()
    run = build_run(made, techniques, seeded(made))
    for _ in steps(run, islice(Feed(made), STEPS)):
        pass
    bring_home(run)
    values = [value.detach().to_dense().flatten() for value in run.model.state_dict().values()]
    return torch.cat(
        [torch.view_as_real(one).flatten().double() if one.is_complex() else one.double() for one in values]
    )


def reset() -> None:
    """What models of the list keep outside of themselves, and all chance, begin anew."""
    from tests.training.memory.recompute import test_block_state

    random_state.seed(0)
    test_block_state.SHARED_CHANCE.manual_seed(0)
    test_block_state.SHARED_LIST.clear()


def outcome(name: str, technique: Technique) -> str:
    """How a technique met a model: "refused: ..." or "kept"; anything else fails here."""
    asked, ledger = planner(name, inexact=isinstance(technique, Precision))
    if reason := technique.refusal(ledger):
        return f"refused: {reason}"
    made = AWKWARD[name].job()
    try:
        reset()
        predicted = peak(asked.rehearsals.log((technique,))).bytes
        reset()
        measured = peak(track(made, (technique,), seeded(made))).bytes
        after = weights_after(name, (technique,))
    except Mistake as error:
        return f"refused: {error}"
    slack = 0.001 * measured if isinstance(technique, Precision) else 0
    assert abs(predicted - measured) <= slack or (technique,) in asked.rehearsals.measured, (predicted, measured)
    level, plain = technique.exactness(ledger), weights_after(name, ())
    if level is Exactness.BITS:
        assert torch.equal(after, plain), (after - plain).abs().max()
    elif level is Exactness.ROUNDING:
        assert (after - plain).abs().max() <= TOLERANCE * plain.abs().max(), (after - plain).abs().max()
    return "kept"


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models_keep_the_promises_of_techniques_or_these_are_refused(name: str) -> None:
    made = AWKWARD[name].job()
    reset()
    assert peak(planner(name)[0].rehearsals.log(())).bytes == peak(track(made, (), seeded(made))).bytes
    for technique in QUICK:
        outcome(name, technique)


@pytest.mark.slow
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models_keep_the_promises_of_all_techniques_or_these_are_refused(name: str) -> None:
    for technique in settings(name):
        outcome(name, technique)


@pytest.mark.parametrize(
    ("name", "technique", "why"),
    [
        ("a generator outside of all blocks", Checkpoint(every=1), "computes something else when it runs again"),
        ("weights that the forward changes", Checkpoint(every=1), "computes something else when it runs again"),
        ("an input that is overwritten", Checkpoint(every=1), "changes its input in place"),
        ("weights used without their module", OffloadActivations(), "no block of the model was called as a module"),
        ("packed sequences", Accumulate(2), "half of the batch can't be trained on"),
        ("a graph", Accumulate(2), "can't be counted or split"),
    ],
)
def test_a_refusal_names_the_trait(name: str, technique: Technique, why: str) -> None:
    assert why in outcome(name, technique)


@pytest.mark.slow
def test_most_cells_are_not_refusals() -> None:
    kept = [outcome(name, technique) == "kept" for name in AWKWARD for technique in QUICK[:1]]
    assert sum(kept) >= 0.8 * len(kept)
