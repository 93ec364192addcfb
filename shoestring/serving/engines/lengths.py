"""How many positions an inner tensor or an output has, by the length of the sample: the same number for most models, a
few more where a model adds positions, fewer behind convolutions with strides.

    positions(length) = (length + offset) // stride

Convolutions and poolings without padding at a changing place compose to this form: floor((floor((l + a) / s) + b) / t) =
floor((l + a + b s) / (s t)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

PROBES = 40  # most lengths that are tried to tell rules apart


@dataclass(frozen=True)
class LengthRule:
    stride: int = 1
    offset: int = 0

    def __call__(self, length: int) -> int:
        """
        >>> LengthRule()(7), LengthRule(offset=1)(7), LengthRule(320, -80)(16000)
        (7, 8, 49)
        """
        return (length + self.offset) // self.stride


def rules_for(seen: Mapping[int, int]) -> list[LengthRule]:
    """All rules that hold for these lengths; of a stride, the smallest and the largest offset.

    >>> rules_for({1: 1, 2: 2, 5: 5})
    [LengthRule(stride=1, offset=0)]
    """
    found = []
    for stride in range(1, max(seen) + 1):
        least = max(size * stride - length for length, size in seen.items())
        most = min((size + 1) * stride - 1 - length for length, size in seen.items())
        if least <= most:
            found += [LengthRule(stride, offset) for offset in sorted({least, most})]
    return found


def length_rule(size_at: Callable[[int], int], seen: Mapping[int, int], longest: int) -> LengthRule | None:
    """The rule by which sizes follow lengths up to the longest, None if none does. `size_at` is asked where rules that
    are left disagree, until one is left."""
    known = dict(seen)
    for _ in range(PROBES):
        rules = rules_for(known)
        if not rules:
            return None
        sizes = torch.arange(min(known), longest + 1)
        values = [(sizes + rule.offset) // rule.stride for rule in rules]
        places = [place for one in values[1:] for place in [(one != values[0]).nonzero()] if len(place)]
        if not places:
            return rules[0]
        apart = int(sizes[places[-1][len(places[-1]) // 2]])
        known[apart] = size_at(apart)
    return None
