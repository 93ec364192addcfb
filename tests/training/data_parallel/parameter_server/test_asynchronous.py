"""Workers that do not wait: nothing is lost, counted wrong or staler than allowed; a slow one slows nobody; all end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.costs.ledger_parts import StandingBytes, UpdateCost, Workers
from shoestring.core.errors import Mistake
from shoestring.core.workers.assignment import Assignment
from shoestring.core.workers.link import Link, PeerLost
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.jobfile import load_job
from shoestring.measure.timeline import peak
from shoestring.runs.checkpoints.checkpoints import list_checkpoints
from shoestring.training.conflicts import clash
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.parameter_server.pushes import Pushes
from shoestring.training.data_parallel.parameter_server.server import PUSH
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import build_run, rehearse
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.technique import TrainingTechnique as Technique
from tests.training.members import Group
from tests.waiting import Gates, until

JOB = Path(__file__).parents[1] / "straggling.py"
both = pytest.mark.parametrize("kind", ["server", "hogwild"])


def trained(
    place: Path, world: int, technique: Technique | None, steps: int, *more: Technique, **flags: Any
) -> list[dict[str, Any]]:
    techniques = [one for one in (technique, *more) if one is not None]
    return Group(place, world, JOB, techniques, steps, flags=flags).results()


def counts(tally: dict[str, int]) -> Counter[int]:
    return Counter({int(key): count for key, count in tally.items()})


def samples(file: Path) -> list[int]:
    return [int(word) for line in file.read_text().splitlines() for word in line.split()[1:]]


def test_a_server_with_one_worker_trains_as_one_process_does(tmp_path: Path) -> None:
    """Nothing is stale then; to the same bits, clipping and batch norm's statistics and all."""
    (alone,) = trained(tmp_path / "alone", 1, None, 8, clip=0.1)
    first, _ = trained(tmp_path / "group", 2, Asynchronous(), 8, clip=0.1)
    assert first["losses"] == alone["losses"] and first["weights_sha256"] == alone["weights_sha256"]


@both
def test_a_slow_worker_does_less_and_the_others_do_more(kind: str, tmp_path: Path) -> None:
    """Every part is somebody's, once, and the staleness of each push is counted and within the bound."""
    seen = tmp_path / "seen"
    most = 130 if kind == "server" else 200  # of 160 or 240 parts: the slow one has had its tenth by then
    results = trained(tmp_path, 3, Asynchronous(kind, delay=200), 80, slow=2, lead=9, most=most, seen=str(seen))
    told, losses = results[0]["state"]["pushes"], results[0]["losses"]
    staleness, applied = counts(told["staleness"]), counts(told["applied"])
    parts, extra = (2, 0) if kind == "server" else (3, 200)  # in Hogwild others go on while the first worker computes
    assert 80 * parts <= sum(applied.values()) == sum(staleness.values()) <= 80 * parts + extra
    assert applied[2] * 3 < sum(applied[rank] for rank in applied if rank != 2) and not told["dropped"]
    assert 5 < max(staleness) <= 200 and told["corrected"] is True
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20]) and len(losses) == 80
    found = samples(seen)
    assert len(found) == len(set(found)), "no sample was trained on twice in the first time round"
    assert len(found) >= sum(applied.values()) * 12 // parts


@both
@pytest.mark.parametrize("delay", [0, 2])
def test_no_push_is_staler_than_the_delay(kind: str, delay: int, tmp_path: Path) -> None:
    told = trained(tmp_path, 4, Asynchronous(kind, delay=delay, correct=False), 12, slow=2, burden=100)[0]["state"][
        "pushes"
    ]
    assert set(counts(told["staleness"])) <= set(range(delay + 1)) and told["corrected"] is False
    assert sum(told["applied"].values()) >= 12 * (3 if kind == "server" else 4)


