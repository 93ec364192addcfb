"""Workers that do not wait: nothing is lost, counted wrong or staler than allowed; a slow one slows nobody; all end."""
from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.core.ledger import Block, Ledger
from shoestring.core.link import Link
from shoestring.core.technique import Technique, exactness
from shoestring.jobfile import loaded_job
from shoestring.measure.timeline import peak
from shoestring.memory.accumulate import Accumulate
from shoestring.memory.offload import OffloadOptimizer
from shoestring.memory.precision import Precision
from shoestring.memory.step_in_backward import StepInBackward
from shoestring.memory.stream import Stream
from shoestring.parallel.asynchronous import Asynchronous
from shoestring.parallel.average import Average
from shoestring.parallel.drop_stragglers import DropStragglers
from shoestring.parallel.pushes import Pushes
from shoestring.parallel.shard import Shard
from shoestring.planning.conflicts import clash
from shoestring.planning.rehearse import prepared, rehearse
from tests.parallel.members import Group

JOB = Path(__file__).with_name("straggling.py")
both = pytest.mark.parametrize("kind", ["server", "hogwild"])


def trained(place: Path, world: int, technique: Technique | None, steps: int, *more: Technique, **flags: Any) -> list[dict[str, Any]]:
    techniques = [one for one in (technique, *more) if one is not None]
    return Group(place, world, JOB, techniques, steps, flags=flags).results()


def counts(tally: dict[str, int]) -> Counter[int]:
    return Counter({int(key): count for key, count in tally.items()})


def samples(file: Path) -> list[int]:
    return [int(word) for line in file.read_text().splitlines() for word in line.split()[1:]]


def test_a_server_with_one_worker_trains_as_one_process_does(tmp_path: Path) -> None:
    """Nothing is stale then; to the same bits, clipping and batch norm's statistics and all."""
    alone, = trained(tmp_path / "alone", 1, None, 8, clip=0.1)
    first, _ = trained(tmp_path / "group", 2, Asynchronous(), 8, clip=0.1)
    assert first["losses"] == alone["losses"] and first["weights_sha256"] == alone["weights_sha256"]


@both
def test_a_slow_worker_does_less_and_the_others_do_more(kind: str, tmp_path: Path) -> None:
    """Every part is somebody's, once, and the staleness of each push is counted and within the bound."""
    seen = tmp_path / "seen"
    results = trained(tmp_path, 3, Asynchronous(kind, delay=40), 40, slow=2, nap=0.15, seen=str(seen))
    told, losses = results[0]["state"]["pushes"], results[0]["losses"]
    staleness, applied = counts(told["staleness"]), counts(told["applied"])
    parts, extra = (2, 0) if kind == "server" else (3, 2 + 3)   # in Hogwild those that were on their way at the end are applied too
    assert 40 * parts <= sum(applied.values()) == sum(staleness.values()) <= 40 * parts + extra
    assert applied[2] * 3 < min(applied[rank] for rank in applied if rank != 2) and not told["dropped"]
    assert max(staleness) > 2 and max(staleness) <= 40 and told["corrected"] is True
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]) and len(losses) == 40
    found = samples(seen)
    assert len(found) == len(set(found)), "no sample was trained on twice in the first time round"
    assert len(found) >= sum(applied.values()) * 12 // parts


@both
@pytest.mark.parametrize("delay", [0, 2])
def test_no_push_is_staler_than_the_delay(kind: str, delay: int, tmp_path: Path) -> None:
    told = trained(tmp_path, 4, Asynchronous(kind, delay=delay, correct=False), 12, slow=2, nap=0.03)[0]["state"]["pushes"]
    assert set(counts(told["staleness"])) <= set(range(delay + 1)) and told["corrected"] is False
    assert sum(told["applied"].values()) >= 12 * (3 if kind == "server" else 4)


def test_the_slowest_gradient_of_a_round_is_dropped_and_never_the_majority(tmp_path: Path) -> None:
    told = trained(tmp_path, 4, DropStragglers(backup=1), 30, slow=2, nap=0.1)[0]["state"]["pushes"]
    applied, dropped = counts(told["applied"]), counts(told["dropped"])
    assert sum(applied.values()) == 2 * 30 and set(counts(told["staleness"])) == {0}
    assert dropped[2] > applied[2] and applied[2] * 3 < min(applied[1], applied[3])
    assert sum(dropped.values()) <= 30 and all(dropped[rank] < applied[rank] for rank in (1, 3))


@pytest.mark.parametrize("technique", [Asynchronous(), Asynchronous("hogwild"), DropStragglers()], ids=str)
def test_data_that_end_and_batches_smaller_than_the_group_end_well(technique: Technique, tmp_path: Path) -> None:
    """Five batches of one sample: of each, one worker has it and the others nothing."""
    batch = 2 if isinstance(technique, DropStragglers) else 1   # of which a round could count the worker without a sample
    first, *_ = trained(tmp_path, 3, technique, 50, batches=5, batch=batch, norm=False)
    assert first["steps"] == 5


