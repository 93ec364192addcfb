"""When a checkpoint is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.saver import Saver


@pytest.mark.parametrize(
    ("asked", "resumed", "due"),
    [
        (range(1, 8), 0, [3, 6]),  # after every step
        ([2, 4, 6, 8, 10], 0, [4, 6, 10]),  # workers that meet every two steps: at the next meeting
        ([5, 6, 7], 4, [6]),  # going on from what was saved at step 4
        ([7, 8, 9], 6, [9]),
    ],
)
def test_a_checkpoint_that_is_due_between_two_meetings_is_saved_at_the_next(
    asked: range | list[int], resumed: int, due: list[int], tmp_path: Path
) -> None:
    saver = Saver(tmp_path, Cadence(steps=3), lambda *words, **more: None)
    saver.saved_step = resumed
    assert [step for step in asked if saver.due(step)] == due
    saver.close()
