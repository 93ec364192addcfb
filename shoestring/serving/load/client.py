"""Sends requests when they are due, however many are still without an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from shoestring.serving.load.outcome import LoadAnswer

PATIENCE = 60.0  # seconds after which a request counts as failed


@dataclass(frozen=True)
class LoadTarget:
    """Where requests go."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False  # believe any certificate


async def send_all(
    target: LoadTarget,
    bodies: Sequence[bytes],
    due: Sequence[float],
    connections: int,
    told: Callable[[LoadAnswer], None] = lambda answer: None,
) -> list[LoadAnswer]:
    """The answers to bodies, one after the other and again from the first, each sent when it is due."""
    connector = aiohttp.TCPConnector(limit=connections, ssl=not target.insecure)
    patience = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=connector, timeout=patience, headers=dict(target.headers)) as session:
        began = time.perf_counter()

        async def one(at: float, body: bytes) -> LoadAnswer:
            await asyncio.sleep(max(began + at - time.perf_counter(), 0))
            status, error = 0, ""
            try:
                async with session.post(target.url, data=body) as answer:
                    await answer.read()
                    status = answer.status
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error = type(failure).__name__
            found = LoadAnswer(at, time.perf_counter() - began, status, error)
            told(found)
            return found

        return await asyncio.gather(*(one(at, bodies[place % len(bodies)]) for place, at in enumerate(due)))
