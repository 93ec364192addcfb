"""Error feedback: what a message left out is kept back and added to the next update, so that nothing is lost, only late.

    owed = update + kept        sent = decode(encode(owed))        kept <- owed - sent
    sum of all sent  +  kept  =  sum of all updates

Where it is kept, and what becomes of it when something is not finite, is the business of who sends.
Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, 2018, arXiv 1809.07599.
Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, 2019, arXiv 1901.09847.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Encoder(Protocol):
    """Writes numbers into bytes, and adds what bytes say to numbers."""

    def encode(self, numbers: Tensor, into: Tensor) -> None: ...
    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None: ...  # total += times * decoded


def owed(update: Tensor, kept: Tensor | None) -> Tensor:
    """The update and what was kept back, if anything was, of a model of the same size."""
    return update if kept is None or kept.shape != update.shape else update + kept


def encode_and_keep(encoder: Encoder, owed: Tensor, into: Tensor) -> None:
    """Write the message of what is owed; what it leaves out is what `owed` holds afterwards."""
    encoder.encode(owed, into)
    encoder.add(into, owed, times=-1.0)
