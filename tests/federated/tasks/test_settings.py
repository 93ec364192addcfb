from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.federated.tasks.settings import TuneCandidate, candidates_of, settings_of


def test_a_grid_has_every_combination_once() -> None:
    found = settings_of("lr=0.01,0.1,1 epochs=1,2")
    assert len(found) == 6 and found[0] == {"lr": 0.01, "epochs": 1} and found[-1] == {"lr": 1.0, "epochs": 2}
    assert [one.name for one in candidates_of(found)][:2] == ["lr=0.01 epochs=1", "lr=0.01 epochs=2"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", "write a grid"),
        ("epoch=1", "did you mean epochs"),
        ("learning=1", "has no setting 'learning'"),
        ("lr", "write a name, ="),
        ("lr=", "write a name, ="),
        ("lr=0.1,", "'' is not a number"),
        ("lr=big", "'big' is not a number"),
        ("lr=0.1 lr=1", "given twice"),
        ("lr=0.1,0.1", "a value twice"),
        ("lr=-1", "lr=-1"),
        ("epochs=1.5", "whole number"),
        ("epochs=True", "is not a number"),
        ("held_out=0.5", "evaluated on the same records"),
        ("optimizer=1", "a function of the job"),
        ("batch=" + ",".join(map(str, range(40))) + " steps=" + ",".join(map(str, range(40))), "1,600 settings"),
    ],
)
def test_a_grid_that_can_not_work_is_refused_with_the_reason(written: str, told: str) -> None:
    with pytest.raises(Mistake, match=told.replace("?", r"\?")):
        settings_of(written)


def test_settings_change_the_jobs_local_and_nothing_else() -> None:
    local = Local(epochs=3, batch=5, lr=0.2, held_out=0.1)
    assert TuneCandidate("one", {"lr": 1.0}).local(local) == replace(local, lr=1.0)
    assert TuneCandidate("none").local(local) == local


def test_a_rate_that_the_jobs_own_optimizer_would_ignore_is_refused() -> None:
    local = Local(optimizer=torch.optim.Adam, held_out=0.1)
    with pytest.raises(Mistake, match="lr has no effect"):
        TuneCandidate("one", {"lr": 1.0}).local(local)
    assert TuneCandidate("one", {"epochs": 2}).local(local).epochs == 2
