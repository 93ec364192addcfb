"""The clients of a job: its own mapping, or made from its data by a partition rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from shoestring.core.clients.clients import Clients, ClientSubset, Named
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.data.kinds import is_listed, is_mapped
from shoestring.data.partition import permutation

CALLS_USER = "clients"  # core/user_code/seams.py

USUAL_COUNT = 100  # number of clients, if neither the user nor the data say


def clients_of(job: Job, count: int | None, seed: int) -> Clients:
    """The clients of a job: its own, or those that its rule makes from its data; `count` of them, or as many as it has.

    If it has more than `count`, the first ones in a random order from the seed are taken.
    """
    if count is not None and count < 1:
        raise Mistake(f"--clients {count}: give 1 or more")
    rule: Any = job.clients
    if rule is None:
        raise Mistake(
            "the job has no clients, so there are no devices that could train it: add clients=lambda: {name: records, ...} to "
            "the Job, or a rule that divides its data, such as clients=Dirichlet(0.3) or clients=Iid()"
        )
    if isinstance(rule, type) and callable(getattr(rule, "clients", None)):
        raise Mistake(
            f"clients in the Job is the class {rule.__name__}: a rule is needed; write clients={rule.__name__}(...)"
        )
    if not is_rule(rule) and not callable(rule):
        raise Mistake(
            f"clients in the Job is a {type(rule).__name__}: a function that makes a mapping is needed, or a rule; "
            f"write clients=lambda: {{name: records, ...}}"
        )
    found = clients_by_rule(job, rule, count, seed) if is_rule(rule) else rule()
    if not isinstance(found, Mapping):
        raise Mistake(
            f"the job's clients gave a {type(found).__name__}: a mapping is needed, device's name -> its records; "
            f"write clients=lambda: {{name: records, ...}}"
        )
    if not len(found):
        raise Mistake("the job's clients are none: a federated job needs at least one device with records")
    everybody = found if isinstance(found, Clients) else clients_from_mapping(found)
    return everybody if count is None or count == len(everybody) else sample_clients(everybody, count, seed)


def is_rule(given: object) -> bool:
    """Whether a Job's clients are a rule; its class tells, because the attributes of a function object may do anything."""
    return hasattr(type(given), "clients")


def clients_by_rule(job: Job, rule: Any, count: int | None, seed: int) -> Any:
    data = job.data()
    if is_listed(data) and job.collate is None:
        raise Mistake(
            f"the job's data are a {type(data).__name__} without collate, which contains batches, and its clients a rule ({rule}) that "
            f"divides samples: add collate=torch.utils.data.default_collate to the Job if they are samples, or give a map-style data set "
            f"or clients=lambda: {{name: records, ...}}"
        )
    if not (is_listed(data) or is_mapped(data)) or isinstance(data, IterableDataset):
        raise Mistake(
            f"the job's data are a {type(data).__name__}, and its clients a rule ({rule}) that divides a data set: give a "
            f"map-style data set (samples by number, with a length), or clients=lambda: {{name: records, ...}}"
        )
    if not len(data):
        raise Mistake("the job's data set has no samples: there is nothing to divide among clients")
    return rule.clients(data, count or min(USUAL_COUNT, len(data)), seed)


def clients_from_mapping(found: Mapping[Any, Any]) -> Clients:
    """Clients from a user's mapping; names are converted to text."""
    keys = tuple(found)
    names = tuple(map(str, keys))
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise Mistake(
            f"two of the job's clients have the name {twice!r} when it is written down: give each a name of its own"
        )
    return Named(names, lambda number: found[keys[number]])


def sample_clients(everybody: Clients, count: int, seed: int) -> Clients:
    if count > len(everybody):
        raise Mistake(
            f"--clients {count:,}, and the job has {len(everybody):,}: give {len(everybody):,} or fewer, or leave it out"
        )
    return ClientSubset(everybody, permutation(len(everybody), seed)[:count].sort().values)
