"""A job file that trains another one sparsely.

    shoestring train shoestring/compression/sparse/job.py --of digits --method magnitude --share 0.9 --steps 500 --flags "width=16 depth=2"

`--of`: the other job's file or built-in name; `--flags`: its own flags, written name=value with spaces between them. `--steps`, `--epochs`
and `--seed` are the other job's. All else is as in `sparse_job`.
"""

from __future__ import annotations

import shlex

from shoestring.compression.sparse.sparse_job import sparse_job
from shoestring.core.job import Job
from shoestring.jobfile import job_path, loaded_job, parsed_flags


def job(
    of: str = "digits",
    flags: str = "",
    method: str = "magnitude",
    share: float = 0.9,
    begin: float = 0.1,
    end: float = 0.7,
    every: int = 0,
    scope: str = "",
    penalty: float = 0.0,
    pace: float = 0.0,
    skip: str = "",
    mask_seed: int = -1,
    steps: int = 0,
    epochs: int = 0,
    seed: int = -1,
    amount: float = 0.0,
    amount_of: str = "all",
) -> Job:
    path = job_path(of)
    values = parsed_flags(path, [f"--{word}" for word in shlex.split(flags)])
    values |= {
        name: value
        for name, value, unsaid in (("steps", steps, 0), ("epochs", epochs, 0), ("seed", seed, -1))
        if value != unsaid
    }
    return sparse_job(
        loaded_job(path, values),
        method,
        share,
        begin,
        end,
        every,
        scope,
        mask_seed if mask_seed >= 0 else None,
        penalty,
        pace,
        skip,
        amount,
        amount_of,
    )
