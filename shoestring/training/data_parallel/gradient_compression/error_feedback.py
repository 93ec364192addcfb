"""Error feedback for gradients: what a worker's message left out is added to its next one (numerics/error_feedback.py).

Without it, small gradients may never be sent at all (tests/training/data_parallel/gradient_compression/test_gradient_codecs.py shows this
for top-k). Lin et al.: Deep Gradient Compression, 2018, arXiv 1712.01887 (its momentum correction is not implemented).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring.core.running.run_state import RunState
from shoestring.core.workers.mesh import Mesh, on_one_axis
from shoestring.numerics.error_feedback import encode_and_keep
from shoestring.training.data_parallel.gradient_compression.gradient_codecs import Codec
from shoestring.training.links.process_link import gather_named_tensors, own_named_tensors


class ErrorFeedback(RunState):
    """The error that one worker keeps for each bucket: 4 bytes per number.

    It belongs to that worker: if a run is resumed with another arrangement of workers, it is lost and starts at zero.
    If the sum of gradient and error is not finite, no error is kept; a skipped step loses what it sent.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh or on_one_axis()
        self.rest: dict[str, Tensor] = {}

    def amount_owed(self, bucket: str, gradient: Tensor) -> Tensor:
        """The gradient plus the kept error. The caller subtracts what it sends; the rest is kept."""
        if bucket not in self.rest:
            self.rest[bucket] = torch.zeros_like(gradient)
        return self.rest[bucket].nan_to_num_(0.0, 0.0, 0.0).add_(gradient)

    def encode(self, bucket: str, gradient: Tensor, codec: Codec, into: Tensor) -> None:
        """Encode gradient plus kept error as a message, and keep what the message leaves out."""
        encode_and_keep(codec, self.amount_owed(bucket, gradient), into)

    def state_dict(self) -> dict[str, Any]:
        return {"mesh": self.mesh.sizes, "kept": gather_named_tensors(self.mesh.link, self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["mesh"] == self.mesh.sizes:
            self.rest = own_named_tensors(state["kept"], self.mesh.link.rank)
