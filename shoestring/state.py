"""The trained state of a model as bytes."""
from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over names and raw bytes of the state_dict, sorted by name."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(name.encode())
            digest.update(raw_bytes(value))
    return digest.hexdigest()
