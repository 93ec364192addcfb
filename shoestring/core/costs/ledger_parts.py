"""The parts of a ledger: small values, each with one purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final


@dataclass(frozen=True)
class StandingBytes:
    """Bytes of tensors that stand for the whole step."""

    parameters: float = 0.0
    buffers: float = 0.0
    inputs: float = 0.0
    optimizer: float = 0.0
    constants: float = 0.0  # held by the job's functions and data: a teacher, a data set in memory
    gradients: float = 0.0  # accumulated gradients; others come and go with their blocks

    @property
    def total(self) -> float:
        return self.parameters + self.buffers + self.inputs + self.optimizer + self.constants + self.gradients


@dataclass(frozen=True)
class UpdateCost:
    """The cost of the optimizer's update of all weights, at the end of a step."""

    seconds: float = 0.0
    rise: float = 0.0  # bytes of tensors at its peak above its start
    scratch: float = 0.0  # bytes that kernels allocate for themselves there
    fused_seconds: float | None = None  # seconds with fused kernels, if they were timed
    call_seconds: float = 0.0  # additional seconds if the optimizer is called once per weight


@dataclass(frozen=True)
class Splitting:
    """The cost of running the batch in micro-batches."""

    paces: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (n, time in n micro-batches / time at once), by rising n
    adding_seconds: float = 0.0  # seconds to add all gradients to those of an earlier micro-batch


@dataclass(frozen=True)
class Traffic:
    """A step's traffic to and from disk or other workers."""

    disk: float = 0.0  # bytes written and read
    disk_seconds: float = 0.0  # disk time for that at its measured speed, whether or not compute hides it
    sent: float = 0.0  # bytes that a worker sends to others
    waiting: float = 0.0  # seconds that the step waits for the disk or a link

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(
            self.disk + more.disk,
            self.disk_seconds + more.disk_seconds,
            self.sent + more.sent,
            self.waiting + more.waiting,
        )


@dataclass(frozen=True)
class ValidationCost:
    """The cost of one validation, between two steps."""

    rise: float = 0.0  # bytes of tensors at its peak above what stands, apart from gradients
    scratch: float = 0.0  # bytes that kernels allocate for themselves there
    seconds: float = 0.0  # of all held-out batches
    batches: float = 1.0  # their total size, in units of the largest


@dataclass(frozen=True)
class Machine:
    """The machine's cost of moving bytes."""

    per_byte_spilled: float = 0.0  # seconds per byte written to or read from disk,
    per_byte_streamed: float = 0.0  # the same by direct I/O,
    per_byte_moved: float = 0.0  # and core seconds that direct I/O takes per byte
    cores: int = 1  # shared by compute and copying


@dataclass(frozen=True)
class AllocatorRates:
    """The cost of an allocator."""

    slack: float = 0.0  # bytes that it rounds up per byte of tensors
    retention: float = 0.0  # freed bytes that it keeps per byte allocated
    per_byte_allocated: float = 0.0  # seconds per byte allocated, above those of the default allocator


@dataclass(frozen=True)
class Allocation:
    """The process's memory besides its tensors."""

    base: float = 0.0  # bytes of the process before any tensor
    allocated: float = 0.0  # bytes of all tensors that a step allocates, freed or not
    rates: AllocatorRates = field(default_factory=AllocatorRates)  # of the allocator in use
    kinds: Mapping[str, AllocatorRates] = field(
        default_factory=dict
    )  # of all allocators that may be used, by the technique's `kind`

    def with_more(self, allocated: float) -> Allocation:
        """The same for a step that allocates so many more bytes."""
        return replace(self, allocated=self.allocated + allocated)


@dataclass(frozen=True)
class Workers:
    """The workers that share a batch, and their communication."""

    world: int = 1  # replicas that train on different samples; the ledger is that of one worker of one replica
    per_byte_sent: float = 0.0  # seconds
    per_message: float = 0.0  # seconds
    hides: bool = False  # whether sending has an engine of its own and overlaps with backward
    per_copy: int = 1  # workers that share one replica, each with a part of it,
    stages: int = 1  # of which so many hold different layers
    samples: int = 0  # of a whole batch; 0: unknown
    own: int = 0  # of those, the samples for this worker's replica

    @property
    def everybody(self) -> int:
        return self.world * self.per_copy

    def seconds(self, sent: float, messages: float) -> float:
        """The time that a worker takes to send so many bytes in so many messages."""
        return sent * self.per_byte_sent + messages * self.per_message


class Trait:
    """Properties of a job that techniques depend on. A property that names a dtype or a reason is written where it is
    found. They are texts, not an enum, because cached answers are sets of texts and the codec would write an enum by
    its name."""

    DRAWS: Final = "draws"
    MIXES_SAMPLES: Final = "mixes samples"
    UNSPLITTABLE: Final = "can't be split"
    NO_BLOCK_RUNS: Final = "no block runs"
    CLIPS: Final = "clips"
    OWN_PROCESS: Final = "own process"
    ON_A_GPU: Final = "on a GPU"
    NO_DISK: Final = "no disk is described"
    SPARSE_GRADIENTS: Final = "sparse gradients"
    COMPLEX_WEIGHTS: Final = "complex weights"
    NOT_RECOMPUTABLE: Final = "can't be recomputed"
    CACHES: Final = "its blocks fill a key-value cache"
    FUSED_ALREADY: Final = "fused already"
    HAS_FUSED_KERNEL: Final = "has a fused kernel"


@dataclass(frozen=True)
class Findings:
    """What was found out about the job."""

    traits: frozenset[str] = frozenset()  # each one of Trait, or a text that says which dtype or why
    reasons: Mapping[str, str] = field(default_factory=dict)  # trait -> the observation that shows it, for messages
    basis: str = ""  # how the ledger's numbers were found
