"""Ranks of factorizations for a given share of a layer's parameters."""

from __future__ import annotations

from math import prod, sqrt


def linear_rank(inputs: int, outputs: int, share: float) -> int:
    """The largest r with r (in + out) <= share in out; 0 if not even rank 1 fits.

    >>> linear_rank(384, 384, 0.5), linear_rank(384, 1536, 0.5), linear_rank(3, 1, 0.5)
    (96, 153, 0)
    """
    return int(share * inputs * outputs / (inputs + outputs) + 1e-9)


def tucker_ranks(inputs: int, outputs: int, pixels: int, share: float) -> tuple[int, int]:
    """Ranks (p of out, q of in), both the same fraction of their channels: the largest fraction f with

        f out out + f^2 in out pixels + f in in <= share in out pixels

    >>> tucker_ranks(64, 128, 9, 0.25)
    (48, 24)
    """
    linear, square = outputs * outputs + inputs * inputs, inputs * outputs * pixels
    part = (sqrt(linear * linear + 4 * square * square * share) - linear) / (2 * square)
    return int(part * outputs + 1e-9), int(part * inputs + 1e-9)


def tucker_numbers(inputs: int, outputs: int, pixels: int, ranks: tuple[int, int]) -> int:
    return ranks[0] * outputs + ranks[0] * ranks[1] * pixels + ranks[1] * inputs


def train_numbers(rows: tuple[int, int, int], columns: tuple[int, int, int], ranks: tuple[int, int]) -> int:
    return (
        rows[0] * columns[0] * ranks[0] + ranks[0] * rows[1] * columns[1] * ranks[1] + ranks[1] * rows[2] * columns[2]
    )


def train_ranks(rows: tuple[int, int, int], columns: tuple[int, int, int], most: int) -> tuple[int, int]:
    """The largest ranks whose cores have at most `most` parameters; both are equal unless one reaches its maximum.

    >>> train_ranks((32, 31, 31), (8, 6, 8), 5_860_000)
    (176, 176)
    """
    first, last = rows[0] * columns[0], rows[2] * columns[2]
    low, high = 0, max(first, last)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if train_numbers(rows, columns, (min(middle, first), min(middle, last))) <= most
            else (low, middle - 1)
        )
    return min(low, first), min(low, last)


def three_factors(number: int) -> tuple[int, int, int]:
    """Three factors with exactly this product, as equal as possible; the middle one, which multiplies both ranks, is
    the smallest.

    >>> three_factors(384), three_factors(7)
    ((8, 6, 8), (1, 1, 7))
    """
    found = [
        (a, b, number // (a * b))
        for a in range(1, round(number ** (1 / 3)) + 1)
        if number % a == 0
        for b in range(a, int(sqrt(number // a)) + 1)
        if number // a % b == 0
    ]
    least, middle, largest = min(found, key=sum)
    return (middle, least, largest)


def three_factors_at_least(number: int) -> tuple[int, int, int]:
    """Three nearly equal factors whose product is at least this number, and only slightly more.

    >>> three_factors_at_least(30522), prod(three_factors_at_least(30522))
    ((31, 29, 34), 30566)
    """
    root = max(1, int(number ** (1 / 3)))
    tried = [(a, b, -(-number // (a * b))) for a in range(root, root + 3) for b in range(max(1, root - 2), root + 3)]
    return min((one for one in tried if max(one) <= 2 * root + 2), key=lambda one: (prod(one), max(one)))