def test_the_slowest_gradient_of_a_round_is_dropped_and_never_the_majority(tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")  # whenever the slow one comes, the others have begun the next round
    told = trained(tmp_path, 4, DropStragglers(backup=1), 80, slow=2, lead=4, most=154, seen=seen)[0]["state"]["pushes"]
    applied, dropped = counts(told["applied"]), counts(told["dropped"])
    assert sum(applied.values()) == 2 * 80 and set(counts(told["staleness"])) == {0}
    assert dropped[2] > applied[2] and applied[2] * 3 < min(applied[1], applied[3])
    assert sum(dropped.values()) <= 80 and all(dropped[rank] < applied[rank] for rank in (1, 3))


@pytest.mark.parametrize("technique", [Asynchronous(), Asynchronous("hogwild"), DropStragglers()], ids=str)
def test_data_that_end_and_batches_smaller_than_the_group_end_well(technique: Technique, tmp_path: Path) -> None:
    """Five batches of one sample: of each, one worker has it and the others nothing."""
    batch = (
        2 if isinstance(technique, DropStragglers) else 1
    )  # of which a round could count the worker without a sample
    first, *_ = trained(tmp_path, 3, technique, 50, batches=5, batch=batch, norm=False)
    assert first["steps"] == 5


@both
def test_killed_it_goes_on_from_its_checkpoint(kind: str, tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", tmp_path / "seen"
    folder.mkdir()
    task = {"folder": str(folder), "cadence": {"steps": 2}, "flags": {"seen": str(seen), "hold": str(tmp_path)}}
    with Gates(tmp_path, 30):
        group = Group(tmp_path, 3, JOB, [Asynchronous(kind)], 1000, **task)
        until(lambda: len(list_checkpoints(folder / "checkpoints")) >= 2, "the second checkpoint")
        group.kill()
    before = (folder / "events.jsonl").read_text().splitlines()
    step = list_checkpoints(folder / "checkpoints")[-1].step  # its event may not be written yet
    seen.unlink()
    first, *_ = Group(tmp_path, 3, JOB, [Asynchronous(kind)], step + 4, **task).results()
    begun = json.loads((folder / "events.jsonl").read_text().splitlines()[len(before)])
    assert begun["event"] == "begun" and begun["step"] == step and first["steps"] == step + 4
    parts = 2 if kind == "server" else 3
    assert sum(first["state"]["pushes"]["applied"].values()) >= (step + 4) * parts, (
        "those before the checkpoint are counted too"
    )
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(0)).tolist()
    assert 0 < step <= 30 and not set(order[: 12 * step]) & set(samples(seen)), "the data go on where they were"
    finished = Group(tmp_path, 3, JOB, [Asynchronous(kind)], step + 4, **task).results()[0]
    assert finished["weights_sha256"] == first["weights_sha256"], "the last checkpoint has the weights of the end"


@pytest.mark.parametrize(
    ("technique", "pieces"),
    [(Asynchronous(), 1), (Asynchronous(), 2), (Asynchronous("hogwild"), 1), (DropStragglers(), 1)],
    ids=str,
)
def test_rehearsed_on_fake_tensors_it_is_as_it_is(technique: Technique, pieces: int, tmp_path: Path) -> None:
    """Memory of the server and of workers, and what a worker sends, to the byte; the first in Hogwild may have nothing to do in a step."""
    more = [Accumulate(pieces)] if pieces > 1 else []
    hogwild = technique == Asynchronous("hogwild")
    results = trained(tmp_path, 3, technique, 12, *more, even=3 if hogwild else 2, seen=str(tmp_path / "seen"))
    for rank, found in enumerate(results):
        job = load_job(JOB, {})
        log = rehearse(replace(job, mesh=on_one_axis(Link(rank, 3))), (technique, *more))
        assert found["steps"] > 1, "the optimizer's state is there from the second step on"
        own = results[0]["workers"][rank]
        if rank or not hogwild:
            assert peak(log).bytes == own["peak_bytes"], rank
        else:
            assert 0.4 * peak(log).bytes < own["peak_bytes"] <= peak(log).bytes
        if rank or hogwild:  # of their own steps; hogwild sends nothing
            assert log.sent[-1] * own["steps"] == own["sent"], rank
        else:  # the server gives weights as often as somebody pulls: for each push one, and some are on their way at the end
            tallies = found["state"]["pushes"]
            pushed = sum(tallies["applied"].values()) + sum(tallies["dropped"].values())
            assert 0 <= own["sent"] - pushed * log.sent[-1] / 2 <= log.sent[-1], "a step is rehearsed with two pulls"
    assert results[0]["measured"]["peak_bytes"] == max(one["peak_bytes"] for one in results[0]["workers"])


def test_what_cant_be_combined_is_told() -> None:
    for one in (Asynchronous(), DropStragglers()):
        for other in (
            StepInBackward(),
            OffloadModel(),
            OffloadOptimizer(),
            Precision("fp16"),
            DataParallel(),
            Shard(),
            one,
        ):
            assert clash(one, other) == clash(other, one) != ""
        assert not clash(one, Precision("bf16")) and not clash(one, Accumulate(2))
    assert "both unite" in clash(Asynchronous(), DropStragglers()) == clash(DataParallel(), Shard())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Asynchronous("ps"),
        lambda: Asynchronous(delay=-1),
        lambda: Asynchronous(delay=5000),
        lambda: DropStragglers(0),
    ],
)
def test_mistakes_are_told(wrong: Any) -> None:
    with pytest.raises(Mistake):
        wrong()


