from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.numerics.error_feedback import encode_and_keep, update_with_error


class Rounding:
    """Sends numbers rounded to whole ones."""

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        into.copy_(numbers.round())

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        total.add_(message, alpha=times)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-99, 99), min_size=3, max_size=3), min_size=1, max_size=8))
def test_all_that_was_sent_and_what_is_kept_are_all_updates(steps: list[list[int]]) -> None:
    sent, kept = torch.zeros(3), None
    for step in steps:
        message, due = torch.zeros(3), update_with_error(torch.tensor(step) / 8, kept).clone()
        encode_and_keep(Rounding(), due, message)
        sent, kept = sent + message, due
        assert float(kept.abs().max()) <= 0.5
    assert torch.equal(sent + kept, torch.tensor(steps).sum(0) / 8)


def test_what_another_model_left_is_not_owed() -> None:
    update = torch.ones(3)
    assert update_with_error(update, torch.ones(4)) is update and update_with_error(update, None) is update
