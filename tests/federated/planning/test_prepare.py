"""State outside of the row: frozen weights and weight files are the same on every device and in every process."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import shoestring
from shoestring.federated.planning.prepare import plain_cost
from tests.federated.toys import CLASSES, WIDTH, toy, toy_job


def frozen_body() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    model[0].requires_grad_(False)
    return model


def test_frozen_weights_are_those_of_the_job_and_its_seed_wherever_the_model_is_made() -> None:
    given = toy(toy_job(model=frozen_body), how=None)
    assert given.layout.size == 8 * CLASSES + CLASSES, "what is frozen is not sent"
    torch.manual_seed(17)  # what was drawn before does not matter
    first = plain_cost(given).evidence
    torch.manual_seed(18)
    second = plain_cost(toy(toy_job(model=frozen_body), how=None)).evidence
    assert first is not None and second is not None and torch.equal(first.exact, second.exact)


def test_a_model_that_begins_from_a_file_is_trained_on_devices_with_all_of_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    given = {name: one.detach().clone() for name, one in frozen_body().state_dict().items()}
    save_file(given, tmp_path / "given.safetensors")
    job = toy_job(model=frozen_body, weights=str(tmp_path / "given.safetensors"))
    done = shoestring.federate(job, rounds=1, per_round=1, clients=1, processes=1)
    assert torch.equal(done.model[0].weight, given["0.weight"]) and not torch.equal(
        done.model[2].weight, given["2.weight"]
    )
    # FedSGD's loss is that of all its records before the step: only with the file's frozen weights is it this
    again = shoestring.federate(job, rounds=1, per_round=1, clients=1, processes=1, use=["FedSGD()"])
    records = toy(job, per_round=1, clients=1).sample[0].records
    model = frozen_body()
    model.load_state_dict(given)
    inputs, targets = records.batch(records.trained)
    assert abs(again.losses[0] - nn.functional.cross_entropy(model(inputs), targets).item()) < 1e-5
