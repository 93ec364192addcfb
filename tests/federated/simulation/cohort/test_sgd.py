"""Plain SGD of devices: the same bits as torch.optim.SGD, without importing torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from shoestring.federated.simulation.cohort.sgd import Sgd
from tests.federated.simulation.cohort.cases import cnn
from tests.waiting import HUNG

ROOT = Path(__file__).parents[4]
SMALL = """
import sys
from shoestring.federated.planning.prepare import FederateOptions, prepare_federation
from shoestring.federated.room import plan_federation
from shoestring.core.budget import Budget
from tests.federated.toys import toy_job
found = plan_federation(prepare_federation(toy_job(), FederateOptions(per_round=6, rounds=2)), Budget(up=200))
print(found.given.how.kind, "torch._dynamo" in sys.modules)
"""


def test_it_gives_the_bits_of_torchs() -> None:
    ours, theirs = cnn(), cnn()
    theirs.load_state_dict(ours.state_dict())
    inputs, classes = torch.randn(8, 1, 12, 12), torch.randint(5, (8,))
    for model, optimizer in (
        (ours, Sgd(ours.parameters(), 0.05)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05)),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_small_federation_is_planned_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
    assert done.stdout.split() == ["fused", "False"], done.stderr
