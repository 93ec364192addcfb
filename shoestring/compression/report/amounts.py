"""Texts of sizes, shares and times on a compressed model's page: decimal units, as in `--size 16MB`, and .998 for
0.998."""

from __future__ import annotations

import re
from math import floor, log10

from shoestring.core.units import seconds_text
from shoestring.show.page.render import NONE

UNITS = ("B", "kB", "MB", "GB", "TB")
SPACE = "\N{NO-BREAK SPACE}"
NEAREST = 1 - 1e-9  # a fidelity below 1 is never written as 1


def bare(text: str) -> str:
    """
    >>> bare("0.998"), bare("-0.5"), bare("10.5"), bare("1e-05")
    ('.998', '-.5', '10.5', '1e-5')
    """
    return re.sub(r"e([+-])0+", r"e\1", re.sub(r"^(-?)0\.", r"\1.", text))


def size_text(size: float | None) -> str:
    """Bytes in three digits, in units of a thousand.

    >>> [size_text(size).replace(SPACE, " ") for size in (512, 15.8e6, 90_912_000, 999_999, 4e30)]
    ['512 B', '15.8 MB', '90.9 MB', '1.00 MB', '4e+18 TB']
    """
    if size is None:
        return NONE
    unit = 0
    while abs(size) >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if not unit or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:,.{digits}f}{SPACE}{UNITS[unit]}" if abs(size) < 1e6 else f"{size:.3g}{SPACE}{UNITS[unit]}"


def asked_size_text(size: float) -> str:
    """A requested size, as the user would write it.

    >>> asked_size_text(16e6).replace(SPACE, " "), asked_size_text(13_500_000).replace(SPACE, " "), asked_size_text(600 << 20)[:7]
    ('16 MB', '13.5 MB', '629.146')
    """
    unit = 0
    while abs(size) >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.6g}{SPACE}{UNITS[unit]}"


def asked_share_text(share: float) -> str:
    """
    >>> asked_share_text(0.998), asked_share_text(1 - 0.002)
    ('.998', '.998')
    """
    return bare(f"{share:.9g}")


def share_text(share: float | None) -> str:
    """
    >>> share_text(0.00161), share_text(0.000012), share_text(0.0), share_text(None)
    ('.00161', '1.2e-5', '0', '–')
    """
    return NONE if share is None else bare(f"{share:.3g}")


def fidelity_text(fidelity: float | None) -> str:
    """A fidelity with enough digits to show two significant digits of its damage.

    >>> [fidelity_text(one) for one in (0.99841, 0.99964, 0.97, 1.0, 1 - 1e-12, -0.25, 1e30)]
    ['.9984', '.99964', '.9700', '1', '.999999999', '-.2500', '1e+30']
    """
    if fidelity is None:
        return NONE
    if fidelity >= 1 or fidelity <= -1:
        return bare(f"{fidelity:.6g}")
    fidelity = min(fidelity, NEAREST)
    return bare(f"{fidelity:.{min(9, max(4, 1 - floor(log10(1 - fidelity))))}f}")


def time_text(milliseconds: float | None) -> str:
    """
    >>> time_text(12.3).replace(SPACE, " "), time_text(1e300).replace(SPACE, " "), time_text(None)
    ('12.3 ms', '1e+297 s', '–')
    """
    if milliseconds is None:
        return NONE
    seconds = milliseconds / 1000
    return (seconds_text(seconds) if seconds < 1e9 else f"{seconds:.3g} s").replace(" ", SPACE)
