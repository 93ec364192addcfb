"""`--verify` plays enough rounds to replay recordings, and notices when those are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.core.exactness import Exactness
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import Prepared, prepare_federation
from shoestring.federated.planning.verify import MOST, ROUNDS, SEQUENTIAL, rounds_to_verify, verify_plan
from shoestring.federated.room import FederatedPlan, FederationDetails
from shoestring.federated.simulation.cohort.stacked import recording
from tests.federated.simulation.cohort.test_agreement import clients, job_of
from tests.federated.toys import toy

PLAIN = FederatedPlan((), Exactness.BITS, {}, FederationDetails(SEQUENTIAL))


def stacked(**local: Any) -> Prepared:
    job = job_of({"clients": clients((18,) * 8), "local": Local(**{"batch": 6, "epochs": 2, "lr": 0.05, **local})})
    return prepare_federation(job, FederateOptions(per_round=8, rounds=1, processes=2))


def test_there_are_rounds_enough_for_recordings_in_every_process() -> None:
    given = stacked()
    assert given.how.kind == "stacked" and given.processes == 2
    steps = 6 * 8 // given.how.chunk // 2  # of a process in a round
    assert rounds_to_verify(given) * steps >= recording.AFTER + steps > ROUNDS * steps
    assert rounds_to_verify(stacked(steps=1)) <= MOST and rounds_to_verify(toy()) == ROUNDS


def test_what_is_planned_is_kept_past_the_first_recording() -> None:
    found = verify_plan(stacked(), PLAIN)
    assert found.rounds > ROUNDS and found.holds and [one.kept for one in found.verdicts] == [True, True], (
        found.verdicts
    )


@pytest.mark.parametrize("after", [recording.AFTER])
def test_a_recording_that_gives_other_numbers_is_not_kept(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Break recordings on purpose, where neither they nor the comparison in some rounds see it."""

    def wrong(self: Any, *tensors: Tensor) -> Any:
        losses, gradients = kept(self, *tensors)
        return losses, [None if one is None else one * 1.01 for one in gradients]

    kept = recording.RecordedGradients.__call__
    monkeypatch.setattr(recording.RecordedGradients, "__call__", wrong)
    monkeypatch.setattr(recording, "same_bits", lambda found, right: True)
    monkeypatch.setattr("shoestring.federated.simulation.cohort.engine.is_checked_round", lambda round: False)
    found = verify_plan(stacked(), PLAIN)
    assert not found.holds and found.verdicts[0].kept is False and found.rounds * 12 > after
    assert torch.isfinite(torch.tensor(found.verdicts[0].difference))


def test_a_way_that_turns_out_wrong_while_it_is_verified_is_told() -> None:
    from tests.federated.simulation.cohort.stacked.test_gradient_comparison import job

    given = prepare_federation(job(), FederateOptions(per_round=8, rounds=1, processes=1))
    found = verify_plan(replace(given, processes=1), PLAIN)
    assert found.holds and "one after the other" in found.verdicts[0].what and "batch of 5" in found.verdicts[0].what