def test_a_group_that_is_too_small_is_told() -> None:
    job = load_job(JOB, {})
    for technique, world in ((Asynchronous(), 1), (Asynchronous("hogwild"), 1), (DropStragglers(), 2)):
        with pytest.raises(Mistake, match="--devices"):
            build_run(replace(job, mesh=on_one_axis(Link(0, world))), [technique], job.model())
        assert "--devices" in technique.refusal(Ledger((), workers=Workers(world)))
        assert not technique.refusal(Ledger((), workers=Workers(world + 1)))


def test_the_cost_is_that_of_the_busier_of_server_and_workers() -> None:
    ledger = Ledger(
        (Block("a", kept=60.0, gradient=100.0, forward=1.0, backward=2.0),),
        (Block("a"),),
        batch=6,
        standing=StandingBytes(parameters=100.0, optimizer=200.0),
        update=UpdateCost(0.5),
        workers=Workers(3, per_byte_sent=0.001),
    )
    served = Asynchronous().cost(ledger)
    assert served.seconds == pytest.approx(
        4.5 + 0.2
    )  # half of the batch instead of a third, and both ways of the weights
    assert served.traffic.sent == 200.0 and served.blocks[0].kept == 90.0
    assert served.peak == max(100 + 90 + 100.0, 100 + 100 + 200)  # a worker in backward, the server in its update
    slow = Asynchronous().cost(replace(ledger, workers=Workers(3, per_byte_sent=0.05)))
    assert slow.seconds == pytest.approx(2 * (10 + 0.5))  # the server is what all wait for
    assert DropStragglers().cost(ledger).peak == served.peak + 100
    assert Asynchronous("hogwild").cost(ledger) == ledger and int(Asynchronous().exactness(ledger)) == 3


def test_what_was_pushed_comes_back() -> None:
    pushes, again = Pushes(True), Pushes(True)
    for rank, staleness in ((1, 0), (2, 3), (1, 3)):
        pushes.add(rank, staleness)
    pushes.dropped[2] += 1
    again.load_state_dict(json.loads(json.dumps(pushes.state_dict())))
    assert (
        again.state_dict()
        == pushes.state_dict()
        == {"corrected": True, "staleness": {"0": 1, "3": 2}, "applied": {"1": 2, "2": 1}, "dropped": {"2": 1}}
    )


