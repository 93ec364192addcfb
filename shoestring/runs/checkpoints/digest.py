"""The trained state of a model as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shoestring.runs.weights.tensors import pieces


def weights_sha256(weights: Mapping[str, Any]) -> str:
    """SHA-256 over names and raw bytes of a model's state, sorted by name."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        if hasattr(value, "dtype"):
            digest.update(name.encode())
            for piece in pieces(value):
                digest.update(piece)
    return digest.hexdigest()
