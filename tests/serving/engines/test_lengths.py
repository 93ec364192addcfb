"""A rule is found by asking for few lengths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.serving.engines.lengths import LengthRule, length_rule


@settings(max_examples=25)
@given(stride=st.integers(1, 40), offset=st.integers(-60, 10))
def test_the_rule_holds_for_every_length(stride: int, offset: int) -> None:
    rule, shortest = LengthRule(stride, offset), max(stride - offset, 1)
    longest = shortest + 20 * stride
    asked = {length: rule(length) for length in (shortest, (shortest + longest) // 2, longest)}

    def size(length: int) -> int:
        asked[length] = rule(length)
        return rule(length)

    found = length_rule(size, dict(asked), longest)
    assert found is not None and len(asked) <= 40
    assert all(found(length) == rule(length) for length in range(shortest, longest + 1))


def test_what_follows_no_rule_has_none() -> None:
    assert length_rule(lambda length: length * length, {3: 9, 5: 25}, 9) is None
