"""The kill matrix of pipelines: whichever stage is killed and whenever, the group recovers by itself and ends with the same bits.

As tests/processes/test_kill_matrix.py, whose job has no blocks to cut between: dropout, statistics and moments are in play, and the worker
kills itself, because only it knows the moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoestring.core.exactness import Exactness
from shoestring.core.technique import technique_json
from shoestring.processes.group.launch import run_group
from shoestring.processes.nodes import Team
from shoestring.runs.events.event import Event
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.plan import training_plan
from tests.commands.test_main import answer
from tests.processes import test_kill_matrix as matrix
from tests.processes.group.test_launch import LifeClock, suspended_at
from tests.records import records, steps_in
from tests.tasks import train_task
from tests.waiting import PASS_GATE, Gates

slow = pytest.mark.slow
STEPS, EVERY = 12, 4
NET = """
class Block(nn.Module):
    def __init__(self, told):
        super().__init__()
        self.work = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 32))
        self.told = told

    def forward(self, x):
        inner = self.work(x)
        if inner.requires_grad:
            inner.register_hook(lambda gradient: self.told())
        return x + inner

class Net(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.body = nn.ModuleList(Block(self.told) for _ in range(4))
        self.head = nn.Linear(32, 4)
        self.at, self.calls = at, 0

    @property
    def step(self):
        return (self.calls + 3) // 4   # four pieces a step

    def told(self):
        if self.at:
            self.at(f"backward of step {self.step}")

    def forward(self, x):
        self.calls += 1
        for block in self.body:
            x = block(x)
        return self.head(x)

    def state_dict(self, *words, **more):
        if self.at:
            self.at(f"state asked for after step {self.step}")
        return super().state_dict(*words, **more)
"""
before, rest = matrix.JOB.split("class Net(nn.Module):")
JOB = (
    (before + NET + "\ndef watched" + rest.partition("def watched")[2])
    .replace(
        "shoestring.training.data_parallel.sharding.sharding import ShardedTensor",
        "shoestring.training.pipeline.stages.stage_state import StagedTensor",
    )
    .replace("ShardedTensor", "StagedTensor")
    .replace("torch.randn(12, 32)", "torch.randn(32, 32)")
)  # two copies, four pieces: several in each
FIRST, MIDDLE, ASKED, GATHERED, WRITTEN, RENAMED = matrix.MOMENTS
TWO, HALVES, FOUR, SHORT = "two stages", "two stages, halves", "two stages, two copies", "two stages, told shortly"
PLANS = {
    TWO: (Pipeline(2, 4),),
    HALVES: (Pipeline(2, 4, "zero-bubble"),),
    FOUR: (Pipeline(2, 4), DataParallel()),
    SHORT: (Pipeline(2, 4), CompressGradients()),  # what every worker keeps back is its own
}
QUICK = [(TWO, 1, MIDDLE), (TWO, 0, GATHERED), (SHORT, 3, MIDDLE)]
MATRIX = [
    (use, rank, moment)
    for use, world in ((TWO, 2), (HALVES, 2), (FOUR, 4), (SHORT, 4))
    for rank in range(world)
    for moment in (FIRST, MIDDLE, ASKED, GATHERED, *((WRITTEN, RENAMED) if rank == 0 else ()))
]

UNDISTURBED: dict[str, dict[str, Any]] = {}


def trained(place: Path, use: str, *words: object) -> dict[str, Any]:
    """What a run of a saved plan reports; planning is tested elsewhere, and would take most of the time."""
    (place / "job.py").write_text(JOB)
    training_plan(PLANS[use], Exactness.CHANGED, peak_bytes=1, process_bytes=1, step_seconds=1.0).save(
        place / "plan.json"
    )
    words = ("--plan", "plan.json", "--devices", 4 if use in (FOUR, SHORT) else 2, *words)
    return answer("train", "job.py", "--run", "run", "--save-every", EVERY, *words, cwd=place)


def undisturbed(use: str, place: Path) -> dict[str, Any]:
    if use not in UNDISTURBED:
        place.mkdir()
        UNDISTURBED[use] = trained(place, use)
        assert UNDISTURBED[use]["restarts"] == 0 and UNDISTURBED[use]["steps"] == STEPS
    return UNDISTURBED[use]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    ("use", "rank", "moment"), [*QUICK, *(pytest.param(*one, marks=slow) for one in MATRIX if one not in QUICK)]
)
def test_a_pipeline_whose_stage_is_killed_ends_with_the_same_bits(
    use: str, rank: int, moment: str, tmp_path: Path
) -> None:
    expected = undisturbed(use, tmp_path / "undisturbed")
    saved = f"step-{EVERY:08}" if matrix.MOMENTS[moment] else ""
    report = trained(tmp_path, use, "--rank", rank, "--moment", moment, "--saved", saved)
    assert (tmp_path / "killed").read_text() == f"worker {rank}: {moment}"
    assert report["restarts"] == 1
    events = records(tmp_path / "run")
    assert [(event["rank"], event["why"]) for event in events if event["event"] == "died"] == [(rank, "SIGKILL")]
    assert [event["step"] for event in events if event["event"] == "begun"] == [0, matrix.MOMENTS[moment]]
    assert [event["step"] for event in steps_in(events)] == list(range(1, STEPS + 1))
    assert report["losses"] == expected["losses"] and report["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=slow)])
def test_a_stage_that_hangs_is_named(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what it would send, and must not be taken for it."""
    held = "    for number in itertools.count(1):\n        pass_gate(os.path.dirname(__file__), number)\n"
    (tmp_path / "job.py").write_text(PASS_GATE + "import itertools\n" + JOB.replace("    while True:\n", held))
    (tmp_path / "run").mkdir()
    clock = LifeClock(1 - rank, monkeypatch)
    with Gates(tmp_path, 10) as gates:
        suspend = suspended_at(7, rank, clock)

        def look(event: Event) -> None:
            suspend(event)
            if clock.runs and gates.held:
                gates.open(10)

        task = train_task(
            tmp_path / "job.py", STEPS, [technique_json(Pipeline(2, 4))], tmp_path / "run", {"steps": 3, "keep": 2}
        )
        result = run_group(task, {}, Team(2, patience=3.0), look, clock=clock)
    died = [event for event in records(tmp_path / "run") if event["event"] == "died"]
    assert [event["rank"] for event in died] == [rank] and died[0]["why"].startswith("no sign of life for ")
    assert result.restarts == 1 and result.steps == STEPS
