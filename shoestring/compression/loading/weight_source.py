"""Recognise weights on disk: a file, or a Hugging Face folder. This module does not import torch, which takes
seconds."""

from __future__ import annotations

import os
import re

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import read_regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.core.model.weights import PICKLES, SAFE

LONGEST = 1 << 20  # bytes of the largest config.json that is read


def is_weights(path: str) -> bool:
    """Whether the path is a file of weights, or a folder with such files that is not a run."""
    if os.path.isdir(path):
        return not os.path.exists(os.path.join(path, "run.json")) and any(
            one.endswith((*SAFE, *PICKLES)) for one in os.listdir(path)
        )
    return path.endswith((*SAFE, *PICKLES))


def check_weights(path: str) -> None:
    """Refuse a folder whose only weights are pickles, because it is not clear which one to load."""
    if os.path.isdir(path) and not any(one.endswith(SAFE) for one in os.listdir(path)):
        first = min(one for one in os.listdir(path) if one.endswith(PICKLES))
        raise Mistake(f"{path} has no safetensors file: name a state dict in it, such as {os.path.join(path, first)}")


def is_onnx(path: str) -> bool:
    return path.endswith(".onnx")


def check_onnx(path: str) -> None:
    """Refuse what is no file."""
    if not os.path.isfile(path):
        raise Mistake(f"{path} is not a file")


def job_needed(path: str, argument: str) -> Mistake:
    """The error for weights without a job. It shows the job file to write."""
    if is_onnx(path):
        return Mistake(
            f"{path} has a graph, but no data to calibrate and measure it with: give {argument}, a file such as\n\n"
            f"    import shoestring\n\n    def job():\n"
            f'        return shoestring.Job(model=lambda: None, data=[{{"input_ids": ...}}, ...])   # batches by input name\n\n'
            f"Its model is not used"
        )
    return Mistake(
        f"{path} has weights, but nothing that tells which model they belong to, or which data to use: give {argument}, a "
        f"file such as\n\n{job_template(path)}\nIts model needs no trained weights: they are taken from {path}"
    )


def job_template(path: str) -> str:
    """A job file for these weights, with dots where the user must fill in. A config.json beside them names the
    transformers class."""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    if (kind := architecture(folder)) is None:
        return "    import shoestring\n\n    def job():\n        return shoestring.Job(model=lambda: MyModel(...), data=[batch, ...])\n"
    return (
        f"    import shoestring\n    from transformers import AutoConfig, {kind}\n\n    def job():\n"
        f"        config = AutoConfig.from_pretrained({os.path.abspath(folder)!r}, local_files_only=True)\n"
        f'        return shoestring.Job(model=lambda: {kind}(config), data=[{{"input_ids": ...}}, ...])   # batches of your own\n'
    )


def architecture(folder: str) -> str | None:
    """The model class named by a config.json; None if there is none, or if it is not a plain identifier."""
    path = os.path.join(folder, "config.json")
    try:
        if os.path.getsize(path) > LONGEST:
            return None
        found = parse_json(read_regular(path))
        name = found["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return name if isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,99}", name) else None
