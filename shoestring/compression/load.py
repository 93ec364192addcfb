"""A compressed model as an ordinary module."""
from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from shoestring.compression.edits import edited
from shoestring.compression.pack import Packed
from shoestring.compression.place import decoded as with_dense_weights
from shoestring.core import random_state
from shoestring.core.errors import Mistake
from shoestring.core.options import speaking_of_arguments
from shoestring.core.regular import read_regular
from shoestring.jobfile import BUILT_IN, job_path, loaded_job


@speaking_of_arguments()
@random_state.kept()
def load(folder: str | Path, *, model: Callable[[], nn.Module] | None = None, job: str | Path | None = None,
         decoded: bool = False) -> nn.Module:
    """The model that `shoestring compress` wrote: an ordinary module in eval mode that computes from the packed weights.

        model = shoestring.load("small")
        answer = model(batch)

    model       a factory of the model as it was before, instead of the job's own; its code makes the module, its weights do not matter
    job         the job file, where it is not any more where it was; a copy of it is in the folder: job="small/job.py"
    decoded     make ordinary weights of the packed ones, once: as fast as the original, and as large in memory

    Everything in the folder is checked before it is used, and nothing in it is run as code. Raises Mistake if something is not as it
    was written.
    """
    packed = Packed(Path(folder))
    made = model() if model is not None else skeleton(packed, job)
    if not isinstance(made, nn.Module):
        raise Mistake(f"the factory gave a {type(made).__name__}, not a module")
    filled = packed.fill(edited(made, packed.about.get("edits", ())))
    return with_dense_weights(filled) if decoded else filled


def skeleton(packed: Packed, job: str | Path | None) -> nn.Module:
    """The module as the job makes it."""
    named = packed.about.get("job") or {}
    file, flags = str(job or named.get("file", "")), dict(named.get("flags", {}))
    if not file:
        raise Mistake(f"{packed.folder} does not say how its model is made: give model=, a function that makes it")
    if job is None and file not in BUILT_IN and not Path(file).exists():
        copy = packed.folder / "job.py"
        raise Mistake(f"the job file {file}, which makes the model, is not there: give job={str(copy)!r}, the copy in the folder, if you "
                      f"trust it (it is code), or model=, a function that makes the model")
    path = job_path(file)
    if hashlib.sha256(read_regular(path)).hexdigest() != named.get("sha256") and path not in map(job_path, BUILT_IN):
        warnings.warn(f"{path} is not as it was when the model was compressed; that its weights have the same names and shapes is checked, "
                      f"what it computes with them is not", stacklevel=5)
    return loaded_job(path, flags).model()
