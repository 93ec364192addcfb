from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.privacy.release import OTHERS, ReleasedTotals, TooFew, join_bins, release_totals
from shoestring.federated.tasks.statistics.aggregates import EDGES, Histogram, device_moments, one_value_histogram
from shoestring.federated.tasks.statistics.estimates import by_device, by_sample
from shoestring.federated.tasks.statistics.totals import AFTER, DeviceTotals, MetricSums, Telemetry, sum_totals


def told(value: float, weight: float = 4.0, metrics: tuple[str, ...] = ("loss",)) -> DeviceTotals:
    entries = tuple(
        MetricSums((0,), AFTER, name, device_moments(weight, [value * weight]), one_value_histogram(value, EDGES))
        for name in metrics
    )
    return DeviceTotals(entries, Telemetry(1, 1))


def groups_of(sizes: dict[str, int]) -> dict[str, DeviceTotals]:
    return {name: sum_totals(told(0.01 * number) for number in range(size)) for name, size in sizes.items()}


def counts(seen: ReleasedTotals) -> dict[str, int]:
    return {name: totals.entries[0].moments.devices for name, totals in seen.groups.items()}


def test_nothing_is_told_about_fewer_devices_than_the_least() -> None:
    with pytest.raises(TooFew, match="9 devices answered, and results are released for at least 10"):
        release_totals(groups_of({"": 9}))
    assert release_totals(groups_of({"": 10})).whole.entries[0].moments.devices == 10


def test_one_device_can_never_be_asked_for() -> None:
    with pytest.raises(Mistake, match="a single device's result would be released"):
        release_totals(groups_of({"": 50}), least=1)


def test_small_groups_are_put_together() -> None:
    seen = release_totals(groups_of({"a": 30, "b": 4, "c": 7, "d": 25}))
    assert counts(seen) == {"a": 30, "d": 25, OTHERS: 11}
    assert "2 groups have fewer than 10 devices" in seen.withheld[0]


def test_a_small_group_is_not_what_is_left_of_the_whole() -> None:
    """Were b only left out, whole - a - c would be the sums of its 3 devices."""
    assert counts(release_totals(groups_of({"a": 30, "b": 3, "c": 12}))) == {"a": 30, OTHERS: 15}


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 25), min_size=1), st.integers(2, 12), st.data())
def test_every_number_and_every_difference_to_the_whole_is_about_enough_devices(
    sizes: dict[str, int], least: int, data: st.DataObject
) -> None:
    if sum(sizes.values()) < least:
        return
    seen = release_totals(groups_of(sizes), least)
    found = counts(seen)
    assert all(count >= least for count in found.values()) and len(found) != 1
    assert sum(found.values()) in (0, sum(sizes.values()))
    named = data.draw(st.sets(st.sampled_from(sorted(found)))) if found else set()
    left = sum(sizes.values()) - sum(found[name] for name in named)
    assert left == 0 or left >= least
    for totals in (seen.whole, *seen.groups.values()):
        histogram = totals.entries[0].histogram
        assert histogram is None or min(histogram.counts) >= least


def test_a_metric_that_few_devices_measured_is_withheld_everywhere() -> None:
    rare = {
        name: sum_totals([*(told(0.1) for _ in range(20)), *(told(0.1, metrics=("rare",)) for _ in range(3))])
        for name in "ab"
    }
    seen = release_totals(rare)
    assert {entry.metric for totals in (seen.whole, *seen.groups.values()) for entry in totals.entries} == {"loss"}
    assert seen.withheld == ("1 metric: measured by fewer than 10 devices",)


def test_a_group_in_which_few_devices_measured_a_metric_is_put_together_with_another() -> None:
    both = ("loss", "rare")
    by_group = {
        "a": sum_totals([told(0.1, metrics=both) for _ in range(20)]),
        "b": sum_totals([told(0.1, metrics=both) for _ in range(15)]),
        "c": sum_totals([*(told(0.1) for _ in range(30)), told(0.2, metrics=both)]),
    }
    found = {
        name: {entry.metric: entry.moments.devices for entry in totals.entries}
        for name, totals in release_totals(by_group).groups.items()
    }
    assert found == {"a": {"loss": 20, "rare": 20}, OTHERS: {"loss": 46, "rare": 16}}


def test_a_device_with_most_of_the_samples_is_not_what_the_mean_over_samples_is() -> None:
    seen = release_totals({"": sum_totals([told(0.7, weight=1000.0), *(told(0.1, weight=1.0) for _ in range(19))])})
    sums = np.asarray(seen.whole.entries[0].moments.sums)
    assert np.isnan(by_sample(sums, 1).mean).all() and by_device(sums, 1).mean[0] == pytest.approx((0.7 + 1.9) / 20)
    assert seen.withheld == ("loss over samples: one device may have more than half of them",)


def test_a_group_that_one_device_dominates_is_not_what_is_left_of_the_whole() -> None:
    even = sum_totals(told(0.1, weight=30.0) for _ in range(30))
    seen = release_totals(
        {"a": even, "b": even, "c": sum_totals([told(0.7, weight=300.0), *(told(0.1, weight=1.0) for _ in range(19))])}
    )
    assert all(np.isnan(totals.entries[0].moments.sums[1]) for totals in seen.groups.values())
    assert not np.isnan(seen.whole.entries[0].moments.sums[1])
    assert seen.withheld == ("loss over samples of groups: one device may have more than half of them",)


def test_a_group_tells_nothing_of_its_errors() -> None:
    by_group = groups_of({"a": 20, "b": 20})
    by_group["a"] = by_group["a"].plus(DeviceTotals((), Telemetry(1, 0, errors=(("odd", 1),)), (1,)))
    seen = release_totals(by_group)
    assert (
        seen.whole.telemetry.errors == (("odd", 1),)
        and not seen.groups["a"].telemetry.errors
        and not seen.groups["a"].failed
    )


def test_bins_that_can_not_be_told_are_left_out() -> None:
    assert join_bins(Histogram((0.0, 1.0), (5, 4, 3)), 10) is None
    assert join_bins(Histogram((0.0, 1.0), (0, 20, 0)), 10) is None  # all in one bin: the edges would say nothing
    assert join_bins(Histogram((0.0, 1.0), (10, 10, 10)), 10) == Histogram((0.0, 1.0), (10, 10, 10))
