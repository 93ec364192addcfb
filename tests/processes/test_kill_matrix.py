"""The kill matrix of groups: whichever worker is killed and whenever, the group recovers by itself and ends with the same bits.

The job draws (dropout, data from the global generator) and has statistics and moments, so that all that a checkpoint holds is in play. The
worker kills itself, because only it knows the moment; a file that it makes just before says when that was, and that it was once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_main import answer
from tests.records import records, steps_in
from tests.waiting import UNTIL_EXISTS

pytestmark = pytest.mark.slow

STEPS, EVERY = 12, 4
JOB = (
    UNTIL_EXISTS
    + """
import signal
from collections import Counter
import torch
from torch import nn
from shoestring import Job
from shoestring.training.data_parallel.sharding.sharding import ShardedTensor

class Net(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2))
        self.upper = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
        self.at, self.step = at, 0

    def forward(self, x):
        self.step += 1
        inner, step = self.lower(x), self.step
        if self.at and torch.is_grad_enabled():
            inner.register_hook(lambda gradient: self.at(f"backward of step {step}"))   # when gradients of the upper part are being sent
        return self.upper(inner)

    def state_dict(self, *words, **more):
        if self.at:
            self.at(f"state asked for after step {self.step}")
        return super().state_dict(*words, **more)

def watched(at, net):
    '''Have the parts of weights and the syncing of files tell their moments.'''
    pieces, fsync = ShardedTensor.pieces, os.fsync
    count = Counter()

    def counted(self):
        for piece in pieces(self):
            count[net.step] += 1
            at(f"piece {count[net.step]} gathered after step {net.step}")
            yield piece

    def synced(file):
        fsync(file)
        *_, folder, name = os.readlink(f"/proc/self/fd/{file}").split("/")
        at(f"synced {folder.partition('.')[0]}/{name}" if folder.startswith("step-") else f"synced {name} with {latest()}")

    def latest():
        return max((name for name in os.listdir("run/checkpoints") if "." not in name), default="nothing")

    ShardedTensor.pieces, os.fsync = counted, synced
    return net

def data():
    while True:
        x = torch.randn(12, 32)
        yield x, x[:, :4].argmax(1)

def job(rank: int = -1, moment: str = "", saved: str = "") -> Job:
    def at(now):
        if now != moment or os.path.exists("killed"):
            return
        if saved:
            until_exists("run/checkpoints/" + saved)   # by the first worker's thread, meanwhile
        with open("killed", "x") as file:
            file.write(f"worker {os.environ['RANK']}: {now}")
        os.kill(os.getpid(), signal.SIGKILL)

    doomed = os.environ.get("RANK") == str(rank)   # there is none where it is planned
    return Job(model=lambda: watched(at, Net(at)) if doomed else Net(None), data=data, steps=12)
"""
)
MOMENTS = {  # as the worker says them, and the step that the group then goes on from
    "backward of step 1": 0,
    "backward of step 6": 4,
    "state asked for after step 8": 4,
    "piece 7 gathered after step 8": 4,
    "synced step-00000008/manifest.json": 4,
    "synced checkpoints with step-00000008": 8,
}
FIRST, MIDDLE, ASKED, GATHERED, WRITTEN, RENAMED = MOMENTS
MATRIX = [
    (use, rank, moment)
    for use, saving in (("DataParallel()", ASKED), ("Shard(stage=3)", GATHERED))
    for rank in range(3)
    for moment in (FIRST, MIDDLE, saving, *((WRITTEN, RENAMED) if rank == 0 else ()))
]  # the first worker writes
MATRIX += [
    (use, 1, MIDDLE) for use in ("CompressGradients(kind='int8')", "CompressGradients(kind='topk')")
]  # what each keeps back


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A report for each plan; its run's folder has the plan."""
    found = {}
    for use in sorted({use for use, _, _ in MATRIX}):
        place = made(tmp_path_factory.mktemp("undisturbed"))
        found[use] = trained(place, "--use", use) | {"plan": place / "run" / "plan.json"}
        assert found[use]["restarts"] == 0 and found[use]["steps"] == STEPS
    return found


def made(place: Path) -> Path:
    (place / "job.py").write_text(JOB)
    return place


def trained(place: Path, *words: object) -> dict[str, Any]:
    return answer("train", "job.py", "--devices", 3, "--run", "run", "--save-every", EVERY, *words, cwd=place)


@pytest.mark.parametrize(("use", "rank", "moment"), MATRIX)
def test_a_group_whose_worker_is_killed_ends_with_the_same_bits(
    use: str, rank: int, moment: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    saved = f"step-{EVERY:08}" if MOMENTS[moment] else ""
    report = trained(
        made(tmp_path), "--plan", undisturbed[use]["plan"], "--rank", rank, "--moment", moment, "--saved", saved
    )
    assert (tmp_path / "killed").read_text() == f"worker {rank}: {moment}"
    assert report["restarts"] == 1 and len(report["recovery_seconds"]) == 1 and report["world"] == 3
    events = records(tmp_path / "run")
    assert [(event["rank"], event["why"]) for event in events if event["event"] == "died"] == [(rank, "SIGKILL")]
    assert [event["step"] for event in events if event["event"] == "begun"] == [0, MOMENTS[moment]]
    assert [event["step"] for event in steps_in(events)] == list(range(1, STEPS + 1))
    assert (
        report["losses"] == undisturbed[use]["losses"]
        and report["weights_sha256"] == undisturbed[use]["weights_sha256"]
    )
