"""PipeDream: every update is the one that the paper describes, and all that is said of it holds."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.technique import drift
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipedream import PipeDream
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.ledgers import with_traits
from tests.models import job, seeded
from tests.records import records, steps_in
from tests.training.data_parallel.test_promises_of_groups import outcomes
from tests.training.members import Group
from tests.training.pipeline import six_blocks
from tests.waiting import HUNG, until

pytestmark = pytest.mark.usefixtures("warm_workers")
JOB = Path(six_blocks.__file__)


def line(stages: int, **knobs: Any) -> Pipeline:
    return Pipeline(stages, 4, "pipedream", (6 // stages,) * stages, **knobs)


def trained(place: Path, plan: list[Technique], world: int, **flags: Any) -> dict[str, Tensor]:
    place.mkdir()
    Group(place, world, JOB, plan, len(six_blocks.SIZES), flags=flags, weights=str(place / "weights")).results()
    return {name: value.clone() for name, value in TensorFile(place / "weights").items()}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("vertical", [False, True])
def test_every_update_is_that_of_one_process_that_keeps_all_versions(
    stages: int, vertical: bool, tmp_path: Path
) -> None:
    found = trained(tmp_path / "group", [line(stages, vertical=vertical, flush=3)], stages)
    wanted = six_blocks.simulated(stages, 4, 3, vertical)
    other = six_blocks.simulated(stages, 4, 3, not vertical)  # the comparison sees a difference of one version
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6
    assert max(float((found[name] - other[name]).abs().max()) for name in wanted) > 1e-4


def test_data_that_end_early_leave_no_piece_on_its_way_and_the_stash_is_as_large_as_it_says(tmp_path: Path) -> None:
    sizes = (10,) * 5
    plan: list[Technique] = [line(3)]
    flags = {"sizes": ",".join(map(str, sizes)), "ends": True}
    told = Group(tmp_path, 3, JOB, plan, 40, flags=flags, weights=str(tmp_path / "weights")).results()
    wanted, found = six_blocks.simulated(3, 4, 16, False, sizes), TensorFile(tmp_path / "weights")
    assert told[0]["steps"] == 5 and max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6
    kept = 2 * sum(
        one.nbytes for block in six_blocks.model()[:2] for one in block.parameters()
    )  # stage 0 of 3: two versions
    assert told[0]["state"]["stages"] == {"step": 5, "stash_bytes": kept}


def test_two_runs_end_with_the_same_bits_and_blocks_computed_again_meet_the_weights_of_their_forward(
    tmp_path: Path,
) -> None:
    first, again = (trained(tmp_path / name, [line(3)], 3, dropout=0.2) for name in ("first", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    recomputed = trained(tmp_path / "recomputed", [line(3), Checkpoint(1)], 3, dropout=0.2)
    assert max(float((first[name] - recomputed[name]).abs().max()) for name in first) <= 1e-6


def test_a_run_that_is_killed_goes_on_from_where_the_line_drained_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Stage 1 is killed in the forward of the third piece of the sixth batch. The line drained after the fourth, which was saved."""
    plan, steps = [line(2, flush=4)], 12
    flags: dict[str, Any] = {"dropout": 0.2, "sizes": ",".join(["8"] * steps)}
    found = []
    for place, doom in (("whole", {}), ("killed", {"file": str(tmp_path / "dead"), "last": 5 * 4 + 3})):
        words: dict[str, Any] = {
            "folder": str(tmp_path / place),
            "cadence": {"steps": 1},
            "weights": str(tmp_path / f"{place} weights"),
            "flags": flags | doom,
        }
        group = Group(tmp_path / place, 2, JOB, plan, steps, **words)
        if doom:
            group.processes[1].join(HUNG)
            assert group.processes[1].exitcode == -signal.SIGKILL
            until((tmp_path / place / "checkpoints" / "step-00000004").exists)  # it is saved in the background
            group.kill()
            group = Group(tmp_path / place, 2, JOB, plan, steps, **words)
        group.results()
        found.append(TensorFile(tmp_path / f"{place} weights"))
    assert [event["step"] for event in records(tmp_path / "killed") if event["event"] == "begun"] == [0, 4]
    losses = [[event["loss"] for event in steps_in(records(tmp_path / place))] for place in ("whole", "killed")]
    assert losses[0] == losses[1] and len(losses[0]) == steps
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(("name", "world"), [("chain", 3), ("frozen bottom", 2)])
def test_memory_and_bytes_sent_are_as_predicted_and_it_drifts_no_further_than_stated(
    name: str, world: int, tmp_path: Path
) -> None:
    plain: list[tuple[Technique, ...]] = [(Pipeline(world, 4, "pipedream"),)]
    wanted = (
        [*plain, (Pipeline(world, 4, "pipedream", vertical=True),), (*plain[0], Checkpoint(1))]
        if name == "chain"
        else plain
    )
    found = outcomes(name, world, wanted, tmp_path)
    for (pipeline, *_), outcome in zip(wanted, found, strict=True):
        assert pipeline.exactness(Ledger(())) is Exactness.CHANGED
        for one in outcome["workers"]:
            assert (
                one["peaks"][0] == one["peaks"][1]
                and one["sent"][0] == one["sent"][1]
                and one["flops"][0] == one["flops"][1]
            )
            assert 0 < one["drift"] <= drift(pipeline, Ledger(())) <= 10 and one["losses"][-1] < one["losses"][0]
    if name == "chain":  # a stash less costs less: the last stage keeps nothing, and with vertical sync as much as all
        last = [outcome["workers"][-1]["peaks"][1] for outcome in found[:2]]
        assert last[0] < last[1]


