"""Initial values of a job's model: as constructed, from files, or, for models on the meta device, from its own
initialisers.

A model on the meta device has shapes but no values, so it is constructed at once whatever its size. Then its modules
get memory and are initialised one by one in the order of the module tree, which is the order in which a normal
construction draws its random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.command_line.extras import install_hint
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.model.weights import Weights, as_weights, patterns
from shoestring.core.private import own_buffers, own_parameters, transformers_initialiser
from shoestring.core.running import random_state
from shoestring.core.user_code.blame import failure_text
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import value_text
from shoestring.runs.weights.tensors import TensorFile
from shoestring.runs.weights.weight_files import open_tensors


@dataclass(frozen=True)
class WeightSource:
    """Where the values of a model's weights come from."""

    weights: Weights
    taken: Mapping[str, tuple[TensorFile, str]]  # name in the model -> the file, and the name there
    new: tuple[str, ...]  # names in the model that keep their constructed values
    left: tuple[str, ...]  # names in the files that the model does not have
    stored: tuple[str, ...]  # all names in the files

    @property
    def note(self) -> str:
        """Which weights were taken from the files and which not; empty if all were, under their own names."""
        given = self.weights
        if not (self.new or self.left or given.remove_prefix or given.add_prefix):
            return ""
        parts = [f"{len(self.taken)} weights are those of {', '.join(given.files)}"]
        if given.remove_prefix or given.add_prefix:
            parts[0] += f" ({given.remove_prefix or 'no prefix'} there, {given.add_prefix or 'no prefix'} in the model)"
        parts.append(f"new: {several_names(self.new)}" if self.new else "none is new")
        parts.append(
            f"left in the files: {several_names(patterns(self.left, self.stored))}"
            if self.left
            else "nothing is left in the files"
        )
        return "; ".join(parts)


def fill_weights(model: nn.Module, job: Job) -> nn.Module:
    """The model with values for all its weights."""
    found = source(model, job)
    own = tensors_of(model)
    taken = {id(own[name]) for name in found.taken} if found else set()
    for module in model.modules():
        mine = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(value.is_meta and id(value) not in taken for value in mine):
            initialise(model, module)
    if found:
        load(model, found)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers under all their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def source(model: nn.Module, job: Job) -> WeightSource | None:
    """The source of the job's weights; None if the model is constructed with them. Only file headers are read."""
    given = as_weights(job.weights)
    if given is None:
        return None
    files = open_tensors(given.files)
    own, names = tensors_of(model), list(model.state_dict())
    places: dict[str, tuple[TensorFile, str]] = {}
    for name, file in files.items():
        if (place := given.model_name(name)) in places:
            raise Mistake(
                f"the job's weights: {places[place][1]} and {name} of {', '.join(given.files)} are both {place} in the model"
            )
        places[place] = file, name
    taken = {name: places[name] for name in own if name in places and not given.is_new(name)}
    ties: dict[int, list[str]] = {}  # all names of each weight: a tied one may be in the file under any of them
    for name in names:
        ties.setdefault(id(own[name]) if name in own else id(name), []).append(name)
    missing = [one[0] for one in ties.values() if not any(name in taken or given.is_new(name) for name in one)]
    if missing:
        raise Mistake(incomplete(given, missing, list(ties.values()), list(files)))
    check_shapes(given, own, taken)
    unmatched = [pattern for pattern in given.new if not any(fnmatchcase(name, pattern) for name in own)]
    if unmatched:
        raise Mistake(
            f"the job's weights: new={unmatched[0]!r} is the name of no weight of the model, which has {', '.join(names[-3:])}"
        )
    used = {there for _, there in taken.values()}
    return WeightSource(
        given,
        taken,
        tuple(one[0] for one in ties.values() if not any(name in taken for name in one)),
        tuple(name for name in files if name not in used),
        tuple(files),
    )


