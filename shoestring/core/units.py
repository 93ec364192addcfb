"""Sizes and times as people write them."""

from __future__ import annotations

import re
from math import ceil, floor, inf, log10

from shoestring.core.errors import Mistake

STEPS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1024,
    "MI": 1024**2,
    "GI": 1024**3,
    "TI": 1024**4,
}

MOST = 1 << 63  # bytes


def parse_bytes(text: str | int) -> int:
    """Bytes in a size such as 600MiB, 2GB or 1048576.

    >>> parse_bytes("600MiB"), parse_bytes("1.5 GB"), parse_bytes(7)
    (629145600, 1500000000, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text), re.IGNORECASE)
    if found is None or found[2].upper() not in STEPS:
        raise Mistake(f"{str(text)!r} is not a size: write a number and a unit, such as 600MiB, 2GB or 1048576")
    size = float(found[1]) * STEPS[found[2].upper()]
    if size >= MOST:
        raise Mistake(f"{str(text)[:40]!r} is more than any machine addresses: give a size such as 600MiB")
    if size < 1:
        raise Mistake(f"{str(text)!r} is no memory at all: give a size above zero, such as 600MiB")
    return int(size)


LEAST = 1 << 20  # bytes; every Python process is larger, so a smaller budget lacks its unit


def budget_bytes(written: str | int) -> int:
    """Bytes of a memory budget. One that lacks its unit is refused before anything is planned.

    >>> budget_bytes("600MiB")
    629145600
    """
    size = parse_bytes(written)
    if size < LEAST:
        bare = str(written).strip()
        meant = f"; did you mean {bare}MiB?" if bare.replace(".", "", 1).isdigit() else ": give a size such as 600MiB"
        raise Mistake(
            f"--memory {bare}: that is {bytes_text(size).replace(' B', ' bytes')}, and no process is that small{meant}"
        )
    return size


def parse_seconds(text: str) -> float:
    """Seconds in a time such as 5ms, 90s, 5m or 1h.

    >>> parse_seconds("90s"), parse_seconds("1.5m"), parse_seconds("5ms")
    (90.0, 90.0, 0.005)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)\s*", text)
    if found is None or not 0 < float(found[1]) < inf:
        raise Mistake(f"{text[:40]!r} is not a time: write a number and a unit, such as 5ms, 90s, 5m or 1h")
    return float(found[1]) * {"us": 1e-6, "ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]


def bytes_text(size: float, up: bool = False) -> str:
    """A size for people, in binary units. `up`: never a smaller size, so that it can be given as a limit.

    >>> bytes_text(629145600), bytes_text(512), bytes_text(-2048), bytes_text(2049), bytes_text(2049, up=True)
    ('600 MiB', '512 B', '-2.00 KiB', '2.00 KiB', '2.01 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    size = ceil(size * 10**digits) / 10**digits if up else size
    return f"{size:,.{digits}f} {unit}"


DECIMAL = "decimal bytes"  # unit of sizes on disk and in downloads, which are written as 16MB


def decimal_text(size: float, up: bool = False) -> str:
    """The same in units of a thousand, of which 115 kB never becomes 112 KiB beside it.

    >>> decimal_text(15_800_000), decimal_text(512), decimal_text(999_999), decimal_text(2001, up=True)
    ('15.8 MB', '512 B', '1.00 MB', '2.01 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5 or unit == "GB":
            break
        size /= 1000
    digits = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    size = ceil(size * 10**digits) / 10**digits if up else size
    return f"{size:,.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time for people.

    >>> seconds_text(0.0123), seconds_text(3.21), seconds_text(200)
    ('12.3 ms', '3.21 s', '3 min 20 s')
    """
    if seconds < 0.9995:  # what would be shown as 1000 ms is 1 s
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def about(seconds: float) -> str:
    """An approximate time, as one would say it.

    >>> about(0.2), about(47.3), about(200), about(5000)
    ('1 s', '48 s', '3 min', '1 h 23 min')
    """
    if seconds < 90:
        return f"{max(1, int(seconds + 0.999))} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60} min"
        if minutes < 2880
        else f"{minutes // 1440} days"
    )


def unit_text(value: float, unit: str) -> str:
    """A number with its unit, for people.

    >>> unit_text(2048, "bytes"), unit_text(0.5, "seconds"), unit_text(0.998, "share"), unit_text(1200, "requests/s"), unit_text(3, "")
    ('2.00 KiB', '500 ms', '99.8 %', '1,200 requests/s', '3')
    >>> unit_text(4561.34, "requests/s")
    '4,561 requests/s'
    """
    if unit == "bytes":
        return bytes_text(value)
    if unit == DECIMAL:
        return decimal_text(value)
    if unit == "seconds":
        return seconds_text(value)
    if unit == "share":
        return f"{100 * value:.4g} %"
    return f"{round(value) if unit and value >= 1000 else value:,.6g} {unit}".strip()


DIGITS = 15  # most behind the point


def limit_text(value: float, unit: str, least: bool = False) -> str:
    """The same, rounded to the side on which the number keeps it as an upper limit, or as the `least` that is allowed.

    >>> limit_text(2049, "bytes"), limit_text(0.0012341, "seconds"), limit_text(0.99998708, "share", least=True)
    ('2.01 KiB', '1.24 ms', '99.9987 %')
    >>> limit_text(1.0, "share", least=True), limit_text(0.5, "share", least=True), limit_text(1234567.8, "")
    ('100 %', '50 %', '1.23457e+06')
    """
    if unit in ("bytes", DECIMAL):
        return (bytes_text if unit == "bytes" else decimal_text)(value, up=True)
    if unit == "seconds" and 0 < value < 100:
        digits = min(2 - floor(log10(value)), DIGITS)
        return seconds_text(ceil(value * 10**digits) / 10**digits)
    if unit == "seconds" and 100 <= value < inf:  # shown in seconds, after an hour in minutes
        return seconds_text(ceil(value) if ceil(value) < 3600 else 60 * ceil(value / 60))
    if unit == "share" and least and 0 < value < 1:
        digits = min(2 - floor(log10(min(value, 1 - value))), DIGITS)
        return f"{100 * floor(value * 10**digits) / 10**digits:.12g} %"
    return unit_text(value, unit)
