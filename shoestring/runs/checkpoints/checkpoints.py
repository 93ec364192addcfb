"""Checkpoints: the whole state of a run at a step. A run resumed from one ends with the same bits as a run that never
stopped.

    checkpoints/step-00000040/
      weights.safetensors    the model, by the names of its state_dict
      state.safetensors      the optimizer's moments, random states, ...
      state.json             everything that is not a tensor
      manifest.json          size and SHA-256 of the others; its last line is its own

    checkpoints/best-00000040/   the weights that were best in validation: the same files, whose state has the metrics and no moments

A checkpoint is written under a temporary name, synced and renamed, so it appears complete or not at all. Training stops
only while tensors are written to the file: the copy in the kernel's page cache is the snapshot, and it takes no memory
of the process. Hashing and syncing follow in the background. A checkpoint that does not match its SHA-256 is never
loaded and never overwritten.

Contract: A killed and resumed run ends with the same bits (tests/runs/test_kill.py). Nothing that is read back can run
code (tests/test_code_from_files.py). Why no snapshot is kept in memory: decisions/005.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.files.files import sync
from shoestring.core.files.regular import NotRegular, read_regular, regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.core.running.run_state import StoredTensor
from shoestring.runs.checkpoints.packing import pack, unpack
from shoestring.runs.weights.disk_weights import Reader
from shoestring.runs.weights.tensors import TensorFile, UnreadableTensors, write_tensors

FILES = ("weights.safetensors", "state.safetensors", "state.json")
BEST = "best"  # the kind of checkpoint that holds the best weights
# Errors raised by reading a file with a valid seal but impossible content; MemoryError: an absurd size
BROKEN = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    RuntimeError,
    MemoryError,
)


@dataclass(frozen=True)
class RunCheckpoint:
    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.rpartition("-")[2])

    def state(self) -> dict[str, Any]:
        """Everything but the weights."""
        return self.unpack(TensorFile)

    def outline(self) -> dict[str, Any]:
        """The same with tensors on the meta device, which take no memory."""
        return self.unpack(lambda path: TensorFile(path).outline())

    def unpack(self, tensors: Callable[[Path], TensorFile | dict[str, Tensor]]) -> dict[str, Any]:
        try:
            document = parse_json(read_regular(self.path / "state.json"))
            state = unpack(document, tensors(self.path / "state.safetensors"))
        except (OSError, *BROKEN) as error:
            raise UnreadableTensors(f"it can't be unpacked: {type(error).__name__}: {error}") from error
        if not isinstance(state, dict):
            raise UnreadableTensors("it can't be unpacked: it holds no state")
        return state

    def files(self) -> list[Path]:
        """Files in the run's folder that hold parts of this state: state on disk has a file of its own."""
        document = dict(parse_json(read_regular(self.path / "state.json"))["dict"])
        return [self.own_file(f"{name}.bin") for name in document.get("on_disk", {"list": []})["list"]]

    def own_file(self, name: str) -> Path:
        """A file that the checkpoint names; only files directly in the run's folder are accepted."""
        if Path(name).name != name or not name.endswith(".bin"):
            raise UnreadableTensors(f"it says that its state lies in {name[:80]!r}, which is no file of its run")
        return self.path.parent.parent / name

    def weights(self) -> TensorFile:
        """The weights that were in memory when it was saved."""
        return TensorFile(self.path / "weights.safetensors")

    def averages(self) -> dict[str, StoredTensor]:
        """Averages of the weights (EMA), if the run keeps them."""
        file = TensorFile(self.path / "state.safetensors")
        return {
            name: file.later(f"state/parts/{part}/averages/{name}")
            for part, state in self.outline()["parts"].items()
            if isinstance(state, dict)
            for name in state.get("averages", ())
        }

    def all_weights(self, trained: bool = False) -> dict[str, StoredTensor]:
        """All weights; averages in place of weights where the run keeps them, unless `trained`. Weights that lie
        elsewhere are read when needed."""
        inside = self.weights()
        stream = self.outline()["parts"].get("stream")
        lying = (
            Reader(self.own_file(str(stream["file"])), stream["regions"]).weights(stream["weights"]) if stream else {}
        )
        return {name: inside.later(name) for name in inside} | lying | ({} if trained else self.averages())

    def aliases(self) -> dict[str, str]:
        """Second names of tied weights -> the name under which they are stored."""
        return {
            name.removeprefix("alias "): of for name, of in self.weights().metadata.items() if name.startswith("alias ")
        }


