"""A request of several samples: its answers are all of one generation of weights, in their order."""

from __future__ import annotations

import asyncio

import torch

from shoestring.serving.replicas.pending import PendingRequest
from tests.serving.tiny import sample


def test_answers_of_older_weights_are_computed_again() -> None:
    async def test() -> None:
        old, new = {"y": torch.tensor(1.0)}, {"y": torch.tensor(2.0)}
        request = PendingRequest([sample(1.0)] * 3, asyncio.get_running_loop().create_future())
        assert request.answer(2, 1, old) == [] and request.answer(0, 2, new) == []
        assert request.answer(1, 1, old) == [2, 1] and not request.done.done()
        assert request.answer(1, 2, new) == [] and request.answer(2, 2, new) == []
        assert [float(one["y"]) for one in request.done.result()] == [2.0, 2.0, 2.0]
        assert request.answer(0, 3, old) == [], "what comes after the end changes nothing"

    asyncio.run(test())
