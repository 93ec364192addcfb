"""Export a run's weights and figures in other formats: safetensors, Hugging Face, PEFT, CSV, JSON."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file, write_whole
from shoestring.core.job import Job
from shoestring.core.running.run_state import StoredTensor
from shoestring.runs.checkpoints.checkpoints import (
    BEST,
    RunCheckpoint,
    damage,
    list_checkpoints,
    newest_good,
    reading_untrusted,
)
from shoestring.runs.events.history import History, best_of
from shoestring.runs.folder import Folder, holder
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.runs.weights.low_rank import merge_updates
from shoestring.runs.weights.tensors import write_tensors

# What transformers calls the files of a tokenizer
TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
)


def checkpoint_of(folder: Folder, step: int | None) -> RunCheckpoint:
    """The checkpoint of a step, or by default the newest good one."""
    there = list_checkpoints(folder.checkpoints)
    steps = ", ".join(str(one.step) for one in there) or "none"
    if step is None:
        found, _ = newest_good(folder.checkpoints, ("parts",))
        if found is None:
            raise Mistake(f"{folder.path} has no good checkpoint (saved: {steps}): let it save one first")
        return found
    for one in there:
        if one.step == step:
            if reason := damage(one, ("parts",)):
                raise Mistake(f"the checkpoint of step {step} is damaged ({reason}); there are {steps}")
            return one
    raise Mistake(f"{folder.path} has no checkpoint of step {step}; there are {steps}")


def best_weights(folder: Folder) -> RunCheckpoint:
    """The checkpoint with the weights that were best in validation."""
    there, found = list_checkpoints(folder.checkpoints, BEST), best_of(History().read(folder.path).validated)
    newest = "without --best, the newest weights are exported"
    if found is None and not there:
        raise Mistake(
            f"{folder.path} has no best weights: nothing was validated there yet, or its goal was never a number; give the Job "
            f"held_out=lambda: batches ({newest})"
        )
    best = there[-1] if found is None else next((one for one in there if one.step == found.step), None)
    if best is None:
        assert found is not None, "else the newest is taken"
        steps = ", ".join(str(one.step) for one in there) or "none"
        raise Mistake(
            f"the best validation of {folder.path} was after step {found.step}, whose weights are not there (there: {steps}): "
            f"they could not be saved, or somebody removed them; {newest}"
        )
    if reason := damage(best, ("parts",)):
        raise Mistake(f"the best weights, of step {best.step}, are damaged ({reason}); {newest}")
    return best


def newer_weights(folder: Folder, checkpoint: RunCheckpoint) -> str:
    """A remark if a checkpoint does not have the run's last weights; empty if it has."""
    _, damaged = newest_good(folder.checkpoints)
    if damaged:
        newest, reason = damaged[0]
        return f"these are the weights after step {checkpoint.step}: the checkpoint of step {newest.step} is damaged ({reason})"
    done = History().read(folder.path).steps
    if not done or done.number[-1] <= checkpoint.step:
        return ""
    is_at = "goes on, and is at" if holder(folder.path) is not None else "went on to"
    return f"these are the weights after step {checkpoint.step}: the run {is_at} step {done.number[-1]}, which is not saved"


@dataclass(frozen=True)
class WeightsExport:
    """Weights that are to be written in a format."""

    checkpoint: RunCheckpoint
    job: Callable[[], Job]  # that the user names for the run
    target: Path
    trained: bool = False  # the weights themselves, not their averages


@dataclass(frozen=True)
class Exported:
    path: Path
    notes: tuple[str, ...] = ()  # what the user should know
    about: Mapping[str, Any] = field(default_factory=dict)  # for --json


def export_safetensors(asked: WeightsExport) -> Exported:
    notes = filter(None, [not_in_file(asked.checkpoint)])
    return Exported(export_weights(asked.checkpoint, asked.target, asked.trained), tuple(notes))


def export_weights(checkpoint: RunCheckpoint, target: Path, trained: bool = False) -> Path:
    """The weights alone, under exactly the names of the model's state_dict, tied ones under all their names, so that
    `load_state_dict(load_file(path), strict=True)` works. `trained`: not their averages."""
    new(target)
    with reading_untrusted(checkpoint), draft_file(target) as draft:
        write_tensors(draft, named_weights(checkpoint, trained), {"format": "pt"})
    return target


def named_weights(checkpoint: RunCheckpoint, trained: bool = False) -> dict[str, StoredTensor]:
    """The weights by all names of the model's state_dict, with what was trained beside them added."""
    with reading_untrusted(checkpoint):
        left_out = checkpoint.outline().get("left_out", ())
        found = checkpoint.all_weights(trained)
        for alias, of in checkpoint.aliases().items():
            found[alias] = found[of]
        if (beside := low_rank(checkpoint)) is not None:
            found = merge_updates(found, beside)
        return {name: one for name, one in found.items() if name not in left_out}