@both
def test_killed_it_goes_on_from_its_checkpoint(kind: str, tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", tmp_path / "seen"
    folder.mkdir()
    task = {"folder": str(folder), "cadence": {"steps": 2}, "flags": {"seen": str(seen)}}
    group = Group(tmp_path, 3, JOB, [Asynchronous(kind)], 1000, **task)
    until = time.monotonic() + 60
    while len(list(folder.glob("checkpoints/step-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    group.kill()
    before = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    step = max(event["step"] for event in before if event["event"] == "saved")
    seen.unlink()
    first, *_ = Group(tmp_path, 3, JOB, [Asynchronous(kind)], step + 4, **task).results()
    begun = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()][len(before):][0]
    assert begun["event"] == "begun" and begun["step"] == step and first["steps"] == step + 4
    parts = 2 if kind == "server" else 3
    assert sum(first["state"]["pushes"]["applied"].values()) >= (step + 4) * parts, "those before the checkpoint are counted too"
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(0)).tolist()
    assert 0 < step < 400 and not set(order[:12 * step]) & set(samples(seen)), "the data go on where they were"
    finished = Group(tmp_path, 3, JOB, [Asynchronous(kind)], step + 4, **task).results()[0]
    assert finished["weights_sha256"] == first["weights_sha256"], "the last checkpoint has the weights of the end"


@pytest.mark.parametrize("technique", [Asynchronous(), Asynchronous("hogwild"), DropStragglers()], ids=str)
@pytest.mark.parametrize("pieces", [1, 2])
def test_rehearsed_on_fake_tensors_it_is_as_it_is(technique: Technique, pieces: int, tmp_path: Path) -> None:
    """Memory of the server and of workers, and what a worker sends, to the byte; the first in Hogwild may have nothing to do in a step."""
    more = [Accumulate(pieces)] if pieces > 1 else []
    results = trained(tmp_path, 3, technique, 12, *more)
    for rank, found in enumerate(results):
        job = loaded_job(JOB, {})
        link = Link(rank, 3)
        log = rehearse(Job(**{**vars(job), "link": link}), (technique, *more))
        assert not link.loose, "a rehearsal leaves nothing behind"
        assert found["steps"] > 1, "the optimizer's state is there from the second step on"
        if rank or technique != Asynchronous("hogwild"):
            assert peak(log).bytes == found["measured"]["peak_bytes"], rank
        else:
            assert 0.4 * peak(log).bytes < found["measured"]["peak_bytes"] <= peak(log).bytes
        assert not rank or log.sent[-1] == found["measured"]["sent_bytes"], rank


def test_what_cant_be_combined_is_told() -> None:
    for one in (Asynchronous(), DropStragglers()):
        for other in (StepInBackward(), Stream(), OffloadOptimizer(), Precision("fp16"), Average(), Shard(), one):
            assert clash(one, other) == clash(other, one) != ""
        assert not clash(one, Precision("bf16")) and not clash(one, Accumulate(2))
    assert "both unite" in clash(Asynchronous(), DropStragglers()) == clash(Average(), Shard())


@pytest.mark.parametrize("wrong", [
    lambda: Asynchronous("ps"), lambda: Asynchronous(delay=-1), lambda: Asynchronous(delay=5000), lambda: DropStragglers(0)])
def test_mistakes_are_told(wrong: Any) -> None:
    with pytest.raises(Mistake):
        wrong()


def test_a_group_that_is_too_small_is_told() -> None:
    job = loaded_job(JOB, {})
    for technique, world in ((Asynchronous(), 1), (Asynchronous("hogwild"), 1), (DropStragglers(), 2)):
        with pytest.raises(Mistake, match="--devices"):
            prepared(Job(**{**vars(job), "link": Link(0, world)}), [technique], job.model())
        assert "--devices" in technique.refusal(Ledger((), world=world)) and not technique.refusal(Ledger((), world=world + 1))


def test_the_cost_is_that_of_the_busier_of_server_and_workers() -> None:
    ledger = Ledger((Block("a", kept=60.0, gradient=100.0, forward=1.0, backward=2.0),), still=(Block("a"),), batch=6, parameters=100.0,
                    optimizer=200.0, update=0.5, world=3, per_sent=0.001)
    served = Asynchronous().cost(ledger)
    assert served.seconds == pytest.approx(4.5 + 0.2)            # half of the batch instead of a third, and both ways of the weights
    assert served.sent == 100.0 and served.blocks[0].kept == 90.0
    assert served.peak == max(100 + 90 + 100.0, 100 + 100 + 200)  # a worker in backward, the server in its update
    slow = Asynchronous().cost(Ledger(**{**vars(ledger), "per_sent": 0.05}))
    assert slow.seconds == pytest.approx(2 * (10 + 0.5))         # the server is what all wait for
    assert DropStragglers().cost(ledger).peak == served.peak + 100
    assert Asynchronous("hogwild").cost(ledger) == ledger and int(exactness(Asynchronous(), ledger)) == 3


def test_what_was_pushed_comes_back() -> None:
    pushes, again = Pushes(True), Pushes(True)
    for rank, staleness in ((1, 0), (2, 3), (1, 3)):
        pushes.add(rank, staleness)
    pushes.dropped[2] += 1
    again.load_state_dict(json.loads(json.dumps(pushes.state_dict())))
    assert again.state_dict() == pushes.state_dict() == {
        "corrected": True, "staleness": {"0": 1, "3": 2}, "applied": {"1": 2, "2": 1}, "dropped": {"2": 1}}


def test_the_rate_of_a_stale_step_is_divided(tmp_path: Path) -> None:
    """On an imagined link every push has the staleness that the server is told."""
    from shoestring.parallel.rate import rate_times

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.8)
    with rate_times(optimizer, 1 / 4):
        assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["lr"] == 0.8
