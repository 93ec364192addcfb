"""Comparisons during a run find what the trial before it can't see; then the plain loop plays the round again."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.budget import Budget
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job, default_loss
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import Prepared, prepare_federation
from shoestring.federated.room import FederatedPlan, details_of, plan_federation
from shoestring.federated.round import ServerState
from shoestring.federated.runner import Runner
from shoestring.federated.simulation.cohort import MethodDiffers, sequential_choice
from shoestring.federated.simulation.cohort.fused.fused import FusedMethod
from shoestring.federated.simulation.cohort.method import CohortUpdates
from shoestring.federated.simulation.cohort.stacked.recording import AFTER, Gradients
from shoestring.federated.simulation.simulation import Simulation
from shoestring.federated.techniques.local_training.scaffold import Scaffold
from shoestring.runs.events.event import Event, Warned
from shoestring.runs.folder import Folder
from tests.federated.simulation.cohort.fedavg import by_hand, by_shoestring, initial
from tests.federated.simulation.cohort.test_agreement import CLASSES, COUNTS, WIDTH, Net, clients, job_of

FIVE = 5  # samples of a batch that no trial has


class SeesFive(Net):
    """Samples see each other, but only in a batch of five. One that is filled up has six."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0) if len(x) == FIVE else out


def job(**changes: Any) -> Job:
    return job_of({"model": SeesFive, **changes})


def ended(
    given: Prepared, rounds: int = 2, techniques: tuple[Any, ...] = ()
) -> tuple[ServerState, Simulation, list[str]]:
    warned: list[str] = []
    found = Simulation(given, techniques, warn=warned.append)
    server = given.server(found.parts)
    try:
        for _ in range(rounds):
            server = found.play(server).server
    finally:
        found.close()
    return server, found, warned


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shape_that_no_trial_had_is_compared_and_the_round_is_done_right(processes: int) -> None:
    given = prepare_federation(job(), FederateOptions(per_round=len(COUNTS), rounds=2, processes=processes))
    assert given.how.kind == "stacked" and given.how.masks, "the trial does not see it"
    server, simulation, warned = ended(given)
    right, start = by_hand(job(), 2), initial(job())
    assert float((server.weights - right).norm() / (right - start).norm()) < 1e-5
    assert len(warned) == 1 and "batch of 5 samples" in warned[0] and simulation.fallback_reason
    assert torch.equal(server.weights, ended(replace(given, how=sequential_choice(given.how, "")))[0].weights)


def test_a_private_run_does_not_tell_how_many_records_a_device_has() -> None:
    asked = FederateOptions(per_round=len(COUNTS), rounds=2, processes=1, epsilon=8.0, delta=1e-3)
    _, simulation, warned = ended(prepare_federation(job(), asked))
    assert len(warned) == 1 and "samples" not in warned[0] and "an update differs" in simulation.fallback_reason


