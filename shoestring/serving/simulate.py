"""What requests will have to wait, before there is a server: its queue, simulated with the policy that the server runs.

Requests arrive at random (Poisson) at a rate, with lengths that are drawn from those of the job. A replica that is free takes the
next batch; a batch takes what `ServiceTime` says. A percentile is read off the simulated waits.

    capacity    requests per second of replicas that are never idle: what they compute when there is always enough to choose from
    most rate   the highest rate at which a percentile of the waits is within a target; found by bisection
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from shoestring.serving.batching.policy import SKIPPED, Batching, choose_batch
from shoestring.serving.measuring.service_time import ServiceTime

REQUESTS = 2000  # simulated: a 99th percentile rests on 20 of them
WARM = 0.1  # fraction of them, at the beginning, that finds the queue emptier than it will be
AHEAD = 2 * SKIPPED  # of the oldest waiting that a batch is chosen from
HALVINGS = 8  # of the interval in which the highest rate is
SEED = 20260101


@dataclass(frozen=True)
class Servers:
    """Replicas and how they are fed."""

    time: ServiceTime
    batching: Batching
    replicas: int = 1
    overhead: float = 0.0  # seconds that a request spends outside of the queue and the replica


def waits(servers: Servers, lengths: Sequence[int], rate: float, requests: int = REQUESTS) -> np.ndarray:
    """Seconds from the arrival of each request to its answer."""
    arrivals, drawn = requests_at(lengths, rate, requests)
    found: np.ndarray = answer_times(servers, arrivals, drawn) - arrivals + servers.overhead
    return found


def answer_times(servers: Servers, arrivals: Sequence[float], lengths: Sequence[int]) -> np.ndarray:
    """When each request is answered."""
    done = np.zeros(len(arrivals))
    for batch, end in batches(servers, arrivals, lengths):
        done[batch] = end
    return done


def batches(servers: Servers, arrivals: Sequence[float], lengths: Sequence[int]) -> Iterator[tuple[list[int], float]]:
    """The batches in the order in which they begin, each with the time at which it ends."""
    free = [0.0] * servers.replicas  # when each replica is
    waiting: list[int] = []  # in order of arrival
    come = 0
    while come < len(arrivals) or waiting:
        now = max(heapq.heappop(free), arrivals[waiting[0] if waiting else come])
        while come < len(arrivals) and arrivals[come] <= now:
            waiting.append(come)
            come += 1
        places = choose_batch([lengths[one] for one in waiting[:AHEAD]], servers.batching)
        batch = [waiting[place] for place in places]
        for place in reversed(places):
            del waiting[place]
        end = now + servers.time.seconds([lengths[one] for one in batch])
        heapq.heappush(free, end)
        yield batch, end


def keeps(servers: Servers, lengths: Sequence[int], rate: float, target: float, share: float) -> bool:
    """Whether this share of the waits is within a target. It ends as soon as too many were not."""
    arrivals, drawn = requests_at(lengths, rate, REQUESTS)
    first = int(WARM * REQUESTS)
    last = REQUESTS - first - 1
    allowed = last - ceil(share * last)  # as `percentile` counts
    late = 0
    for batch, end in batches(servers, arrivals, drawn):
        late += sum(one >= first and end - arrivals[one] + servers.overhead > target for one in batch)
        if late > allowed:
            return False
    return True


def requests_at(lengths: Sequence[int], rate: float, count: int) -> tuple[list[float], list[int]]:
    """Arrivals and lengths: the same draws for every rate, so that two deployments face the same requests."""
    generator = np.random.default_rng(SEED)
    arrivals = np.cumsum(generator.exponential(1 / rate, count))
    return arrivals.tolist(), generator.choice(np.asarray(lengths), count).tolist()


def percentile(found: np.ndarray, share: float) -> float:
    """A percentile of waits, after the first of them."""
    return float(np.quantile(found[int(WARM * len(found)) :], share, method="higher"))


def capacity(servers: Servers, lengths: Sequence[int], requests: int = 500) -> float:
    """Requests per second if all are there at once.

    >>> alone = Servers(ServiceTime(0.1, 0.0, 0.0, 0.0, packed=True), Batching(tokens=1))
    >>> round(capacity(alone, [5]), 6)
    10.0
    """
    drawn = np.random.default_rng(SEED).choice(np.asarray(lengths), requests)
    return requests / float(answer_times(servers, [0.0] * requests, drawn.tolist()).max())


@lru_cache(maxsize=4096)
def most_rate(servers: Servers, lengths: tuple[int, ...], target: float, share: float) -> float:
    """The highest rate at which this share of the waits is within the target; 0 if a request alone takes longer."""
    top = capacity(servers, lengths)
    low, high = 0.0, 1.0  # as shares of the capacity
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        kept = keeps(servers, lengths, middle * top, target, share)
        low, high = (middle, high) if kept else (low, middle)
    return low * top
