"""A compressed model as an ordinary module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.formats.packed_modules import decode_weights
from shoestring.compression.model_edits import edited
from shoestring.core import random_state
from shoestring.core.errors import Mistake
from shoestring.core.options import speaking_of_arguments
from shoestring.processes.named_job import Claim, Named, named_job


@speaking_of_arguments()
@random_state.kept()
def load(
    folder: str | Path,
    *,
    job: Named | None = None,
    model: Callable[[], nn.Module] | None = None,
    decoded: bool = False,
    **flags: Any,
) -> nn.Module:
    """The model that `shoestring compress` wrote: an ordinary module in eval mode that computes from the packed weights.

        model = shoestring.load("small", job="train.py")
        answer = model(batch)

    job         what makes the module: a job file, the name of a built-in job, a Job, or a function that gives one. Its code makes the
                module, its weights do not matter. A model of a built-in job needs none
    model       or a factory of the module as it was before it was compressed
    decoded     make ordinary weights of the packed ones, once: as fast as the original, and as large in memory
    flags       of the job file; its numbers are those that it was compressed with, its texts are given again

    Everything in the folder is checked before it is used. No file that it names is opened and nothing in it is run as code: the copy of
    the job file neither, unless it is named here. Raises Mistake if something is not as it was written.
    """
    packed = PackedModel(Path(folder))
    made = model() if model is not None else skeleton(packed, job, flags)
    if not isinstance(made, nn.Module):
        raise Mistake(f"the factory gave a {type(made).__name__}, not a module")
    filled = packed.fill(edited(made, packed.edits))
    return decode_weights(filled) if decoded else filled


def skeleton(packed: PackedModel, job: Named | None, flags: Mapping[str, Any]) -> nn.Module:
    """The module as the job makes it."""
    claim = packed.claim
    if job is None and claim is None:
        raise Mistake(
            f"{packed.folder} does not say how its model is made: give job=, a job file or a Job, or model=, a function that "
            f"makes the module"
        )
    found, notes = named_job(claim or Claim(packed.folder), job, flags)
    for note in notes:
        warnings.warn(note, stacklevel=5)
    return found.model()
