from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import from_json, to_json
from shoestring.federated.tasks.statistics.aggregates import (
    EDGES,
    ColumnMoments,
    Histogram,
    device_moments,
    one_value_histogram,
    sums_length,
    sums_of,
)
from shoestring.federated.tasks.statistics.totals import AFTER, DeviceTotals, MetricSums, Telemetry, sum_totals

numbers = st.floats(-100, 100)
devices = st.lists(st.tuples(st.floats(1, 50), numbers, numbers), min_size=1, max_size=12)


def told(weight: float, a: float, b: float, candidate: int = 0) -> DeviceTotals:
    entry = MetricSums(
        (candidate,), AFTER, "loss", device_moments(weight, [a, b]), one_value_histogram(a / weight, EDGES)
    )
    return DeviceTotals((entry,), Telemetry(1, 1, 2, 0.5, 10, 20, (("odd", 1),)), (1, 0))


@settings(max_examples=50, deadline=None)
@given(devices, st.randoms())
def test_the_order_in_which_devices_are_added_changes_only_rounding(
    values: list[tuple[float, float, float]], random: object
) -> None:
    one_by_one = sum_totals(told(*value) for value in values)
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    middle = len(values) // 2
    in_two = sum_totals(told(*value) for value in shuffled[:middle]).plus(
        sum_totals(told(*value) for value in shuffled[middle:])
    )
    (first,), (second,) = one_by_one.entries, in_two.entries
    scale = np.abs(sums_of(np.array([v[0] for v in values]), np.array([v[1:] for v in values]))).sum(0)
    assert np.all(np.abs(np.subtract(first.moments.sums, second.moments.sums)) <= 1e-13 * scale)
    assert first.histogram == second.histogram and one_by_one.failed == in_two.failed
    assert one_by_one.telemetry == in_two.telemetry
    assert first.moments.devices == len(values) == first.histogram.devices  # type: ignore[union-attr]


def test_sums_are_the_ten_that_a_person_would_write() -> None:
    w, a, b = np.array([2.0, 5.0, 1.0]), np.array([1.0, -4.0, 3.0]), np.array([6.0, 0.5, 2.0])
    found = sums_of(w, np.stack([a, b], axis=1)).sum(0)
    va, vb = a / w, b / w
    wanted = [
        3,
        w.sum(),
        (w**2).sum(),
        (w**3).sum(),
        va.sum(),
        vb.sum(),
        va @ va,
        va @ vb,
        vb @ vb,
        a.sum(),
        b.sum(),
        w @ a,
        w @ b,
        a @ a,
        a @ b,
        b @ b,
    ]
    assert found.tolist() == pytest.approx(wanted) and len(wanted) == sums_length(2)


def test_different_metrics_stay_apart() -> None:
    both = told(1.0, 2.0, 3.0, candidate=0).plus(told(1.0, 2.0, 3.0, candidate=1))
    assert [entry.moments.devices for entry in both.entries] == [1, 1]


def test_a_value_on_an_edge_belongs_to_the_bin_above_and_none_is_lost() -> None:
    edges = (0.0, 1.0)
    assert [one_value_histogram(value, edges).counts.index(1) for value in (-5.0, 0.0, 0.5, 1.0, 1e9)] == [
        0,
        1,
        1,
        2,
        2,
    ]


def test_histograms_and_sums_that_do_not_fit_are_refused() -> None:
    for wrong in (
        lambda: Histogram((1.0, 1.0), (0, 0, 0)),
        lambda: Histogram((), (1,)),
        lambda: Histogram((1.0,), (1,)),
        lambda: ColumnMoments(1, (1.0,)),
        lambda: one_value_histogram(1.0, (0.0,)).plus(one_value_histogram(1.0, (0.5,))),
    ):
        with pytest.raises(Mistake):
            wrong()


def test_what_a_device_tells_is_written_and_read_to_the_bit() -> None:
    whole = sum_totals([told(3.0, 0.1, 0.7), told(7.0, 1 / 3, 1e-9)])
    assert from_json(DeviceTotals, to_json(whole)) == whole