def test_fused_steps_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is put into them that only a chunk with a device of five records has."""
    mlp = job_of({"model": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))})
    given = prepare_federation(mlp, FederateOptions(per_round=len(COUNTS), rounds=2, processes=1))
    assert given.how.kind == "fused"
    _, simulation, warned = ended(given)
    assert not warned and not simulation.fallback_reason
    work = FusedMethod.train

    def faulty(self: FusedMethod, start: Tensor, records: Any, objective: Any, seeds: Any) -> CohortUpdates:
        found = work(self, start, records, objective, seeds)
        return found._replace(rows=found.rows * (1.01 if FIVE in [one.count for one in records] else 1.0))

    monkeypatch.setattr(FusedMethod, "train", faulty)
    server, simulation, warned = ended(given)
    assert len(warned) == 1 and "differs from the plain loop's by 0.01" in warned[0] and simulation.fallback_reason
    assert torch.equal(server.weights, ended(replace(given, how=sequential_choice(given.how, "")))[0].weights)


def test_what_devices_keep_is_put_back_before_the_round_is_played_again() -> None:
    given = prepare_federation(job(), FederateOptions(per_round=len(COUNTS), rounds=2, processes=1))
    server, simulation, _ = ended(given, techniques=(Scaffold(),))
    right, other, _ = ended(replace(given, how=sequential_choice(given.how, "")), techniques=(Scaffold(),))
    assert simulation.fallback_reason and torch.equal(server.weights, right.weights)
    assert all(
        torch.equal(value, other.states[name][key])
        for name, state in simulation.states.items()
        for key, value in state.items()
    )


def test_planning_sees_it_on_the_first_devices_and_says_so() -> None:
    given = prepare_federation(
        job(clients=clients((24, 30, 24, 5, 24, 30, 24, 24))), FederateOptions(per_round=8, rounds=1, processes=1)
    )
    outcome = plan_federation(given, Budget(), ())
    assert (
        outcome.given.how.kind == "sequential"
        and "not stacked" in outcome.given.how.why
        and "plain loop's" in outcome.given.how.why
    )


def test_a_device_on_which_only_a_faster_way_fails_is_not_lost() -> None:
    def odd(output: Tensor, batch: Any) -> Tensor:
        loss = default_loss(output, batch)
        return loss if len(output) != FIVE else loss * (1.0 if loss.item() > 0 else 2.0)  # vmap can't look at a value

    changed = job(model=Net, loss=odd)
    found, simulation = by_shoestring(changed, 1)
    right, start = by_hand(changed, 1), initial(changed)
    assert simulation.given.how.kind == "stacked"
    assert float((found - right).norm() / (right - start).norm()) < 1e-5


def test_a_recording_that_something_unseen_steers_is_found_out_soon() -> None:
    steered = [1.0]
    gradients = Gradients(lambda weights, batch, shares: (weights["w"] * batch).sum(1) * steered[0], nn.Identity())
    weights, batch = {"w": torch.randn(2, 3)}, torch.randn(2, 3)
    for _ in range(AFTER + 6):
        gradients(weights, batch, None)
    assert gradients.recordings
    steered[0] = 2.0
    with pytest.raises(MethodDiffers, match="depends on something that"):
        for _ in range(6):
            gradients(weights, batch, None)


def test_the_number_of_calls_of_a_model_stays_that_of_steps_and_not_of_devices() -> None:
    calls = count()  # an iterator is not put back for every device

    class Counted(Net):
        def forward(self, x: Tensor) -> Tensor:
            next(calls)
            return super().forward(x)

    counts = (20, 21, 22, 23, 24, 25, 26, 27) * 4
    for changes, most in (({}, 6), ({"loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1])}, 12)):
        given = prepare_federation(
            job_of({"model": Counted, "clients": clients(counts), "local": replace(job().local, epochs=1), **changes}),
            FederateOptions(per_round=len(counts), rounds=3, processes=1),
        )
        server, simulation, _ = ended(given)
        before = next(calls)
        simulation.play(server)
        simulation.close()
        assert given.how.chunk == 8 and not simulation.fallback_reason
        assert next(calls) - before - 1 <= most * len(counts) / given.how.chunk, (
            "one by one it would be 4 or 5 a device"
        )


def test_a_run_that_goes_on_still_works_plainly_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, rounds: int) -> tuple[Runner, list[str]]:
        given = prepare_federation(job(), FederateOptions(per_round=len(COUNTS), rounds=rounds, processes=1))
        (tmp_path / folder).mkdir(exist_ok=True)
        events: list[Event] = []
        runner = Runner(
            given, FederatedPlan((), Exactness.BITS, {}, details_of(given)), Folder(tmp_path / folder), events.append
        )
        assert not runner.run().unsaved
        return runner, [one.text for one in events if isinstance(one, Warned) and "one after the other" in one.text]

    whole, warned = run("whole", 3)
    assert len(warned) == 1
    run("parts", 2)
    rest, again = run("parts", 3)
    assert rest.simulation.fallback_reason == whole.simulation.fallback_reason != "" and not again
    assert torch.equal(rest.server.weights, whole.server.weights)
