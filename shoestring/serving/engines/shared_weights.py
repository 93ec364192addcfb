"""Move a module's tensors into one piece of memory that forked processes share.

`Module.share_memory` takes an open file for each tensor, and a place in /dev/shm, which containers keep small. An anonymous
mapping takes neither: a fork has the same pages, also after somebody wrote to them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoestring.core.private import storage_id_of

ALIGNED = 64  # bytes: a line of the processor's cache


def share_weights(model: nn.Module) -> int:
    """Move parameters and buffers, in place; tensors that share memory still do. Returns the bytes that are shared."""
    tensors = list(own_tensors(model))
    storages = {storage_id_of(one): one.untyped_storage() for one in tensors}
    places: dict[int, int] = {}
    size = 0
    for number, storage in storages.items():
        places[number] = size
        size += -(-storage.nbytes() // ALIGNED) * ALIGNED
    if not size:
        return 0
    shared = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    for number, storage in storages.items():
        start = places[number]
        shared[start : start + storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for one in tensors:
        start = places[storage_id_of(one)]
        whole = shared[start : start + one.untyped_storage().nbytes()].view(one.dtype)
        one.data = whole.as_strided(one.shape, one.stride(), whole.storage_offset() + one.storage_offset())
    return size


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Its dense parameters and buffers that hold something."""
    for one in (*model.parameters(), *model.buffers()):
        if one.layout is torch.strided and one.device.type == "cpu" and one.untyped_storage().nbytes():
            yield one
