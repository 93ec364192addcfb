"""Whose failure an exception is, told by its frames: the job's or ours.

Everything of a job is called through our code, so that our frames are there says nothing. What counts is the innermost frame that
belongs to no library:

    of the user                                     theirs, and that is the line to look at
    ours, and it calls what the user gave (SEAMS)   theirs: a model of torch's own layers has no frame of the user
    ours, and layers of a model run below it        theirs, at the last line of the user's before; but not where we compute them again
                                                    (REPLAYS), which went well the first time
    ours otherwise                                  ours

Torch's own lines tell a user nothing: where a layer of torch fails, the module is named, as the model's `named_modules` has it.

`FusedOptimizer` changes the user's optimizer, so what fails in it when `FusedOptimizer` calls is ours too (CHANGERS).
A mode that watches operations stands
between a layer and its kernel, and passes on what fails there: it counts as a library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, extract_tb, walk_tb
from typing import TypeGuard

from torch import nn

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# File and function of ours -> what of the job it calls. "" stands for every function of the file.
SEAMS: dict[tuple[str, str], str] = {
    ("core/job.py", "default_forward"): "model",
    ("core/job.py", "default_loss"): "loss",
    ("core/job.py", "default_optimizer"): "optimizer",
    ("core/called.py", "call_loss"): "loss",
    ("core/optimizer.py", "made_optimizer"): "optimizer",
    ("core/schedule.py", "scheduled"): "schedule",
    ("core/schedule.py", "step"): "schedule",
    ("core/schedule.py", "factor"): "schedule",
    ("core/run.py", "gradients"): "model or loss",
    ("core/run.py", "backward"): "backward pass",
    ("core/run.py", "update"): "optimizer",
    ("data/feed.py", ""): "data",
    ("data/fetch.py", ""): "data",
    ("data/rounds.py", ""): "data",
    ("data/kinds.py", ""): "data",
    ("data/lengths.py", ""): "data",
    ("data/clients.py", ""): "clients",
    ("data/partition.py", ""): "data",
    ("data/columns.py", ""): "data",
    ("core/clients.py", ""): "clients",
    ("federated/records.py", ""): "clients",
    ("federated/simulation/cohort/sequential.py", "train_one"): "model, loss or optimizer",
    ("federated/simulation/cohort/engine.py", "__init__"): "model",
    ("federated/simulation/cohort/method_choice.py", "choose_method"): "model",
    ("federated/simulation/cohort/held_out.py", "device_sums"): "model, loss or metrics",
    ("federated/runner.py", "ended"): "show",
    ("core/batch.py", "mapped"): "data",
    ("core/batch.py", "samples"): "data",
    ("core/batch.py", "rows_of"): "data",
    ("training/loop.py", "steps"): "optimizer",
    ("training/validation.py", "validated"): "validate",
    ("training/validation.py", "means"): "weight",
    ("training/validation.py", "unguarded"): "model, loss or metrics",
    ("training/validation.py", "named"): "metrics",
    ("training/validation.py", "untouched"): "model",
    ("training/validation.py", "check_names"): "metrics",
    ("training/evidence/held_out.py", "rehearse_validation"): "weight",
    ("jobfile.py", "loaded_job"): "file",
    ("runs/initial_weights.py", "initialise"): "model",
    ("runs/initial_weights.py", "fresh_model"): "model",
    ("training/execution/training.py", "trained_model"): "show",
    ("training/tensor/split_layers.py", "product"): "model",
    ("training/tensor/split_vocabulary.py", ""): "model or loss",
}
REPLAYS = {("training/memory/recompute.py", "replay")}
CHANGERS = {("training/memory/fused.py", "update")}

PASSING = {"contextlib.py", "_contextlib.py", "_ops.py"}  # of libraries: they only call on


@dataclass(frozen=True)
class Blame:
    ours: bool
    line: str  # my.py line 12; its model; training/memory/recompute.py line 150
    library: str = ""  # where in a library it failed, if no line of the user was closer
    module: str = ""  # of the model: head (Linear)

    @property
    def place(self) -> str:
        """my.py line 12, in the module head (Linear); its optimizer (sparse_adam.py line 30); training/memory/recompute.py line 150."""
        if self.module:
            return f"{self.line}, in the module {self.module}"
        return f"{self.line} ({self.library})" if self.library else self.line


def blamed(error: BaseException) -> Blame:
    """Whose failure an exception is, and where: the user's line, and the module of the model that was running."""
    found = blame(extract_tb(error.__traceback__))
    return found if found.ours else replace(found, module=failed_module(error))


