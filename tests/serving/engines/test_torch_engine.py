"""A module as an engine: what is refused, and what it does to the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward
from shoestring.serving.engines.together import Together
from shoestring.serving.engines.torch_engine import TorchEngine
from tests.serving.engines.contract import Case, check_contract
from tests.serving.engines.models import Subject, from_config, reader, texts, torch_layers, whole


def by_torch(**settings: Any) -> Case:
    subject = reader(**settings)
    return Case(subject.engine(), subject.model, whole)


def with_padding() -> Case:
    pytest.importorskip("transformers")
    subject = Subject(from_config("MPNet", pad_token_id=1, max_position_embeddings=66), texts())
    return Case(subject.engine(), subject.model, default_forward, named=True)


@pytest.mark.parametrize(
    ("make", "packs", "together"),
    [
        pytest.param(lambda: by_torch(pooled="all"), True, Together.EQUAL, id="packed"),
        pytest.param(with_padding, False, Together.PADDED, id="padded"),
        pytest.param(lambda: by_torch(pooled="mean"), False, Together.EQUAL, id="equal lengths"),
        pytest.param(
            lambda: by_torch(norm=nn.BatchNorm1d(32, track_running_stats=False)),
            False,
            Together.ALONE,
            id="one at a time",
        ),
    ],
)
def test_every_answer_is_the_models_to_the_sample_alone(
    make: Callable[[], Case], packs: bool, together: Together
) -> None:
    check_contract(make(), packs, together)


def training(model: nn.Module, batch: Any) -> Any:
    model.blocks[0].train()  # type: ignore[index, union-attr]
    return model(batch)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: Subject(reader().model, reader().values, training),
            "the job's forward puts blocks.0 into training mode",
        ),
        (lambda: reader(drop=0.1), "the model answers the same sample differently each time"),
    ],
)
def test_what_answers_by_chance_is_refused(make: Callable[[], Subject], told: str) -> None:
    subject = make()
    with pytest.raises(Mistake, match=told):
        TorchEngine(subject.model, subject.forward, subject.interface())


def test_a_mask_that_marks_padding_is_filled_with_ones() -> None:
    engine = torch_layers().engine()
    assert [form.pad for form in engine.interface.inputs.forms] == [0, 1]


def test_answers_leave_the_module_as_it_was() -> None:
    subject = reader(pooled="all")
    engine = subject.engine()
    before = {name: one.clone() for name, one in subject.model.state_dict().items()}
    engine.answers(engine.interface.samples)
    assert not any("forward" in vars(module) for module in subject.model.modules())
    assert all(torch.equal(one, before[name]) for name, one in subject.model.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled()


def test_packing_may_be_left_out() -> None:
    subject = reader(pooled="all")
    engine = TorchEngine(subject.model, whole, subject.interface(), pack=False)
    assert not engine.packs and engine.why_not_packed == "packing was not asked for"
