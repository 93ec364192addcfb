"""JSON from files that may come from anybody: what would take gigabytes once it is read is refused.

An empty list has three bytes as text and some eighty in memory, so the number of values is limited, not only of bytes.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST = 1 << 23  # values, of which each takes up to about 150 bytes


def parse_json(data: bytes, **how: Any) -> Any:
    """A JSON document; `how` is passed to `json.loads`. Raises ValueError if it is none, has too many values, or is nested
    too deeply.

    >>> parse_json(b'{"steps": 4}')
    {'steps': 4}
    >>> parse_json(b"[" * 9999)
    Traceback (most recent call last):
    ValueError: its JSON is nested too deeply
    """
    if sum(map(data.count, (b"[", b"{", b","))) > MOST:
        raise ValueError(f"its JSON has more than {MOST:,} values")
    try:
        return json.loads(data, **how)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
