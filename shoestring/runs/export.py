"""What a run leaves behind, in other people's formats."""
from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.files import drafted, write_whole
from shoestring.core.job import Job
from shoestring.runs.checkpoints import BEST, Checkpoint, damage, newest_good, saved
from shoestring.runs.folder import Folder, holder
from shoestring.runs.history import History, best_of
from shoestring.runs.report import report_of
from shoestring.runs.tensors import write_tensors


def checkpoint_of(folder: Folder, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest good one."""
    there = saved(folder.checkpoints)
    steps = ", ".join(str(one.step) for one in there) or "none"
    if step is None:
        found, _ = newest_good(folder.checkpoints, ("parts",))
        if found is None:
            raise Mistake(f"{folder.path} has no good checkpoint (saved: {steps}): train it first")
        return found
    for one in there:
        if one.step == step:
            if reason := damage(one, ("parts",)):
                raise Mistake(f"the checkpoint of step {step} is damaged ({reason}); there are {steps}")
            return one
    raise Mistake(f"{folder.path} has no checkpoint of step {step}; there are {steps}")


def best_weights(folder: Folder) -> Checkpoint:
    """The weights that were best in validation."""
    there, found = saved(folder.checkpoints, BEST), best_of(History().read(folder.path).validated)
    newest = "without --best, the newest weights are exported"
    if found is None and not there:
        raise Mistake(f"{folder.path} has no best weights: nothing was validated there yet, or its goal was never a number; give the Job "
                      f"held_out=lambda: batches ({newest})")
    best = there[-1] if found is None else next((one for one in there if one.step == found.step), None)
    if best is None:
        assert found is not None, "else the newest is taken"
        steps = ", ".join(str(one.step) for one in there) or "none"
        raise Mistake(f"the best validation of {folder.path} was after step {found.step}, whose weights are not there (there: {steps}): "
                      f"they could not be saved, or somebody removed them; {newest}")
    if reason := damage(best, ("parts",)):
        raise Mistake(f"the best weights, of step {best.step}, are damaged ({reason}); {newest}")
    return best


def newer_weights(folder: Folder, checkpoint: Checkpoint) -> str:
    """What is to be said of a checkpoint that does not have the last weights of its run; empty if it does."""
    _, damaged = newest_good(folder.checkpoints)
    if damaged:
        newest, reason = damaged[0]
        return f"these are the weights after step {checkpoint.step}: the checkpoint of step {newest.step} is damaged ({reason})"
    done = History().read(folder.path).steps
    if not done or done.number[-1] <= checkpoint.step:
        return ""
    is_at = "goes on, and is at" if holder(folder.path) is not None else "went on to"
    return f"these are the weights after step {checkpoint.step}: the run {is_at} step {done.number[-1]}, which is not saved"


def export_weights(checkpoint: Checkpoint, target: Path, trained: bool = False) -> Path:
    """The weights alone, under the names of the model's state_dict, each stored once; `trained`: not their averages."""
    new(target)
    with drafted(target) as draft:
        write_tensors(draft, checkpoint.all_weights(trained), {"format": "pt"})
    return target


def export_hugging_face(checkpoint: Checkpoint, job: Job, target: Path, trained: bool = False) -> Path:
    """A folder that `from_pretrained` reads: config.json and model.safetensors."""
    import torch

    with torch.device("meta"):
        model: Any = job.model()
    if not (hasattr(model, "config") and hasattr(model, "save_pretrained") and hasattr(model.config, "save_pretrained")):
        raise Mistake(f"the job's model is a {type(model).__name__}, not a model of transformers: --to safetensors gives its weights")
    new(target)
    names = set(model.state_dict())
    weights = {name: one for name, one in checkpoint.all_weights(trained).items() if name in names}
    model.config.architectures = [type(model).__name__]
    with drafted(target, folder=True) as draft:
        model.config.save_pretrained(draft)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(draft)
        write_tensors(draft / "model.safetensors", weights, {"format": "pt"})
    return target


def export_steps(folder: Folder, kind: str, target: Path) -> tuple[Path, list[str]]:
    """The course of training as CSV, or the whole report as JSON; gives also what of the run is damaged and so left out."""
    new(target)
    history = History().read(folder.path)
    report, steps = report_of(folder.path, history), history.steps
    if kind == "json":
        write_whole(target, json.dumps(report.as_json(), indent=1).encode())
        return target, list(report.damage)
    with drafted(target) as draft, open(draft, "w", newline="") as file:
        rows = csv.writer(file)
        names = list(dict.fromkeys(name for one in history.validated for name in one.metrics))
        found = {one.step: one.metrics for one in history.validated}   # steps that were not validated have nothing there
        rows.writerow(["step", "loss", "seconds", "process_bytes", *(f"validation {name}" for name in names)])
        for number, loss, seconds, size in zip(steps.number, steps.loss, steps.seconds, steps.process, strict=True):
            metrics = found.get(number, {})
            rows.writerow([number, repr(loss), repr(seconds), size,
                           *("" if metrics.get(name) is None else repr(metrics[name]) for name in names)])
    return target, list(report.damage)


def new(target: Path) -> None:
    if target.exists():
        raise Mistake(f"{target} is there already: remove it, or give another --out")
