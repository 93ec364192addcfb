"""Latencies are not what these tests are about: a few calls are enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def few_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.compression.calibration.latency.ENOUGH", 0.0)
        patch.setattr("shoestring.compression.calibration.latency.LEAST", 3)
        yield