def engine(made: Job, **knobs: Any) -> PipeDream:
    """Of the first of two stages, alone."""
    run = build_run(
        replace(made, mesh=imagined_mesh({"data": 1, "stage": 2, "tensor": 1})),
        [Pipeline(2, 4, "pipedream", **knobs)],
        seeded(made),
    )
    found = run.state["stages"]
    assert isinstance(found, PipeDream)
    return found


def test_what_goes_wrong_with_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        Mistake, match=r"the weight transformer\.wte\.weight is used by the stages 0, 1.*use schedule='1f1b'"
    ):
        engine(job("gpt2"))
    with pytest.raises(Mistake, match="clips gradients"):
        engine(job("chain", clip=1.0))
    assert "clips gradients" in line(2).refusal(with_traits(Ledger(()), "clips"))
    assert "copies add up" in conflict((line(2), DataParallel())) and not conflict(
        (Pipeline(2, 4, "1f1b"), DataParallel())
    )
    assert "keeps versions of whole layers" in conflict((line(2), TensorParallel(2)))
    assert "fewer pieces" in conflict((line(2), Accumulate(2))) and not conflict((line(2), Checkpoint(1)))
    wrong: dict[str, Any]
    for wrong, reason in (
        ({"flush": 0}, "1 or more"),
        ({"stages": 5}, "fewer pieces than stages"),
        ({"schedule": "1f1b", "vertical": True}, "are for schedule='pipedream'"),
    ):
        with pytest.raises(Mistake, match=reason):
            Pipeline(**{"stages": 2, "pieces": 4, "schedule": "pipedream", **wrong})


def test_a_tensor_that_shares_memory_with_a_weight_is_refused() -> None:
    class Shared(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*six_blocks.model())
            self.turned = next(self[6].parameters()).detach().t()

    assert engine(six_blocks.job()).link.world == 2
    made = replace(six_blocks.job(), model=Shared)
    with pytest.raises(Mistake, match=r"turned shares memory with the weight 6\.weight"):
        build_run(
            replace(made, mesh=imagined_mesh({"data": 1, "stage": 2, "tensor": 1}, 1)),
            [Pipeline(2, 4, "pipedream")],
            seeded(made),
        )


def test_it_tells_how_late_gradients_are_and_when_it_drains() -> None:
    assert "stages 0, 1 are 1, 0 updates late; the pipeline drains every 16 steps" in engine(six_blocks.job()).remark
    assert "stages 0, 1 are 1, 1 updates late" in engine(six_blocks.job(), vertical=True).remark
