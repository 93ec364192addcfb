"""What is served under a name: how to load it, how many replicas, how batches are made, and what is promised."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.serving.batching.admission import Admission, AffineTime
from shoestring.serving.batching.policy import Batching
from shoestring.serving.engines.engine import ServingEngine


@dataclass(frozen=True, eq=False)
class ModelSpec:
    load: Callable[..., ServingEngine]  # a function of a module; called in the model process, with `arguments`
    batching: Batching
    arguments: Mapping[str, Any] = field(default_factory=dict)  # what JSON can carry
    replicas: int = 1
    answer: Callable[..., Any] | None = None  # the job's
    time: AffineTime | None = None  # seconds of a batch; None: unknown, and nobody is refused for them
    target: float = inf  # seconds in which requests are to be answered
    margin: float = 0.9  # of the target that admission plans with
    most_rows: int = 10_000  # samples that may wait
    memory: int = 0  # bytes that it takes; 0: found when it is loaded
    pinned: bool = False  # it is never evicted
    version: str = "1"
    environment: Mapping[str, str] = field(default_factory=dict)  # of the model process and its replicas
    load_seconds: float = 600.0  # after which loading has failed
    batch_seconds: float = 60.0  # after which a replica hangs, and is killed

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise Mistake(f"replicas={self.replicas} of a served model: give 1 or more")
        self.load_message  # noqa: B018, raises a mistake in it now

    @property
    def admission(self) -> Admission:
        return Admission(self.batching, self.time, self.target, self.margin, self.most_rows)

    @property
    def load_message(self) -> bytes:
        """What the model process is told to load."""
        name = f"{self.load.__module__}:{self.load.__qualname__}"
        try:
            found: Any = reduce(getattr, self.load.__qualname__.split("."), sys.modules[self.load.__module__])
        except (KeyError, AttributeError):
            found = None
        if found is not self.load or self.load.__module__ == "__main__":
            raise Mistake(
                f"{name} loads a served model, and another process can't import it: define it at the top of a module"
            )
        try:
            return json.dumps({"load": name, "arguments": dict(self.arguments)}).encode()
        except (TypeError, ValueError) as error:
            raise Mistake(
                f"the arguments of {name} are sent to another process as JSON, and can't be ({error})"
            ) from error