def check_shapes(given: Weights, own: Mapping[str, Tensor], taken: Mapping[str, tuple[TensorFile, str]]) -> None:
    differ = [name for name, (file, there) in taken.items() if file.entries[there].shape != tuple(own[name].shape)]
    if differ:
        file, there = taken[differ[0]]
        as_new = replace(given, new=(*given.new, *patterns(differ, list(own))))
        raise Mistake(
            f"{differ[0]} has the shape {file.entries[there].shape} in {file.path} and {tuple(own[differ[0]].shape)} in the "
            f"model; if it is to be new, write weights={as_new.as_code()}"
        )


def incomplete(given: Weights, missing: list[str], ties: list[list[str]], stored: list[str]) -> str:
    """The message for a model with weights that the files lack: which ones, and what to write instead."""
    where, names = ", ".join(given.files), [name for one in ties for name in one]
    better = min(
        (with_prefix(given, missing[0], name) for name in stored),
        key=lambda one: len(absent(one, ties, stored)),
        default=given,
    )
    still = absent(better, ties, stored)
    if len(still) >= len(missing):
        better, still = given, missing
    if len(still) == len(ties):
        return (
            f"{where} has no weights for {few_names(missing)}, nor for any other of the model: it is of another model"
        )
    why = "its names differ by a prefix" if better is not given else "if they are to be new, and stay as they were made"
    better = replace(better, new=(*better.new, *patterns(still, names)))
    return f"{where} has no weights for {few_names(missing)}; {why}: write weights={better.as_code()}"


def with_prefix(given: Weights, wanted: str, name: str) -> Weights:
    """The `Weights` that would map a name in the file to the model's name."""
    if name.endswith(f".{wanted}"):
        return replace(given, remove_prefix=name.removesuffix(wanted), add_prefix="")
    return (
        replace(given, remove_prefix="", add_prefix=wanted.removesuffix(name)) if wanted.endswith(f".{name}") else given
    )


def absent(given: Weights, ties: list[list[str]], stored: list[str]) -> list[str]:
    """The model's weights that get no value from these files."""
    there = {given.model_name(name) for name in stored}
    return [one[0] for one in ties if not any(name in there or given.is_new(name) for name in one)]


def few_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' * (len(names) > 3)}"


def several_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}"


def load(model: nn.Module, found: WeightSource) -> None:
    """Load the weights into the model, one at a time."""
    own = tensors_of(model)
    for name, (file, there) in found.taken.items():
        read = file[there].to(own[name].dtype)
        value = own[name]
        if not value.is_meta:
            value.data.copy_(read)
        elif isinstance(value, nn.Parameter):
            replace_parameter(model, value, nn.Parameter(read.clone(), value.requires_grad))
        else:
            module, _, last = name.rpartition(".")
            own_buffers(model.get_submodule(module))[last] = read.clone()


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the model."""
    for module in model.modules():
        for name, value in own_parameters(module).items():
            if value is old:
                own_parameters(module)[name] = new


@calls_user("model")
def initialise(model: nn.Module, module: nn.Module) -> None:
    """Give memory and values to a module's tensors on the meta device."""
    own: Any = getattr(module, "reset_parameters", None)
    theirs = transformers_initialiser(model)
    if own is None and theirs is None:
        raise Mistake(
            f"the model is made on the meta device, and {type(module).__name__} has no reset_parameters to give its weights "
            f"values: add one, make the model as usual (one that does not fit in memory is made on disk), or give "
            f"Job(weights='model.safetensors')"
        )
    module.to_empty(device="cpu", recurse=False)
    if own is not None:
        own()
    if theirs is not None:
        theirs(module)


@calls_user("model")
def fresh_model(job: Job) -> nn.Module:
    """The job's model as plain training starts with it, and the random state for its first step."""
    random_state.seed(job.seed)
    try:
        made = job.model()
        if not isinstance(made, nn.Module):
            raise Mistake(
                f"the job's model gave {value_text(made)}: it must give a torch.nn.Module, such as model=lambda: MyModel()"
            )
        model = fill_weights(made, job)
    except (Mistake, MemoryError):
        raise
    except Exception as error:
        raise Mistake(f"the job's model could not be made: {failure_text(error)}{install_hint(error)}") from error
    random_state.seed_worker(job.seed, job.mesh.draws_as)
    return model.to("cuda") if torch.cuda.is_available() else model
