"""`shoestring.load`: load a compressed model as an ordinary module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.edit_registry import apply_edits
from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.formats.packed_modules import decode_weights
from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.core.errors import Mistake
from shoestring.core.running import random_state
from shoestring.processes.named_job import Claim, Named, named_job


@speaking_of_arguments()
@random_state.fork_rng()
def load(
    folder: str | Path,
    *,
    job: Named | None = None,
    model: Callable[[], nn.Module] | None = None,
    decoded: bool = False,
    **flags: Any,
) -> nn.Module:
    """Load a model that `shoestring compress` wrote: an ordinary module in eval mode that computes from packed weights.

        model = shoestring.load("small", job="train.py")
        output = model(batch)

    job         builds the module: a job file, the name of a built-in job, a Job, or a function that returns one. Only its
                code matters, not its weights. Models of built-in jobs need none
    model       or a factory for the module as it was before compression
    decoded     decode all weights once: as fast as the original, and as large in memory
    flags       of the job file; its numbers default to those of the compression, its texts must be given again

    Everything in the folder is verified before it is used. No file that it names is opened, and none of its content is
    run as code, not even its copy of the job file, unless you name it here. Raises Mistake if the folder is damaged.
    """
    packed = PackedModel(Path(folder))
    made = model() if model is not None else skeleton(packed, job, flags)
    if not isinstance(made, nn.Module):
        raise Mistake(f"the factory returned a {type(made).__name__}, not a module")
    filled = packed.fill(apply_edits(made, packed.edits))
    return decode_weights(filled) if decoded else filled


def skeleton(packed: PackedModel, job: Named | None, flags: Mapping[str, Any]) -> nn.Module:
    """The module as the job builds it."""
    claim = packed.claim
    if job is None and claim is None:
        raise Mistake(
            f"{packed.folder} does not say how to build its model: give job=, a job file or a Job, or model=, a function "
            f"that returns the module"
        )
    found, notes = named_job(claim or Claim(packed.folder), job, flags)
    for note in notes:
        warnings.warn(note, stacklevel=5)
    return found.model()