def low_rank(checkpoint: RunCheckpoint) -> dict[str, Any] | None:
    """The state of LowRank; None if the run did not use it."""
    with reading_untrusted(checkpoint):
        return checkpoint.state()["parts"]["low rank"] if "low rank" in checkpoint.outline()["parts"] else None


def not_in_file(checkpoint: RunCheckpoint) -> str:
    """A remark about tensors that are not dense weights; empty if there are none."""
    with reading_untrusted(checkpoint):
        other = [str(name) for name in checkpoint.outline().get("model", ())]
    return (
        (
            f"{', '.join(other[:3])}{' and others' * (len(other) > 3)} of the model's state_dict can't be in a safetensors file, which "
            f"has dense tensors only: load the others with strict=False"
        )
        if other
        else ""
    )


def model_of(factory: Callable[[], nn.Module]) -> Any:
    """The job's model without values if possible, else with them. Factories that call `from_pretrained` refuse torch's
    meta device but work on fake tensors."""
    from shoestring.core.running import random_state
    from shoestring.measure.fake import Stage

    with random_state.fork_rng():
        try:
            return Stage().model(factory)
        except Exception:  # code that reads values, or operations without fake versions
            return factory()


def export_hugging_face(asked: WeightsExport) -> Exported:
    """A folder that `from_pretrained` reads: config.json, model.safetensors, and the files of a tokenizer that came with the model."""
    checkpoint, target, model = asked.checkpoint, asked.target, model_of(asked.job().model)
    check_is_hugging_face(model)
    new(target)
    found, shared = named_weights(checkpoint, asked.trained), checkpoint.aliases()
    weights = {name: one for name, one in found.items() if name not in shared}  # once: from_pretrained ties them again
    model.config.architectures = [type(model).__name__]
    dtypes = [one.dtype for one in weights.values() if one.dtype.is_floating_point]
    model.config.dtype = (
        dtypes[0] if dtypes else model.config.dtype
    )  # with the file's dtypes: from_pretrained makes the model from them
    with reading_untrusted(checkpoint), draft_file(target, folder=True) as draft:
        model.config.save_pretrained(draft)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(draft)
        write_tensors(draft / "model.safetensors", weights, {"format": "pt"})
        for path in tokenizer_files(Path(str(getattr(model.config, "name_or_path", "") or "."))):
            shutil.copyfile(path, draft / path.name)
    return Exported(target)


def check_is_hugging_face(model: Any) -> None:
    """Refuse a model that `from_pretrained` could not rebuild."""

    def own(one: Any) -> bool:
        return hasattr(one, "config") and hasattr(one, "save_pretrained") and hasattr(one.config, "save_pretrained")

    if own(model):
        return
    inside = next(
        (
            f"; its part {name} is one ({type(part).__name__}), whose weights are there under {name}.*"
            for name, part in model.named_modules()
            if own(part)
        ),
        "",
    )
    raise Mistake(
        f"the job's model is a {type(model).__name__}, not a model of transformers, so from_pretrained could not make it again: "
        f"--to safetensors gives its weights{inside}"
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """A tokenizer's files in the folder that the model was loaded from; none if there are none."""
    if not (folder / "config.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return []
    return [path for name in TOKENIZER for path in sorted(folder.glob(name)) if path.is_file()]


def export_steps(folder: Folder, kind: str, target: Path) -> tuple[Path, list[str]]:
    """Export the steps as CSV, or the whole report as JSON; also returns what of the run is damaged and therefore
    missing."""
    new(target)
    history = History().read(folder.path)
    report, steps = report_of(folder.path, history), history.steps
    if kind == "json":
        write_whole(target, json.dumps(report_json(report), indent=1).encode())
        return target, list(report.damage)
    with draft_file(target) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        names = list(dict.fromkeys(name for one in history.validated for name in one.metrics))
        found = {one.step: one.metrics for one in history.validated}  # steps without validation have empty columns
        rows.writerow(["step", "loss", "seconds", "process_bytes", *(f"validation {name}" for name in names)])
        for number, loss, seconds, size in zip(steps.number, steps.loss, steps.seconds, steps.process, strict=True):
            metrics = found.get(number, {})
            rows.writerow(
                [
                    number,
                    repr(loss),
                    repr(seconds),
                    size,
                    *("" if metrics.get(name) is None else repr(metrics[name]) for name in names),
                ]
            )
    return target, list(report.damage)


def new(target: Path) -> None:
    if target.exists():
        raise Mistake(f"{target} is there already: remove it, or give another --out")
