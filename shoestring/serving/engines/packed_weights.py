"""The module of a folder that `shoestring compress` wrote, for a TorchEngine: with its packed weights, or decoded once
where memory allows: faster, and as large as the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.formats.packed_modules import decode_weights, formats_of, memory_of
from shoestring.compression.load import load
from shoestring.processes.named_job import Named


@dataclass(frozen=True, eq=False)
class LoadedFolder:
    module: nn.Module
    decoded: bool
    bytes: int  # of its parameters and buffers in memory


def load_within(
    folder: Path,
    memory: int | None = None,
    *,
    job: Named | None = None,
    model: Callable[[], nn.Module] | None = None,
    **flags: Any,
) -> LoadedFolder:
    """Load a folder's model, decoded if its weights then take at most `memory` bytes (None: always). `job` and `model` as in
    `shoestring.load`."""
    module = load(folder, job=job, model=model, **flags)
    forms = formats_of(module)
    stored = sum(one.untyped_storage().nbytes() for form in forms.values() for one in form.buffers())
    dense = sum(prod(form.shape) * form.dtype.itemsize for form in forms.values())
    decoded = not forms or memory is None or memory_of(module) - stored + dense <= memory
    if decoded:
        decode_weights(module)
    return LoadedFolder(module, decoded, memory_of(module))
