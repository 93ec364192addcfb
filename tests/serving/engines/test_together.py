"""What fills shorter samples is tried, and not taken from a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoestring.serving.engines.together import Together
from tests.serving.engines.models import Subject, from_config, ids_alone, texts, whole


class Means(nn.Module):
    """A mean of those positions that do not hold the padding word."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.table = nn.Embedding(99, 8, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        there = (ids != self.table.padding_idx)[..., None]
        return (self.table(ids) * there).sum(1) / there.sum(1)


class Last(nn.Module):
    """The last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.states = nn.Embedding(99, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.states(self.table(ids))[0][:, -1]
        return found


@pytest.mark.parametrize(
    ("model", "way", "pad"),
    [(lambda: Means(0), Together.PADDED, 0), (lambda: Means(98), Together.PADDED, 98), (Last, Together.EQUAL, None)],
)
def test_the_number_that_keeps_answers_fills(model: Callable[[], nn.Module], way: Together, pad: int | None) -> None:
    engine = Subject(model().eval(), [torch.where(ids == 98, 5, ids) for ids in ids_alone()], whole).engine()
    assert engine.together is way
    assert pad is None or engine.interface.inputs.forms[0].pad == pad
    assert bool(engine.why_not_padded) == (way is Together.EQUAL)


def test_a_mask_is_added_where_samples_bring_none() -> None:
    pytest.importorskip("transformers")
    engine = Subject(from_config("MPNet", pad_token_id=1, max_position_embeddings=66), texts(mask=False)).engine()
    assert engine.together is Together.PADDED and [one.name for one in engine.signature.inputs] == ["input_ids"]
    batch = engine.interface.inputs.batch([engine.interface.inputs.sample(one) for one in texts(mask=False)[:2]])
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 4, [1] * 9]
