"""The key under which a job file's measurements are kept: everything they depend on, as far as that can be known.

The job file's path and content, its flags, the files that they name, the working folder, the shapes of its first
batches; shoestring's own source, Python, every installed package with its version; the machine, and environment
variables that change how fast or how large a process is. Modules that the job imports are checked one by one
(planning/answers.py).
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.core.batch import leaves
from shoestring.core.costs.hardware import Hardware
from shoestring.core.job import Job
from shoestring.data.feed import Feed
from shoestring.jobfile import flags_of
from shoestring.measure.probe import processor
from shoestring.measure.process import memory_all
from shoestring.planning.answers import digests

INSTALLED = (".dist-info", ".egg-info")
LENGTH = ("steps", "epochs", "patience")  # fields of a job that say how long it trains, which does not affect a step
# Prefixes of environment variables that affect measurements: threads, kernels, allocators, devices
SETTINGS = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "MALLOC_",
    "GLIBC_",
    "LD_PRELOAD",
    "PYTHONPATH",
)


def about_job(job: Job, machine: Hardware, devices: int, here: int) -> dict[str, Any]:
    """Everything that planning a job is known to depend on."""
    assert job.origin is not None, "only a job from a file has a key"
    flags = dict(job.origin.flags)
    plain = {
        one.name: vars(job)[one.name] for one in fields(job) if isinstance(vars(job)[one.name], (bool, int, float, str))
    }
    return {
        "file": os.path.abspath(job.origin.file),
        "source": digests([job.origin.file]),
        "flags": flags,
        "folder": os.getcwd(),
        "named": named_files((*flags.values(), *(one.default for one in flags_of(job.origin.file)), job.weights)),
        "job": {name: value for name, value in plain.items() if name not in LENGTH},
        "batches": shapes(job),
        "machine": (
            platform.node(),
            platform.release(),
            processor(),
            machine.device,
            machine.cores,
            memory_all(),
            len(os.sched_getaffinity(0)),
        ),
        "settings": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "workers": (devices, here),
        **software(),
    }


def shapes(job: Job) -> list[list[str]]:
    """Shapes and dtypes in the job's first batches, which a step is measured with."""
    with suppress(Exception):  # planning will report what is wrong with the data
        return [
            [
                f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                for leaf in leaves(batch)
            ]
            for batch in islice(Feed(job), 2)
        ]
    return []


@cache
def software() -> dict[str, Any]:
    """The software that a measurement may depend on: our own source, and everything that is installed."""
    ours = Path(__file__).parents[2]
    source = hashlib.sha256()
    for path in sorted(ours.rglob("*.py")):
        source.update(f"{path.relative_to(ours)} ".encode() + path.read_bytes())
    there: set[str] = set()
    for folder in set(sys.path):
        with suppress(OSError):
            there |= {name for name in os.listdir(folder or os.curdir) if name.endswith(INSTALLED)}
    return {"python": sys.version, "shoestring": source.hexdigest(), "installed": sorted(there)}


def named_files(values: Iterable[object]) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file or folder that one of these values names."""
    found = {}
    for value in values:
        if isinstance(value, (str, Path)) and str(value):
            with suppress(OSError, ValueError):
                seen = os.stat(value)
                found[str(value)] = (seen.st_size, seen.st_mtime_ns)
    return found
