"""Tensors that exist before a step and are not the model's: a teacher in the loss, constants, data kept in memory.

They are found by following references, as Python's garbage collector does: from the job's functions to their closures,
defaults, bound objects and globals, through containers and attributes, to any depth. The collector's own function lists
an object's references, so no method of the user's is called and no property read.

    globals      those that a function's code names, and all of a job file. Globals of installed packages, Python's library and ours
                 hold nothing of the job, and are not followed
    not seen     until an operation uses it: tensors held only by C++ (a TorchScript module) or by globals of an installed package. Never
                 seen: memory that belongs to no tensor (NumPy arrays, packed weights of quantized layers), and what autograd keeps for
                 a tensor that was computed with gradients before training
    not counted  tensors in a mapped file, whose memory the kernel can take back; tensors without memory (on the meta device)
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.job import Job
from shoestring.core.private import LOADER_ITERATORS, FakeTensor, dense_parts, storage_address, storage_id
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh

OURS = "shoestring"
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", OURS}  # packages whose globals never hold anything of a job
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
ATOMS = frozenset(
    (
        int,
        float,
        str,
        bool,
        bytes,
        complex,
        type(None),
        type(...),
        range,
        slice,
        CodeType,
        BuiltinFunctionType,
        FrameType,
        ReferenceType,
        torch.dtype,
        torch.device,
        torch.Size,
    )
)
# Not followed: the link to other workers, and batches in transit from loading processes, whose number varies
CLOSED = (Mesh, Link, *LOADER_ITERATORS)
SET_BY_PLANNING = ("largest", "mesh", "origin")  # fields of a Job
OF_DATA = ("data", "held_out", "sampler", "collate", "clients")
IN_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")  # mapped "files" that are memory


def nothing() -> Iterable[object]:
    return ()


@dataclass(frozen=True)
class Holders:
    """Objects that hold tensors besides a model and its optimizer."""

    job: Job
    data: Callable[[], Iterable[object]] = nothing  # returns what the source of batches holds at the moment
    original: nn.Module | None = None  # the model of which the run has a temporary copy: training has only one of them
    on_device: bool = False  # whether the model will be on a device with its own memory, where the data are not

    def find(self, run: Run) -> Iterator[tuple[Tensor, str]]:
        """Every tensor that they hold, with its role; a tensor may come twice."""
        mapped = MappedFiles()
        hidden = storages_of((self.original,)) - storages_of((run.model,)) if self.original is not None else set()
        device = next(run.model.parameters()).device.type
        for role, roots in (
            ("buffers", (run.model,)),
            ("optimizer", (run.optimizer,)),
            ("data", () if self.on_device else self.data()),
            ("constants", functions_of(self.job, without=OF_DATA if self.on_device else ())),
        ):
            for part in dense_tensors_in(roots):
                if (
                    part.device.type == device
                    and storage_id(part.untyped_storage()) not in hidden
                    and not mapped.have(part)
                ):
                    yield part, role

    def real(self) -> Iterator[Tensor]:
        """The real tensors in this process before training: those that the job holds, and the model if it is given."""
        mapped = MappedFiles()
        return (
            part
            for part in dense_tensors_in((self.original, *self.data(), *functions_of(self.job)))
            if not isinstance(part, FakeTensor) and not mapped.have(part)
        )

    def real_bytes(self) -> int:
        """Bytes of those, counting each storage once."""
        return sum(
            {
                storage_id(storage): storage.nbytes() for part in self.real() for storage in (part.untyped_storage(),)
            }.values()
        )


def storages_of(roots: Iterable[object]) -> set[int]:
    return {storage_id(part.untyped_storage()) for part in dense_tensors_in(roots)}


def functions_of(job: Job, without: tuple[str, ...] = ()) -> list[object]:
    """A job's functions and objects, and all globals of a job file, which exist because of it."""
    found = [getattr(job, field.name) for field in fields(job) if field.name not in (*SET_BY_PLANNING, *without)]
    if without:  # globals may be among the excluded data
        return found
    file = Path(job.origin.file).resolve() if job.origin is not None else None
    spaces = (one.__globals__ for one in found if type(one) is FunctionType)
    own = next((space for space in spaces if file and Path(space.get("__file__") or "").resolve() == file), {})
    return [*found, *own.values()]


def dense_tensors_in(roots: Iterable[object]) -> Iterator[Tensor]:
    return (part for tensor in tensors_in(roots) for part in dense_parts(tensor))


def tensors_in(roots: Iterable[object]) -> Iterator[Tensor]:
    """Every tensor that can be reached from objects, once.

    >>> held = {"teacher": [torch.zeros(2)]}
    >>> list(tensors_in([lambda held=held: held]))
    [tensor([0., 0.])]
    """
    return (one for one in objects_in(roots) if issubclass(type(one), Tensor))


