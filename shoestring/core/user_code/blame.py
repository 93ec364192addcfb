"""Decides whether an exception is a fault of the user's job or of shoestring, from its stack frames.

Everything in a job is called through our code, so our frames alone prove nothing. What counts is the innermost frame
that belongs to no library:

    of the user                                     theirs, and that is the line to look at
    ours, and marked as calling what the user gave  theirs: a model of torch's own layers has no frame of the user
    ours, and layers of a model run below it        theirs, at the user's last line above it; ours if this is a second computation of
                                                    these layers (`repeats_user`), because the first one worked
    ours otherwise                                  ours

Torch's own lines tell a user nothing: if a layer of torch fails, its module is named, as in the model's
`named_modules`.

The marks are those of core/user_code/seams.py; a function with a mark is ours whichever package it is of. What fails below a
function that changes what the user gave (`changes_user`), as `FusedOptimizer` changes an optimizer, is ours too. A mode
that watches operations stands between a layer and its kernel, and passes on what fails there: it counts as a library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, extract_tb, walk_tb
from types import FrameType, TracebackType
from typing import NamedTuple, TypeGuard

from torch import nn

from shoestring.core.errors import error_sentence
from shoestring.core.user_code.seams import Seam, SeamMark, seam_of

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

PASSING = {"contextlib.py", "_contextlib.py", "_ops.py"}  # library files that only pass calls on


class Frame(NamedTuple):
    """A line that an exception passed."""

    line: FrameSummary
    mark: SeamMark | None = None  # of the function that it is in


@dataclass(frozen=True)
class Blame:
    ours: bool
    line: str  # my.py line 12; its model; training/memory/recompute/recompute.py line 150
    library: str = ""  # where in a library it failed, if no line of the user was nearer
    module: str = ""  # of the model: head (Linear)

    @property
    def place(self) -> str:
        """my.py line 12, in the module head (Linear); its optimizer (sparse_adam.py line 30);
        training/memory/recompute/recompute.py line 150."""
        if self.module:
            return f"{self.line}, in the module {self.module}"
        return f"{self.line} ({self.library})" if self.library else self.line


def blame_for(error: BaseException, tells: Callable[[FrameType], bool] = lambda frame: True) -> Blame:
    """Whose failure an exception is, and where: the user's line, and the module of the model that was running. Only
    frames that `tells` accepts are looked at."""
    found = blame(frames_of(error.__traceback__, tells))
    return found if found.ours else replace(found, module=failed_module(error))


def failed_module(error: BaseException) -> str:
    """The name and class of the innermost module whose forward failed; empty if none did, or only the model itself."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    first = [
        frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        for frame in frames
        if frame.f_code.co_name == "forward"
    ]
    called = [one for one in first if is_module(one)]
    if not called:
        return ""
    inner = called[-1]
    around = (value for frame in frames for value in frame.f_locals.values() if is_module(value))  # the outermost first
    names = ({id(module): name for name, module in one.named_modules()} for one in around)
    name = next((known[id(inner)] for known in names if id(inner) in known), "")
    return f"{name} ({type(inner).__name__})" if name else ""


def failure_text(error: BaseException) -> str:
    """What went wrong and where, in one line: RuntimeError: no such thing (training/memory/recompute/recompute.py line 150)."""
    return f"{error_sentence(error)} ({blame_for(error).place})"


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether it is a module; nothing is read from the object itself, whose `__class__` may raise."""
    return issubclass(type(value), nn.Module)


def frames_of(traceback: TracebackType | None, tells: Callable[[FrameType], bool] = lambda frame: True) -> list[Frame]:
    """The lines that an exception passed and that `tells` accepts, outermost first."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return [
        Frame(line, seam_of(frame.f_code, frame.f_globals))
        for line, frame in zip(extract_tb(traceback), frames, strict=False)
        if tells(frame)
    ]


def blame(frames: Sequence[Frame]) -> Blame:
    """Whose failure it is, and where, from the lines that an exception passed, outermost first."""
    telling = [number for number, frame in enumerate(frames) if not is_library(frame)]
    if not telling:
        return Blame(False, line(frames[-1].line) if frames else "an unknown place")
    inner, frame = telling[-1], frames[telling[-1]]
    if not is_ours(frame):
        return Blame(False, line(frame.line))
    here, above = frame.mark, [frames[number].mark for number in telling[:-1] if is_ours(frames[number])][-1:]
    changed = any(mark is not None and mark.seam is Seam.CHANGES for mark in above)
    if here is not None and here.seam is Seam.CALLS and not changed:
        return Blame(False, f"its {here.what}", below(frames, inner))
    repeated = here is not None and here.seam is Seam.REPEATS
    if not repeated and any(is_layer(one.line) for one in frames[inner + 1 :]):
        called = next(number for number, one in enumerate(frames) if is_layer(one.line))  # the model
        own = [frames[number].line for number in telling if number > called and not is_ours(frames[number])]
        return Blame(False, line(own[-1])) if own else Blame(False, "its model", below(frames, inner))
    return Blame(True, f"{place_of(frame.line)} line {frame.line.lineno}")


def below(frames: Sequence[Frame], inner: int) -> str:
    """Where in a library it failed, called by a frame of ours: the innermost frame before a mode that watches operations."""
    inside = [
        frame.line
        for frame in takewhile(lambda frame: not is_watcher(frame.line), frames[inner + 1 :])
        if Path(frame.line.filename).name not in PASSING
    ]
    return line(inside[-1]) if inside else ""


def is_watcher(frame: FrameSummary) -> bool:
    """Whether it is one of our modes that pass an operation on."""
    modes = ("__torch_dispatch__", "__torch_function__")
    return frame.name in modes and Path(frame.filename).resolve().is_relative_to(ROOT) and "func(" in (frame.line or "")


def line(frame: FrameSummary) -> str:
    return f"{Path(frame.filename).name} line {frame.lineno}"


def place_of(frame: FrameSummary) -> str:
    """The file of a frame of ours: from our package on, or where it is of another room's, its name."""
    path = Path(frame.filename).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def is_ours(frame: Frame) -> bool:
    """Whether it is our code, or that of a room which marked it; the jobs that come with it are jobs like any other."""
    path = Path(frame.line.filename).resolve()
    return (path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "jobs")) or (
        frame.mark is not None and not path.is_relative_to(ROOT)
    )


def is_library(frame: Frame) -> bool:
    """Whether it is neither ours nor the user's."""
    if frame.mark is not None:
        return False
    found = frame.line
    if Path(found.filename).resolve().is_relative_to(ROOT):
        return is_watcher(found)
    installed = {"site-packages", "dist-packages"} & set(Path(found.filename).parts)
    return bool(installed) or found.filename.startswith(("<", *LIBRARIES))


def is_layer(frame: FrameSummary) -> bool:
    """Whether a model's layer runs there: of torch, called as a module, or of a library of models."""
    parts = Path(frame.filename).parts
    if "nn" in parts and "modules" in parts and "torch" in parts:
        return frame.name in ("forward", "_call_impl", "_wrapped_call_impl")
    installed = next(
        (parts[number + 1] for number, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")), ""
    )
    return installed not in ("", "torch", "numpy")
