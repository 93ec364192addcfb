"""What a run leaves behind, in other people's formats."""
from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.runs.checkpoints import Checkpoint, damage, newest_good, saved
from shoestring.runs.folder import Folder
from shoestring.runs.story import story
from shoestring.runs.tensors import write_tensors


def checkpoint_of(folder: Folder, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest good one."""
    there = saved(folder.checkpoints)
    steps = ", ".join(str(one.step) for one in there) or "none"
    if step is None:
        found, _ = newest_good(folder.checkpoints)
        if found is None:
            raise Mistake(f"{folder.path} has no good checkpoint (saved: {steps}): train it first")
        return found
    for one in there:
        if one.step == step:
            if damage(one):
                raise Mistake(f"the checkpoint of step {step} is damaged ({damage(one)}); there are {steps}")
            return one
    raise Mistake(f"{folder.path} has no checkpoint of step {step}; there are {steps}")


def export_weights(checkpoint: Checkpoint, target: Path) -> Path:
    """The weights alone, under the names of the model's state_dict, each stored once."""
    new(target)
    write_tensors(target, checkpoint.all_weights(), {"format": "pt"})
    return target


def export_hugging_face(checkpoint: Checkpoint, job: Job, target: Path) -> Path:
    """A folder that `from_pretrained` reads: config.json and model.safetensors."""
    import torch

    with torch.device("meta"):
        model: Any = job.model()
    if not (hasattr(model, "config") and hasattr(model, "save_pretrained") and hasattr(model.config, "save_pretrained")):
        raise Mistake(f"the job's model is a {type(model).__name__}, not a model of transformers: --to safetensors gives its weights")
    new(target)
    target.mkdir(parents=True)
    names = set(model.state_dict())
    weights = {name: one for name, one in checkpoint.all_weights().items() if name in names}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(target)
    write_tensors(target / "model.safetensors", weights, {"format": "pt"})
    return target


def export_steps(folder: Folder, kind: str, target: Path) -> Path:
    """The course of training as CSV, or the whole story as JSON."""
    new(target)
    told = story(folder.path)
    if kind == "json":
        target.write_text(json.dumps(told, indent=1))
        return target
    with open(target, "x", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss", "seconds", "process_bytes"])
        for number, (loss, seconds, (_, size)) in enumerate(zip(told["losses"], told["seconds"], told["samples_process"], strict=True), 1):
            rows.writerow([number, repr(loss), repr(seconds), size])
    return target


def new(target: Path) -> None:
    if target.exists():
        raise Mistake(f"{target} is there already: remove it, or give another --out")