def failed_module(error: BaseException) -> str:
    """The name and the class of the innermost module whose forward failed; empty if none did, or it is the model itself."""
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
    """What went wrong and where, in a line: RuntimeError: no such thing (training/memory/recompute.py line 150)."""
    try:
        said = (str(error).strip().splitlines() or [""])[0][:160]
    except Exception:  # a class of the user's, whose text can't be had
        said = ""
    return f"{type(error).__name__}{f': {said}' * bool(said)} ({blamed(error).place})"


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether it is a module; nothing is asked of the object itself, whose `__class__` may raise."""
    return issubclass(type(value), nn.Module)


def blame(frames: Sequence[FrameSummary]) -> Blame:
    """Whose failure it is, and where, from the frames of an exception, outermost first."""
    telling = [number for number, frame in enumerate(frames) if not is_library(frame)]
    if not telling:
        return Blame(False, line(frames[-1]) if frames else "an unknown place")
    inner, frame = telling[-1], frames[telling[-1]]
    if not is_ours(frame):
        return Blame(False, line(frame))
    here, above = named(frame), [named(frames[number]) for number in telling[:-1] if is_ours(frames[number])][-1:]
    seam = SEAMS.get(here) or SEAMS.get((here[0], ""))
    if seam is not None and not set(above) & CHANGERS:
        return Blame(False, f"its {seam}", below(frames, inner))
    if here not in REPLAYS and any(map(is_layer, frames[inner + 1 :])):
        called = next(number for number, one in enumerate(frames) if is_layer(one))  # the model
        own = [frames[number] for number in telling if number > called and not is_ours(frames[number])]
        return Blame(False, line(own[-1])) if own else Blame(False, "its model", below(frames, inner))
    return Blame(True, f"{here[0]} line {frame.lineno}")


def below(frames: Sequence[FrameSummary], inner: int) -> str:
    """Where in a library it failed, called by a frame of ours: the innermost frame before a mode that watches operations."""
    inside = [
        frame
        for frame in takewhile(lambda frame: not is_watcher(frame), frames[inner + 1 :])
        if Path(frame.filename).name not in PASSING
    ]
    return line(inside[-1]) if inside else ""


def is_watcher(frame: FrameSummary) -> bool:
    """Whether it is a mode of ours that passes an operation on."""
    modes = ("__torch_dispatch__", "__torch_function__")
    return frame.name in modes and Path(frame.filename).resolve().is_relative_to(ROOT) and "func(" in (frame.line or "")


def line(frame: FrameSummary) -> str:
    return f"{Path(frame.filename).name} line {frame.lineno}"


def named(frame: FrameSummary) -> tuple[str, str]:
    """File and function of one of our frames."""
    return Path(frame.filename).resolve().relative_to(ROOT).as_posix(), frame.name


def is_ours(frame: FrameSummary) -> bool:
    """Whether it is our code; the jobs that come with it are jobs like any other."""
    path = Path(frame.filename).resolve()
    return path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "jobs")


def is_library(frame: FrameSummary) -> bool:
    """Whether it is neither ours nor the user's."""
    if Path(frame.filename).resolve().is_relative_to(ROOT):
        return is_watcher(frame)
    installed = {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    return bool(installed) or frame.filename.startswith(("<", *LIBRARIES))


def is_layer(frame: FrameSummary) -> bool:
    """Whether a model's layer runs there: of torch, called as a module, or of a library of models."""
    parts = Path(frame.filename).parts
    if "nn" in parts and "modules" in parts and "torch" in parts:
        return frame.name in ("forward", "_call_impl", "_wrapped_call_impl")
    installed = next(
        (parts[number + 1] for number, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")), ""
    )
    return installed not in ("", "torch", "numpy")
