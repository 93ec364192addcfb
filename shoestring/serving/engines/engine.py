"""An engine computes samples in one thread. Torch, packed weights and onnxruntime are engines; the rest of serving can't tell
which one it has.

Contract: `answers` gives for every sample what the model says to it alone, within `tolerance` (tests/serving/engines/contract.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoestring.serving.sample import Answers, Sample, Signature


class ServingEngine(ABC):
    """A model that is ready to answer. Replicas fork after it is made, so it holds its weights in shared memory, and starts no thread."""

    signature: Signature
    tolerance: float  # largest difference to the model on a sample alone, relative to the output's largest number
    packs: bool  # whether samples of different lengths may be in one batch without padding
    why_not_packed: str  # the reason if it does not; empty if it does
    known: Sample | None = None  # a sample that it answers: if it still does, a sample that fails is at fault itself

    @abstractmethod
    def answers(self, samples: Sequence[Sample]) -> Answers:
        """What the model says to each sample. They are one batch: unless it packs, all of one length."""
