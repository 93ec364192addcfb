"""The values of a job's model: those it was made with, those of a file, or, made on the meta device, those of its own initialisers.

A model on the meta device has shapes and no values, so it is made at once whatever its size. Its modules are then given memory and
initialised one by one, in the order of the module tree, which is the order in which a normal construction draws its random numbers.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.private import own_buffers, own_parameters, transformers_initialiser
from shoestring.runs.tensors import TensorFile, Unreadable


def valued(model: nn.Module, job: Job) -> nn.Module:
    """The model with values for all its weights."""
    if job.weights:
        from_file(model, Path(job.weights))
    for module in model.modules():
        if any(value.is_meta for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            initialise(model, module)
    return model


def from_file(model: nn.Module, path: Path) -> None:
    """Give the model the weights of a safetensors file, one at a time."""
    try:
        file = TensorFile(path)
    except (OSError, Unreadable) as error:
        raise Mistake(f"the job's weights {path} can't be read: {error}") from error
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    missing = [name for name in model.state_dict() if name not in file.entries
               and not any(other in file.entries for other, value in own.items() if value is own.get(name))]
    if missing:
        raise Mistake(f"{path} has no weights for {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}: it is of another model")
    for name, value in own.items():
        if name not in file.entries:
            continue
        if file.entries[name].shape != tuple(value.shape):
            raise Mistake(f"{name} has the shape {file.entries[name].shape} in {path} and {tuple(value.shape)} in the model")
        found = file[name].to(value.dtype)
        if not value.is_meta:
            value.data.copy_(found)
        elif isinstance(value, nn.Parameter):
            replaced(model, value, nn.Parameter(found.clone(), value.requires_grad))
        else:
            module, _, last = name.rpartition(".")
            own_buffers(model.get_submodule(module))[last] = found.clone()


def replaced(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter into every place of another."""
    for module in model.modules():
        for name, value in own_parameters(module).items():
            if value is old:
                own_parameters(module)[name] = new


def initialise(model: nn.Module, module: nn.Module) -> None:
    """Give memory and values to what a module has on the meta device."""
    own: Any = getattr(module, "reset_parameters", None)
    theirs = transformers_initialiser(model)
    if own is None and theirs is None:
        raise Mistake(f"the model is made on the meta device, and {type(module).__name__} has no reset_parameters to give its weights "
                      f"values: add one, make the model as usual (one that does not fit in memory is made on disk), or give "
                      f"Job(weights='model.safetensors')")
    module.to_empty(device="cpu", recurse=False)
    if own is not None:
        own()
    if theirs is not None:
        theirs(module)
