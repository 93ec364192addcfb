"""What a worker keeps back of its gradients until the next message: error feedback (numerics/error_feedback.py).

Without it, what is left out may be left out for ever (tests/training/data_parallel/test_gradient_codecs.py: top-k
never arrives; with it, it does).
Lin et al.: Deep Gradient Compression, 2018, arXiv 1712.01887 (its momentum correction is not here).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring.core.mesh import Mesh, on_one_axis
from shoestring.core.run_state import RunState
from shoestring.numerics.error_feedback import encode_and_keep
from shoestring.training.data_parallel.gradient_codecs import Codec
from shoestring.training.links.process_link import gather_named_tensors, own_named_tensors


class ErrorFeedback(RunState):
    """What one worker keeps back of each bucket: 4 bytes a number.

    It belongs to that worker: a run whose workers stand otherwise when it goes on loses what was kept back and begins at
    zero. Where what was owed is not finite, nothing is kept; a step that is skipped loses what it sent.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh or on_one_axis()
        self.rest: dict[str, Tensor] = {}

    def owed(self, bucket: str, gradient: Tensor) -> Tensor:
        """The gradient and what was kept back. Whoever sends of it subtracts that from it; the rest is then kept."""
        if bucket not in self.rest:
            self.rest[bucket] = torch.zeros_like(gradient)
        return self.rest[bucket].nan_to_num_(0.0, 0.0, 0.0).add_(gradient)

    def encode(self, bucket: str, gradient: Tensor, codec: Codec, into: Tensor) -> None:
        """The message of what is owed."""
        encode_and_keep(codec, self.owed(bucket, gradient), into)

    def state_dict(self) -> dict[str, Any]:
        return {"mesh": self.mesh.sizes, "kept": gather_named_tensors(self.mesh.link, self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["mesh"] == self.mesh.sizes:
            self.rest = own_named_tensors(state["kept"], self.mesh.link.rank)
