from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.statistics.student import quantile, tails

# df -> two-sided 95 % and 99 %, as every table has them
TABLE = {
    1: (12.7062, 63.6567),
    2: (4.3027, 9.9248),
    5: (2.5706, 4.0321),
    9: (2.2622, 3.2498),
    29: (2.0452, 2.7564),
    120: (1.9799, 2.6174),
}


def test_quantiles_are_those_of_the_printed_tables() -> None:
    for df, (usual, strict) in TABLE.items():
        assert quantile(0.95, df) == pytest.approx(usual, abs=6e-5)
        assert quantile(0.99, df) == pytest.approx(strict, abs=6e-5)


def test_quantiles_and_tails_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 1.5, 2.7, 4, 10.3, 29, 57.9, 200, 5000, 1e6):
        for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1 - 1e-6):
            assert quantile(level, df) == pytest.approx(stats.t.ppf((1 + level) / 2, df), rel=1e-8)
        for t in (0.01, 0.5, 1.0, 2.0, 5.0, 30.0):
            assert tails(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-7, abs=1e-300)


@settings(max_examples=60, deadline=None)
@given(df=st.floats(1, 1e5), level=st.floats(0.01, 0.9999))
def test_a_quantile_leaves_in_its_tails_what_it_says(df: float, level: float) -> None:
    assert tails(quantile(level, df), df) == pytest.approx(1 - level, rel=1e-7)


def test_levels_and_degrees_that_make_no_sense_are_refused() -> None:
    for level, df in ((1.0, 5), (0.0, 5), (0.95, 0), (0.95, float("nan"))):
        with pytest.raises(Mistake):
            quantile(level, df)
