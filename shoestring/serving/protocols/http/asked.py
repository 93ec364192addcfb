"""What the headers of a request ask for: how urgent it is, and until when its answer is wanted.

Priority: u=0 .. u=7         RFC 9218: 0 first, 7 last, 3 where nothing is said
X-Request-Timeout-Ms: 250    nobody waits longer
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from shoestring.serving.protocols.http.refusals import wrong

USUAL = 3
TIMEOUT = "x-request-timeout-ms"


@dataclass(frozen=True)
class AskedFor:
    urgency: int = 0  # the larger, the earlier
    within: float = inf  # seconds

    def and_also(self, other: AskedFor) -> AskedFor:
        """With what the body asks for, whose urgency holds if it says one."""
        return AskedFor(other.urgency or self.urgency, min(self.within, other.within))


def requirements_in(headers: Mapping[str, str], longest: float) -> AskedFor:
    """`longest`: seconds that the server keeps any request.

    >>> requirements_in({"priority": "u=1, i", "x-request-timeout-ms": "250"}, 60.0)
    AskedFor(urgency=2, within=0.25)
    >>> requirements_in({}, 60.0)
    AskedFor(urgency=0, within=60.0)
    """
    return AskedFor(urgency_of(headers.get("priority", "")), min(seconds_of(headers.get(TIMEOUT, "")), longest))


def urgency_of(written: str) -> int:
    """A header that can't be read is ignored, as RFC 9218 wants."""
    found = re.search(r"(?:^|[,\s])u=([0-7])(?=[,;\s]|$)", written)
    return USUAL - int(found[1]) if found else 0


def seconds_of(written: str) -> float:
    if not written:
        return inf
    try:
        found = float(written) / 1000
    except ValueError:
        found = math.nan
    if not 0 < found < inf:
        raise wrong(TIMEOUT, "give milliseconds above 0, such as 250")
    return found
