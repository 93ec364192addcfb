"""The time of a batch as a sum of its parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.serving.measuring.service_time import MeasuredBatch, ServiceTime, fit_service_time, relative_error

BATCHES = ((8,), (64,), (256,), (8, 8, 8, 8), (12, 30, 100), (64,) * 4, (20, 256), (5,) * 16)


@pytest.mark.parametrize("packed", [True, False])
def test_a_fit_finds_the_coefficients_that_made_the_measurements(packed: bool) -> None:
    real = ServiceTime(2e-3, 1e-4, 5e-5, 2e-8, packed)
    found = fit_service_time([MeasuredBatch(one, real.seconds(one)) for one in BATCHES], packed)
    assert found.coefficients == pytest.approx(real.coefficients, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=len(BATCHES), max_size=len(BATCHES)), st.booleans())
def test_no_batch_gets_faster_by_having_more_in_it_however_noisy_the_measurements(
    noise: list[float], packed: bool
) -> None:
    real = ServiceTime(2e-3, 1e-4, 5e-5, 2e-8, packed)
    found = fit_service_time(
        [MeasuredBatch(one, by * real.seconds(one)) for one, by in zip(BATCHES, noise, strict=True)], packed
    )
    assert min(found.coefficients) >= 0 and max(found.coefficients) > 0
    assert found.seconds((8, 8)) >= found.seconds((8,))


def test_noise_of_a_tenth_moves_predictions_by_less_than_that() -> None:
    real, generator = ServiceTime(2e-3, 1e-4, 5e-5, 2e-8, True), np.random.default_rng(0)
    measured = [
        MeasuredBatch(one, real.seconds(one) * float(generator.uniform(0.9, 1.1))) for one in BATCHES for _ in range(4)
    ]
    found = fit_service_time(measured, True)
    assert relative_error(found, [MeasuredBatch(one, real.seconds(one)) for one in ((40, 50), (100,), (9,) * 9)]) < 0.05
