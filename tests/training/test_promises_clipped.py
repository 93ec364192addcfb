"""The promises of test_promises.py for a job that clips by global norm: OffloadModel alone, and with everything that
it can be combined with."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.running.run_weights import bring_home
from shoestring.core.technique import drift, in_order, total_cost
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.conflicts import conflict
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import with_traits
from tests.models import job, seeded
from tests.training.test_promises import STEPS, TOLERANCE, sgd

MACHINE = Hardware(dtypes={"bf16": "", "fp16": ""})


def clipped(name: str) -> Job:
    return job(name, optimizer=sgd, clip=0.1)


@cache
def ledger(name: str) -> Ledger:
    return with_traits(Planner(clipped(name), MACHINE, inexact=True).ledger(), "own process")


def plans(name: str) -> list[tuple[Technique, ...]]:
    """OffloadModel, with the first setting of every other technique that it can be combined with."""
    firsts = [
        next((one for one in kind.choices(ledger(name)) if not one.refusal(ledger(name))), None) for kind in CATALOGUE
    ]
    return [
        (OffloadModel(),),
        *(in_order((one, OffloadModel())) for one in firsts if one is not None and not conflict((one, OffloadModel()))),
    ]


@cache
def weights_after(name: str, techniques: tuple[Technique, ...]) -> Tensor:
    made = clipped(name)
    run = build_run(made, techniques, seeded(made))
    for _ in steps(run, islice(Feed(made), STEPS)):
        pass
    bring_home(run)
    return torch.cat([value.detach().float().reshape(-1) for value in run.model.state_dict().values()])


def test_what_stream_can_be_combined_with_keeps_to_what_it_states_and_to_the_bytes_that_were_rehearsed() -> None:
    made, plain = clipped("chain"), weights_after("chain", ())
    way = (plain - torch.cat([value.reshape(-1) for value in seeded(made).state_dict().values()])).norm()
    assert any(Accumulate(2) in plan for plan in plans("chain")) and not OffloadModel().refusal(ledger("chain"))
    for plan in plans("chain"):
        stated, after = max(one.exactness(ledger("chain")) for one in plan), weights_after("chain", plan)
        if stated is Exactness.BITS:
            assert torch.equal(after, plain), plan
        elif stated is Exactness.ROUNDING:
            assert (after - plain).abs().max() <= TOLERANCE, plan
        else:
            assert stated is Exactness.CHANGED, plan
            assert 0 < (after - plain).norm() / way <= sum(drift(one, ledger("chain")) for one in plan) < 10, plan
        predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
        mixed = any(type(one).__name__ == "Precision" for one in plan)
        assert abs(peak(predicted).bytes - peak(measured).bytes) <= 0.001 * mixed * peak(measured).bytes, plan
        assert predicted.moved == measured.moved and predicted.stored == measured.stored, plan


def large(clip: float, still: int) -> Job:
    """Ten blocks of 2 MiB, the first `still` of them frozen."""

    def made() -> nn.Module:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(10))
        )
        model[:still].requires_grad_(False)
        return model

    return Job(
        model=made, data=lambda: [torch.ones(64, 256)] * 4, loss=lambda output, batch: output.square().mean(), clip=clip
    )


SETTINGS = [(0.0, 1, 0), (1.0, 1, 0), (0.0, 4, 0), (1.0, 4, 6)]


@pytest.mark.parametrize(
    ("clip", "pieces", "still"),
    [(1.0, 4, 0), (0.0, 1, 6), *(pytest.param(*given, marks=pytest.mark.slow) for given in SETTINGS)],
)
def test_the_ledger_ranks_near_what_is_rehearsed(
    clip: float, pieces: int, still: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("offloaded_optimizer", "row_split", "offload_model", "offload_optimizer"):
        monkeypatch.setattr(
            f"shoestring.training.memory.offload.{module}.CHUNK", 1 << 16
        )  # a chunk is a part of a block, as in large models
    made, plan = large(clip, still), (*([Accumulate(pieces)] if pieces > 1 else []), OffloadModel())
    by_ledger, rehearsed = (
        total_cost(plan, with_traits(Planner(made, MACHINE).ledger(), "own process")),
        rehearse(made, plan),
    )
    assert abs(by_ledger.peak - peak(rehearsed).bytes) <= 0.25 * peak(rehearsed).bytes
    # It knows nothing of the three blocks that are in memory still where a forward ends and its backward begins
    assert abs(by_ledger.traffic.disk - rehearsed.moved[-1]) <= 0.2 * rehearsed.moved[-1]


def test_a_large_weight_outside_of_all_blocks_is_clipped_up_to_rounding_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert OffloadModel().exactness(ledger("bert")) is Exactness.BITS
    monkeypatch.setattr("shoestring.training.memory.offload.offload_model.CHUNK", 1024)
    assert OffloadModel().exactness(ledger("bert")) is Exactness.ROUNDING