def objects_in(roots: Iterable[object], closed: Callable[[Any], bool] = lambda one: False) -> Iterator[Any]:
    """Every object that can be reached from others and may belong to a job, once; nothing that is `closed`."""
    first = list(roots)
    given = set(map(id, first))  # our own functions lead to the whole run, so they are followed only if they were given
    stack: list[Any] = [first]
    seen = {id(first)}
    while stack:
        for one in referents(stack.pop(), given):
            kind = type(one)
            if kind in ATOMS or id(one) in seen:
                continue
            seen.add(id(one))
            if closed(one):
                continue
            yield one
            if kind in (Tensor, nn.Parameter) and one.is_leaf:  # the collector does not know of gradients
                stack.append([one.grad])
            if not issubclass(kind, (*CLOSED, FakeTensor)):
                stack.append(one)


def referents(one: Any, given: set[int]) -> Iterable[Any]:
    """The objects that an object refers to, as far as they may belong to a job."""
    kind = type(one)
    if kind is FunctionType:
        return objects_of_function(one) if id(one) in given or package_of(one.__globals__) != OURS else ()
    if (
        kind is MethodType
        and id(one) not in given
        and type(one.__func__) is FunctionType
        and package_of(one.__func__.__globals__) == OURS
    ):
        return ()
    if issubclass(kind, ModuleType):  # of a module, only names used by a function's code count
        return ()
    if issubclass(kind, type):
        found = gc.get_referents(
            one
        )  # its names, and its bases in tuples; reading them off the class would call its metaclass
        names = next((each for each in found if type(each) is dict), {})
        bases = (each for each in found if type(each) is tuple)
        return () if is_of_library(names) else [*names.values(), *bases, kind]
    if kind is ContextVar:
        return [one.get(None), *gc.get_referents(one)]
    if kind is np.ndarray and one.dtype.hasobject:
        return list(one.flat)
    return gc.get_referents(one)


def package_of(names: dict[str, Any]) -> str:
    """The package of a class or a module, from its names; empty if they do not say."""
    module = names.get("__module__", names.get("__name__"))
    return module.partition(".")[0] if type(module) is str else ""


def is_of_library(names: dict[str, Any]) -> bool:
    package = package_of(names)
    return package in LIBRARIES or is_installed(package)


@cache
def is_installed(package: str) -> bool:
    """Whether an imported package lies where packages are installed."""
    module = sys.modules.get(package)
    spec = (
        ModuleType.__getattribute__(module, "__dict__").get("__spec__")
        if issubclass(type(module), ModuleType)
        else None
    )
    origin = spec.origin if type(spec) is ModuleSpec else None
    return type(origin) is str and not INSTALLED.isdisjoint(Path(origin).parts)


def objects_of_function(function: FunctionType) -> list[Any]:
    """The objects that a function holds: its closure, defaults and attributes, and the globals that its code names."""
    held = [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]
    return held if is_of_library(function.__globals__) else [*held, *named_globals(function)]


def named_globals(function: FunctionType) -> Iterator[Any]:
    """The globals that a function's code names, and attributes of modules that it names with them
    (`helpers.teacher`), also of those that it imports itself."""
    names, own = names_in(function.__code__), function.__globals__
    package = own.get("__package__")
    near = {f"{package}.{name}" for name in names} if type(package) is str and package else set()
    imported = (sys.modules[name] for name in (names | near) & sys.modules.keys())
    inside = (ModuleType.__getattribute__(one, "__dict__") for one in imported if issubclass(type(one), ModuleType))
    spaces, seen = [own, *(one for one in inside if not is_of_library(one))], set[int]()
    while spaces:
        space = spaces.pop()
        seen.add(id(space))
        for name in names & space.keys():
            value = space[name]
            if issubclass(type(value), ModuleType):
                inside = ModuleType.__getattribute__(value, "__dict__")
                if id(inside) not in seen and not is_of_library(inside):
                    spaces.append(inside)
            else:
                yield value


def names_in(code: CodeType) -> set[str]:
    """The names that code uses, including functions within it; strings too, which may be names for getattr."""
    inside = (names_in(one) for one in code.co_consts if type(one) is CodeType)
    return set(code.co_names).union((one for one in code.co_consts if type(one) is str), *inside)


class MappedFiles:
    """The files mapped into this process, as of the first use."""

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        places = (line.split(maxsplit=5) for line in lines)
        spans = [
            place[0].split("-")
            for place in places
            if len(place) == 6 and place[5][0] == "/" and not place[5].startswith(IN_MEMORY)
        ]
        return sorted((int(begin, 16), int(end, 16)) for begin, end in spans)

    def have(self, tensor: Tensor) -> bool:
        """Whether a tensor's numbers are in one of them."""
        address = storage_address(tensor) if tensor.device.type == "cpu" else 0
        if not address:
            return False
        place = bisect_right(self.ranges, (address, sys.maxsize)) - 1
        return place >= 0 and address < self.ranges[place][1]
