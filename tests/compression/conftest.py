"""Latencies are not what these tests are about: a few calls are enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.nn.modules.module import register_module_forward_hook

from tests.machine import CountedWork


@pytest.fixture(autouse=True)
def few_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.compression.calibration.latency.ENOUGH", 0.0)
        patch.setattr("shoestring.compression.calibration.latency.LEAST", 3)
        yield


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedWork]:
    """Everything that is timed is counted in operations instead."""
    clock = CountedWork()
    for module in ("calibration.latency", "exits.evidence"):
        monkeypatch.setattr(f"shoestring.compression.{module}.perf_counter", clock)
    monkeypatch.setattr("shoestring.compression.calibration.latency.effort", clock.effort)
    hook = register_module_forward_hook(clock.note)
    yield clock
    hook.remove()