@contextmanager
def reading_untrusted(checkpoint: RunCheckpoint) -> Iterator[None]:
    """While inside, impossible content is reported as the checkpoint's fault: its seal may be valid although no run of
    ours wrote it."""
    try:
        yield
    except Mistake:
        raise
    except BROKEN as error:
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise Mistake(
            f"the checkpoint {checkpoint.path} has impossible content ({type(error).__name__}: {said}): it is whole, and no run of "
            f"this job has written it; use another checkpoint, or begin anew with --fresh"
        ) from error


def whole_number(value: Any) -> int:
    """A count in a state, such as its step; refused if it is no whole number."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise UnreadableTensors(f"{str(value)[:60]} is no number of steps")
    return value


def best_in(state: Mapping[str, Any]) -> tuple[float, int] | None:
    """The best validation value in a state, and its step."""
    if state["best"] is None:
        return None
    value, step = state["best"]
    return float(value), whole_number(step)


def draft(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor | StoredTensor],
    state: Mapping[str, Any],
    aliases: Mapping[str, str],
    kind: str = "step",
) -> Path:
    """Write a checkpoint's files under a temporary name. A failure leaves nothing behind."""
    path = folder / f"{kind}-{step:08}.tmp-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        tensors: dict[str, Tensor | StoredTensor] = {}
        document = pack(state, tensors, "state")
        write_tensors(
            path / "weights.safetensors",
            weights,
            {"format": "pt"} | {f"alias {name}": of for name, of in aliases.items()},
        )
        write_tensors(path / "state.safetensors", tensors)
        (path / "state.json").write_text(json.dumps(document), encoding="utf-8")
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def publish(path: Path) -> tuple[RunCheckpoint, int]:
    """Hash, sync and rename a draft; returns the checkpoint and its size in bytes."""
    try:
        files = {
            name: {"bytes": (path / name).stat().st_size, "sha256": digest(path / name, sync=True)} for name in FILES
        }
        line = json.dumps({"files": files}).encode()
        with open(path / "manifest.json", "wb") as file:
            file.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync(path)
        final = path.with_name(path.name.partition(".tmp-")[0])
        if final.exists():
            move_aside(RunCheckpoint(final))
        path.rename(final)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return RunCheckpoint(final), sum((final / name).stat().st_size for name in FILES)


def digest(path: Path, sync: bool = False) -> str:
    with open(path, "rb", opener=regular) as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(checkpoint: RunCheckpoint, parts: Collection[str] = ()) -> str:
    """What is wrong with a checkpoint; empty if its bytes are unchanged and it can be unpacked to these parts of a
    state."""
    return changed_part(checkpoint) or unfit(checkpoint, parts)


def unfit(checkpoint: RunCheckpoint, parts: Collection[str]) -> str:
    """Why a checkpoint can't be used although its bytes are unchanged: written by another version, or by somebody else."""
    try:
        checkpoint.weights()
        state = checkpoint.outline()
    except (OSError, UnreadableTensors, RuntimeError) as error:
        return str(error).splitlines()[0]
    return next((f"its state has no {name!r}" for name in parts if name not in state), "")


