"""The gpt job on one piece of text again and again: so its loss tells after three steps whether it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

from shoestring import Job
from shoestring.data.feed import Feed
from shoestring.jobs import gpt


def job(width: int = 320, depth: int = 8, heads: int = 5, batch: int = 1, steps: int = 3, rate: float = 1e-3) -> Job:
    made = gpt.job(width, depth, heads, batch=batch, steps=steps, rate=rate)
    return replace(made, data=lambda: repeat(next(iter(Feed(made)))))
