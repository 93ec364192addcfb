"""Error feedback: what a message left out is kept back and added to the next gradient, so that nothing is lost, only late.

    owed = gradient + kept        sent = codec(owed)        kept = owed - decoded(sent)
    sum of all sent  +  kept  =  sum of all gradients

Without it, what is left out may be left out for ever (tests/parallel/test_codecs.py: top-k never arrives; with it, it does).
Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, 2019, arXiv 1901.09847.
Lin et al.: Deep Gradient Compression, 2018, arXiv 1712.01887 (its momentum correction is not here).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring.core.link import Link
from shoestring.core.run import Part
from shoestring.parallel.codecs import Codec
from shoestring.parallel.process_link import Rows, own_row


class ErrorFeedback(Part):
    """What one worker keeps back of each bucket: 4 bytes a number.

    It belongs to that worker: a run that goes on with another number of workers loses what was kept back and begins at
    zero. Where what was owed is not finite, nothing is kept; a step that is skipped loses what it sent.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link = link or Link()
        self.rest: dict[str, Tensor] = {}

    def owed(self, bucket: str, gradient: Tensor) -> Tensor:
        """The gradient and what was kept back. Whoever sends of it subtracts that from it; the rest is then kept."""
        if bucket not in self.rest:
            self.rest[bucket] = torch.zeros_like(gradient)
        return self.rest[bucket].nan_to_num_(0.0, 0.0, 0.0).add_(gradient)

    def encode(self, bucket: str, gradient: Tensor, codec: Codec, into: Tensor) -> None:
        """The message of what is owed."""
        owed = self.owed(bucket, gradient)
        codec.encode(owed, into)
        codec.add(into, owed, times=-1.0)

    def state_dict(self) -> dict[str, Any]:
        return {bucket: Rows(self.link, kept) for bucket, kept in self.rest.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = {bucket: own for bucket, rows in state.items() if (own := own_row(rows, self.link)) is not None}