def changed_part(checkpoint: RunCheckpoint) -> str:
    """Which part of a checkpoint was changed since it was written; empty if none."""
    name = "manifest.json"  # the file being read
    try:
        line, own, rest = read_regular(checkpoint.path / "manifest.json").split(b"\n", 2)
        if rest or hashlib.sha256(line).hexdigest().encode() != own:
            return "manifest.json is not what was written"
        files = parse_json(line)["files"]
        for name in FILES:
            path = checkpoint.path / name
            if path.stat().st_size != files[name]["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {files[name]['bytes']}"
            if digest(path) != files[name]["sha256"]:
                return f"{name} does not match its SHA-256"
        for path in checkpoint.files():
            if not path.exists():
                return f"{path.name}, in which its state lies, is not there any more"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except NotRegular as error:
        return str(error)
    except OSError as error:
        return f"{name} can't be read ({error.strerror or type(error).__name__})"
    except UnreadableTensors as error:
        return str(error)
    except BROKEN as error:
        return f"manifest.json can't be read ({type(error).__name__})"
    return ""


def list_checkpoints(folder: Path, kind: str = "step") -> list[RunCheckpoint]:
    """The checkpoints of a run, oldest first, good or not. Kind "best": weights that were best in validation."""
    found = [
        RunCheckpoint(path)
        for path in folder.glob(f"{kind}-*")
        if re.fullmatch(f"{kind}-[0-9]+", path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda one: one.step)


def newest_good(
    folder: Path, parts: Collection[str] = ()
) -> tuple[RunCheckpoint | None, list[tuple[RunCheckpoint, str]]]:
    """The newest usable checkpoint that has these parts of a state, and the unusable newer ones, with the reason."""
    bad: list[tuple[RunCheckpoint, str]] = []
    for one in reversed(list_checkpoints(folder)):
        reason = damage(one, parts)
        if not reason:
            return one, bad
        bad.append((one, reason))
    return None, bad


def move_aside(checkpoint: RunCheckpoint) -> None:
    """Rename a checkpoint that can't be used."""
    number = 0
    while (aside := checkpoint.path.with_name(f"{checkpoint.path.name}.damaged-{number}")).exists():
        number += 1
    checkpoint.path.rename(aside)


def clear_drafts(folder: Path) -> None:
    """Remove drafts of processes that died; only call it while no other process writes."""
    for kind in ("step", BEST):
        for path in folder.glob(f"{kind}-*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)


def make_room(folder: Path, best: int | None) -> RunCheckpoint | None:
    """Delete the oldest checkpoint that can be spared, and return it. The newest good one is never deleted, the best
    one only after all others."""
    good, _ = newest_good(folder)
    older = [one for one in list_checkpoints(folder) if good is not None and one.step < good.step]
    spared = [one for one in older if one.step != best] or older
    if not spared:
        return None
    shutil.rmtree(spared[0].path, ignore_errors=True)
    return spared[0]


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest checkpoints and the best one."""
    for one in list_checkpoints(folder)[:-keep]:
        if one.step != best:
            shutil.rmtree(one.path, ignore_errors=True)


def best_known(checkpoint: RunCheckpoint) -> int | None:
    """The step of the best validation recorded in a checkpoint."""
    try:
        course = checkpoint.outline()["parts"]["course"]
        return int(course["best"][1]) if course["best"] else None
    except (UnreadableTensors, OSError, LookupError, TypeError, ValueError):
        return None


def prune_best(folder: Path) -> None:
    """Delete best weights that no remaining checkpoint refers to. Those newer than all checkpoints stay, because the
    next one will refer to them."""
    there, best = list_checkpoints(folder), list_checkpoints(folder, BEST)
    if len(best) > 1 and there:
        known = set(map(best_known, there))
        for one in best:
            if one.step not in known and one.step <= there[-1].step:
                shutil.rmtree(one.path, ignore_errors=True)


def forget_best(folder: Path, step: int) -> None:
    """Delete best weights found after this step: the run is resumed from here, so they are no longer its own."""
    for one in list_checkpoints(folder, BEST):
        if one.step > step:
            shutil.rmtree(one.path, ignore_errors=True)
