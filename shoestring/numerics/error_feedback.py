"""Error feedback: the error of an inexact message is added to the next update, so that nothing is lost, only delayed.

    owed = update + kept        sent = decode(encode(owed))        kept <- owed - sent
    sum of all sent  +  kept  =  sum of all updates

Where the error is stored, and what happens to NaN and infinity, is up to the caller. Stich, Cordonnier, Jaggi:
Sparsified SGD with Memory, 2018, arXiv 1809.07599. Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD,
2019, arXiv 1901.09847.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Encoder(Protocol):
    """Encodes numbers as bytes, and adds decoded numbers to a total."""

    def encode(self, numbers: Tensor, into: Tensor) -> None: ...
    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None: ...  # total += times * decoded


def update_with_error(update: Tensor, kept: Tensor | None) -> Tensor:
    """The update plus the error kept from earlier messages, if there is one of the same size."""
    return update if kept is None or kept.shape != update.shape else update + kept


def encode_and_keep(encoder: Encoder, owed: Tensor, into: Tensor) -> None:
    """Write the message for `owed`; afterwards `owed` holds what the message left out."""
    encoder.encode(owed, into)
    encoder.add(into, owed, times=-1.0)