class Ones(Link):
    """An imagined link on which ones are received."""

    def receive(self, tensor: Tensor, source: int | None = None) -> int:
        tensor.fill_(1)
        return super().receive(tensor, source)


@both
@pytest.mark.parametrize(("correct", "stale", "divisor"), [(True, 4, 4), (True, 0, 1), (False, 4, 1)])
def test_the_rate_of_a_stale_step_is_divided_by_its_staleness(
    kind: str, correct: bool, stale: int, divisor: int
) -> None:
    """A gradient of one, on imagined links: it arrives as stale, or others step while it is computed."""
    link: Any = Ones(0, 2) if kind == "server" else Link(1, 2)

    def loss(output: Tensor, batch: Any) -> Tensor:
        if kind == "hogwild":
            engine.counts.staleness[0, 0] += stale
        return output.sum()

    job = Job(
        model=lambda: nn.Linear(1, 1, bias=False),
        data=lambda: [torch.ones(2, 1)],
        loss=loss,
        weight=len,
        mesh=on_one_axis(link),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.8),
    )
    model = job.model()
    run = build_run(job, [Asynchronous(kind, correct=correct)], model)
    # Memory that a first worker would have filled; and a difference of two that are almost equal has no digits
    nn.init.constant_(model.weight, 0.5)
    engine: Any = run.team.assignment
    before = model.weight.item()
    if kind == "server":
        engine.version = 9
        engine.next_message = lambda: (1, PUSH, 9 - stale, 0.5, 2.0)
    losses = [float(one.detach()) for one in steps(run, islice(Feed(job, run.team.assignment), 1))]
    assert losses == [0.5 if kind == "server" else pytest.approx(before)]
    assert model.weight.item() == pytest.approx(before - 0.8 / divisor) and run.optimizer.param_groups[0]["lr"] == 0.8
    assert run.state["pushes"].state_dict()["staleness"][str(stale)] >= 1


def test_hogwild_does_not_wait_for_ever_for_a_worker_that_beats_and_never_comes() -> None:
    link = Link(1, 2, deadline=0.05)
    job = Job(
        model=lambda: nn.Linear(1, 1),
        data=lambda: [torch.ones(2, 1)],
        loss=lambda output, batch: output.sum(),
        mesh=on_one_axis(link),
    )
    run = build_run(job, [Asynchronous("hogwild", delay=1)], job.model())
    engine: Any = run.team.assignment
    engine.counts.begun[0] = 0
    engine.counts.staleness[0, 0] += 1  # a step later, one more would make worker 0's gradient too stale
    with pytest.raises(PeerLost, match="worker 0 did not come"):
        list(steps(run, islice(Feed(job, run.team.assignment), 2)))


def test_a_feed_gives_whatever_part_it_is_asked_for() -> None:
    """Several parts of a batch or none, of a data set and of an iterable; the same samples that workers who wait get."""
    wanted = [(0, 1), (0, 2), (1, None), (3, 0), (3, 2), (4, 1)]

    class Asked(Assignment):
        parts = 3

        def __init__(self) -> None:
            self.left = list(wanted)

        def next(self, feed: Any) -> tuple[int, int | None]:
            return self.left.pop(0)

        def end(self) -> None: ...

    rows = torch.utils.data.TensorDataset(torch.arange(40))
    for data in (lambda: rows, lambda: [torch.arange(7) + 7 * number for number in range(5)]):
        jobs = [Job(model=nn.Identity, data=data, batch=7, mesh=on_one_axis(Link(rank, 3))) for rank in range(3)]
        feed = Feed(jobs[1], Asked())
        waiting = [Feed(jobs[rank]) for rank in range(3)]
        expected = [[next(one) for one in waiting] for _ in range(5)]
        for number, part in wanted:
            found = next(feed)
            assert found is None if part is None else str(found) == str(expected[number][part])
