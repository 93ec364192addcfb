"""What a worker of a pipeline holds of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.core.model.swap import Swap
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.data_parallel.sharding.sharding import Sharding
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.stages.stages import Stages
from tests.models import job, seeded


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_of_other_stages_are_let_go_of_though_they_wait_in_a_file_while_the_model_is_made(rank: int) -> None:
    made = replace(job("chain"), mesh=imagined_mesh({"data": 2, "stage": 2, "tensor": 1}, rank))
    expected = {name: one.detach().clone() for name, one in seeded(made).named_parameters()}
    with Swap(room=1 << 15):  # less than its largest weights take
        model = seeded(made)
        torch.zeros(1 << 18)  # whoever is in memory goes to the file now
        run = build_run(made, (Pipeline(2, 2), Shard(1)), model)
    stages, shards = run.state["stages"], run.state["shards"]
    assert isinstance(stages, Stages) and isinstance(shards, Sharding)
    here = {name for name in expected if stages.weights.uses(name)}
    assert here and set(expected) - here
    for name, one in run.model.named_parameters():
        assert one.untyped_storage().nbytes() == 0 if name not in here else torch.equal(one, expected[name]), name
    assert {shards.names[one] for one in shards.unit_of} == here  # all of them are added up over the copies
