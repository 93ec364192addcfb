"""The state of a run: what must survive a restart, in classes that inherit from `RunState`.

A state that can do more inherits from other classes here as well; no code looks for attributes by name
(tests/core/running/test_run.py).

Techniques that divide the optimizer's state are undone one after the other: `whole_optimizer` joins what the next
applied technique returns, and `own_optimizer` cuts it again on the way back, so that Pipeline, TensorParallel and Shard
need not know of each other (tests/training/tensor/test_sliced_stages.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoestring.core.workers.staging import OwnTimes


class RunState:
    """Base class for a part of a run that has state."""

    of_technique: ClassVar[bool] = True  # made by a technique, so the report shows its state

    def state_dict(self) -> dict[str, Any]:
        """Its state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""

    @property
    def remark(self) -> str:
        """A remark for the user."""
        return ""


@runtime_checkable
class StoredTensor(Protocol):
    """A weight that is not in memory: on disk, or in parts on several workers."""

    dtype: torch.dtype
    shape: torch.Size

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order, some at a time; all workers that hold parts must read it together."""
        ...


class KeepsWeights(ABC):
    """Stores weights of the model elsewhere."""

    @property
    @abstractmethod
    def weights_elsewhere(self) -> Mapping[str, StoredTensor]:
        """Those weights, by name."""

    def guarding(self) -> AbstractContextManager[object]:
        """While inside, refuse code of the job that is called outside of a step and uses a weight that is not here."""
        return nullcontext()


class DividesOptimizer(ABC):
    """Gives this worker a part of the optimizer's state."""

    @abstractmethod
    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        """The state of all weights, from this worker's. Parts are called from the last applied to the first, so that
        the first returns what one process would have."""

    @abstractmethod
    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any] | None:
        """The inverse, called from the first applied to the last: this worker's part of a whole state. None: it has
        none."""


class TrainsBeside(ABC):
    """Has weights that are trained beside the model's, without which a run can't be resumed."""

    @abstractmethod
    def merge(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's weights by name, merged with what it trains beside them."""

    @abstractmethod
    def digest_state(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """State included in the trained model's SHA-256."""

    @abstractmethod
    def finish(self) -> None:
        """The run is over and the model's weights are in memory: merge what it trained beside them into them."""


class KeepsAverages(ABC):
    @property
    @abstractmethod
    def averages(self) -> Mapping[str, Tensor]:
        """Averages over the steps that replace weights in exports, by name. Its state has them as "averages" too, each
        once."""


class RecordsTimes(ABC):
    @property
    @abstractmethod
    def own_times(self) -> OwnTimes | None:
        """This worker's actions in the last step, with their times."""


class MovesBytes(ABC):
    @property
    @abstractmethod
    def bytes_moved(self) -> int:
        """Bytes that it has moved to and from the disk so far."""


class LivesOnDisk(RunState, MovesBytes):
    """Run state in a file that only it can read; a checkpoint says what lies where in it."""

    @abstractmethod
    def note_saved(self) -> None:
        """A checkpoint that includes its state is safe on disk. Called before the next step."""

    @property
    @abstractmethod
    def bytes_stored(self) -> int:
        """Bytes that it stores on the disk."""

    @property
    @abstractmethod
    def buffers(self) -> Sequence[Tensor]:
        """Its buffers for reading and writing."""
