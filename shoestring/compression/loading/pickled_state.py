"""Read a state dict that torch.save wrote: alone, or in a checkpoint, and perhaps with a wrapper's prefix before all names."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import regular


def load_state(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Load a state dict written by torch.save, alone or in a checkpoint; returns notes for the user. Only tensors and plain values are read
    (weights_only), so the file can't run code."""
    try:
        with open(path, "rb", opener=regular) as file:
            refuse_compressed(file, path)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Mistake:
        raise
    except Exception as error:  # torch raises many types of exceptions
        raise Mistake(
            f"{path} is not a state dict of tensors alone ({type(error).__name__}: {first_sentence(error)}), and "
            f"nothing else is read from a pickle, because it can run code: save only model.state_dict()"
        ) from error
    own = model.state_dict(keep_vars=True)
    state, notes = state_in(state, path, list(own))
    prefix = wrapper_prefix(list(own), list(state))
    if prefix:
        state = {name.removeprefix(prefix): one for name, one in state.items()}
        notes += (f"all names in {path} begin with {prefix}, which the model's do not have: it was left out",)
    tied: dict[int, Tensor] = {id(own[name]): one for name, one in state.items() if name in own}
    state = {**{name: tied[id(one)] for name, one in own.items() if id(one) in tied}, **state}
    check_state(path, own, state)
    model.load_state_dict(dict(state))
    return notes


def refuse_compressed(file: BinaryIO, path: Path) -> None:
    """Refuse an archive with compressed parts, which unpack to a thousand times their bytes: torch.save compresses none."""
    if zipfile.is_zipfile(file) and any(
        one.compress_type != zipfile.ZIP_STORED for one in zipfile.ZipFile(file).infolist()
    ):
        raise Mistake(f"{path} has compressed parts, which torch.save does not write: save the state dict again")
    file.seek(0)


def check_state(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise Mistake if names or shapes are not the model's."""
    for name in sorted({*own, *state}):
        if name not in state or name not in own:
            raise Mistake(
                f"{path} {'has no' if name in own else 'has'} {name}, and the job's model {'has' if name in own else 'has not'}"
                f": give the job that builds the model of these weights"
            )
        if own[name].shape != state[name].shape:
            raise Mistake(
                f"{name} has the shape {list(state[name].shape)} in {path} and {list(own[name].shape)} in the job's model: "
                f"give the job and the flags with which these weights were trained"
            )


def state_in(found: Any, path: Path, own: Sequence[str]) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """The state dict in a file: the whole of it, or the only one with such names in a dict of other things (a checkpoint)."""
    if is_state(found):
        return found, ()
    parts = found.items() if isinstance(found, Mapping) else ()
    inner = {key: one for key, one in parts if is_state(one)}
    fitting = {key: one for key, one in inner.items() if any(f".{name}".endswith(f".{own[0]}") for name in one)}
    inner = fitting or inner
    if len(inner) != 1:
        several = f" with {', '.join(map(str, inner or found))} in it" if isinstance(found, Mapping) and found else ""
        raise Mistake(
            f"{path} holds no state dict, but a {type(found).__name__}{several}: save only the model's state_dict()"
        )
    return next(iter(inner.values())), (f"the weights are those under {next(iter(inner))!r} in {path}",)


def is_state(found: Any) -> bool:
    return (
        isinstance(found, Mapping)
        and bool(found)
        and all(isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items())
    )


def wrapper_prefix(own: Sequence[str], stored: Sequence[str]) -> str:
    """What a wrapper (DistributedDataParallel, torch.compile, a trainer's module) put before every name; empty if nothing.

    >>> wrapper_prefix(["0.weight", "0.bias"], ["module.0.weight", "module.0.bias"])
    'module.'
    """
    if not own or not stored or set(own) & set(stored):
        return ""
    found = {name.removesuffix(own[0]) for name in stored if name.endswith(f".{own[0]}")}
    return next((one for one in sorted(found) if all(name.startswith(one) for name in stored)), "")


def first_sentence(error: Exception) -> str:
    """Of torch's message, which goes on with advice, partly in bold, on how to run the file's code."""
    return str(error).split("\n")[0].split(". ")[0][:200]
