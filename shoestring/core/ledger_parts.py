"""The parts of a ledger: small values of one idea each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class StandingBytes:
    """Bytes of tensors that are there for the whole step."""

    parameters: float = 0.0
    buffers: float = 0.0
    inputs: float = 0.0
    optimizer: float = 0.0
    constants: float = 0.0  # that the job's functions and its data hold: a teacher, a data set in memory
    gradients: float = 0.0  # of accumulated ones; others come and go with their blocks

    @property
    def total(self) -> float:
        return self.parameters + self.buffers + self.inputs + self.optimizer + self.constants + self.gradients


@dataclass(frozen=True)
class UpdateCost:
    """What the optimizer's update of all weights takes, at the end of a step."""

    seconds: float = 0.0
    rise: float = 0.0  # bytes of tensors above the start of it at its highest point
    scratch: float = 0.0  # bytes that kernels take for themselves there
    fused_seconds: float | None = None  # seconds with fused kernels, where they were timed
    call_seconds: float = 0.0  # seconds more if the optimizer is called for every weight alone


@dataclass(frozen=True)
class Splitting:
    """What running the batch in pieces costs."""

    paces: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (n, time in n pieces / time in one), by rising n
    adding_seconds: float = 0.0  # seconds of adding all gradients to those of an earlier piece


@dataclass(frozen=True)
class Traffic:
    """What a step moves to and from disk or other workers."""

    disk: float = 0.0  # bytes written and read
    disk_seconds: float = 0.0  # that the disk takes for it at its measured speed, hidden behind compute or not
    sent: float = 0.0  # bytes that a worker sends to others
    waiting: float = 0.0  # seconds in which the step waits for the disk or a link

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(
            self.disk + more.disk,
            self.disk_seconds + more.disk_seconds,
            self.sent + more.sent,
            self.waiting + more.waiting,
        )


@dataclass(frozen=True)
class ValidationCost:
    """What one validation takes, between two steps."""

    rise: float = 0.0  # bytes of tensors at its highest point above what stands, gradients aside
    scratch: float = 0.0  # bytes that kernels take for themselves there
    seconds: float = 0.0  # of all held-out batches
    batches: float = 1.0  # of the size of the largest, that they are


@dataclass(frozen=True)
class Machine:
    """What the machine charges for moving bytes."""

    per_byte_spilled: float = 0.0  # seconds per byte written to or read from disk,
    per_byte_streamed: float = 0.0  # the same by direct I/O,
    per_byte_moved: float = 0.0  # and seconds of a core that direct I/O takes per byte
    cores: int = 1  # that compute and copying share


@dataclass(frozen=True)
class AllocatorRates:
    """What an allocator takes."""

    slack: float = 0.0  # bytes that it rounds up per byte of tensors
    retention: float = 0.0  # bytes that it keeps back per byte allocated
    per_byte_allocated: float = 0.0  # seconds per byte allocated, above those of the default allocator


@dataclass(frozen=True)
class Allocation:
    """What the process takes beside its tensors."""

    base: float = 0.0  # bytes of the process before any tensor
    allocated: float = 0.0  # bytes of all tensors that a step allocates, freed or not
    rates: AllocatorRates = field(default_factory=AllocatorRates)  # of the allocator in use
    kinds: Mapping[str, AllocatorRates] = field(
        default_factory=dict
    )  # of all that may be used, by the technique's `kind`

    def with_more(self, allocated: float) -> Allocation:
        """The same for a step that allocates so many bytes more."""
        return replace(self, allocated=self.allocated + allocated)


@dataclass(frozen=True)
class Workers:
    """The workers that share a batch, and how they talk."""

    world: int = 1  # copies of the model that train on different samples; the ledger is that of one worker of one copy
    per_byte_sent: float = 0.0  # seconds
    per_message: float = 0.0  # seconds
    hides: bool = False  # sending has an engine of its own and hides behind backward
    per_copy: int = 1  # workers that hold one copy between them, each a part of it,
    stages: int = 1  # so many of them different layers
    samples: int = 0  # of a whole batch; 0: nobody said
    own: int = 0  # of those, what this worker's copy trains on

    @property
    def everybody(self) -> int:
        return self.world * self.per_copy

    def seconds(self, sent: float, messages: float) -> float:
        """The time that a worker takes to send so many bytes in so many messages."""
        return sent * self.per_byte_sent + messages * self.per_message


@dataclass(frozen=True)
class Findings:
    """What was found out about the job."""

    traits: frozenset[str] = frozenset()  # what it does that techniques care about: "draws", "mixes samples", ...
    reasons: Mapping[str, str] = field(default_factory=dict)  # trait -> what shows it, where users are told
    basis: str = ""  # how the ledger's numbers were found
