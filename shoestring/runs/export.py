"""Export a run's weights and figures in other formats: safetensors, Hugging Face, PEFT, CSV, JSON."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.files import draft_file, write_whole
from shoestring.core.job import Job
from shoestring.core.run_state import StoredTensor
from shoestring.runs.checkpoints import BEST, RunCheckpoint, damage, newest_good, reading_untrusted, saved
from shoestring.runs.folder import Folder, holder
from shoestring.runs.history import History, best_of
from shoestring.runs.low_rank import merge_updates
from shoestring.runs.report import report_of
from shoestring.runs.report_json import report_json
from shoestring.runs.tensors import write_tensors

PEFT = "base_model.model."  # PEFT's prefix of the model's names

# Names of a tokenizer's files in transformers
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


def best_weights(folder: Folder) -> RunCheckpoint:
    """The checkpoint with the weights that were best in validation."""
    there, found = saved(folder.checkpoints, BEST), best_of(History().read(folder.path).validated)
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


def export_weights(
    checkpoint: RunCheckpoint, target: Path, names: Collection[str] | None = None, trained: bool = False
) -> Path:
    """Export the weights under the names of the model's state_dict, tied ones under all their names, so that
    `load_state_dict(load_file(path), strict=True)` works. `names`: those of the state_dict, needed if a checkpoint does
    not record them; `trained`: the weights themselves, not their averages."""
    new(target)
    with reading_untrusted(checkpoint), draft_file(target) as draft:
        write_tensors(draft, named_weights(checkpoint, names, trained), {"format": "pt"})
    return target


def named_weights(
    checkpoint: RunCheckpoint, names: Collection[str] | None = None, trained: bool = False
) -> dict[str, StoredTensor]:
    """The weights by all names of the model's state_dict, including those trained beside the model."""
    with reading_untrusted(checkpoint):
        left_out = checkpoint.outline().get("left_out")
        found = checkpoint.all_weights(trained)
        for alias, of in checkpoint.aliases().items():
            found[alias] = found[of]
        if (beside := low_rank(checkpoint)) is not None:
            found = merge_updates(found, beside)
        if left_out is None:  # by an earlier version
            return {name: one for name, one in found.items() if names is None or name in names}
        return {name: one for name, one in found.items() if name not in left_out}


def low_rank(checkpoint: RunCheckpoint) -> dict[str, Any] | None:
    """The state of LowRank; None if the run did not use it."""
    with reading_untrusted(checkpoint):
        return checkpoint.state()["parts"]["low rank"] if "low rank" in checkpoint.outline()["parts"] else None


def export_peft(checkpoint: RunCheckpoint, job: Job, target: Path, trained: bool = False) -> Path:
    """Export a folder for `peft.PeftModel.from_pretrained`: the low-rank weights, for the base model that they were
    trained on."""
    base = getattr(getattr(model_of(job.model), "config", None), "name_or_path", "") or None
    with reading_untrusted(checkpoint):
        return adapter_folder(checkpoint, base, target, trained)


def adapter_folder(checkpoint: RunCheckpoint, base: str | None, target: Path, trained: bool) -> Path:
    state = low_rank(checkpoint)
    if state is None:
        raise Mistake(
            "the run trained the model's weights themselves, and a PEFT adapter has low-rank updates of them, which "
            "--use 'LowRank(rank=8)' trains: --to safetensors gives the weights"
        )
    kinds = set(state["transposed"].values())
    if len(kinds) > 1:
        raise Mistake(
            "the run has updates of linear layers and of transformers' Conv1D, whose weights lie in another order, and a PEFT "
            "adapter is for one of the two: --to safetensors gives the weights with their updates"
        )
    whole, weights = whole_modules(state), checkpoint.all_weights(trained)
    if state["tied"]:
        raise Mistake(
            f"{state['tied'][0]} was trained as it is and is a weight of several modules, which a PEFT adapter would take apart: "
            f"--to safetensors gives the weights with their updates"
        )
    if unclear := [name for name in state["A"] if any(name.endswith(one) for one in whole)]:
        raise Mistake(
            f"the run trained an update of {unclear[0]} and the whole of {', '.join(one or 'the model' for one in whole)}, which "
            f"PEFT can't tell apart by their names: --to safetensors gives the weights with their updates"
        )
    new(target)
    tensors: dict[str, Tensor | StoredTensor] = {}
    for kind in "AB":
        tensors |= {f"{PEFT}{name}.lora_{kind}.weight": one for name, one in state[kind].items()}
    tensors |= {PEFT + name: one for name, one in weights.items() if name.rpartition(".")[0] in whole}
    config = {
        "peft_type": "LORA",
        "r": state["rank"],
        "lora_alpha": state["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": "|".join(f"(?:{re.escape(name)})" for name in state["A"]),
        "fan_in_fan_out": kinds == {True},
        "modules_to_save": whole or None,
        "base_model_name_or_path": base,
        "task_type": None,
        "init_lora_weights": True,
    }
    with draft_file(target, folder=True) as draft:
        (draft / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tensors(draft / "adapter_model.safetensors", tensors, {"format": "pt"})
    return target


def whole_modules(state: Mapping[str, Any]) -> list[str]:
    """Modules that the adapter must save completely: those with a weight that was trained directly, or with running
    statistics."""
    return sorted({name.rpartition(".")[0] for name in (*state["also"], *state["statistics"])})


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


def tells_names(checkpoint: RunCheckpoint) -> bool:
    """Whether a checkpoint records which of its tensors are in the model's state_dict; earlier versions did not."""
    return "left_out" in checkpoint.outline()


def model_of(factory: Callable[[], nn.Module]) -> Any:
    """The job's model without values if possible, else with them. Factories that call `from_pretrained` refuse torch's
    meta device but work on fake tensors."""
    from shoestring.core import random_state
    from shoestring.measure.fake import Stage

    with random_state.kept():
        try:
            return Stage().model(factory)
        except Exception:  # code that reads values, or operations without fake versions
            return factory()


def weights_of_model(factory: Callable[[], nn.Module]) -> frozenset[str]:
    """The names of the model's state_dict."""
    return frozenset(model_of(factory).state_dict())


def export_hugging_face(checkpoint: RunCheckpoint, job: Job, target: Path, trained: bool = False) -> Path:
    """Export a folder for `from_pretrained`: config.json, model.safetensors, and the tokenizer's files if the model
    came with them."""
    model = model_of(job.model)
    check_is_hugging_face(model)
    new(target)
    found, shared = named_weights(checkpoint, set(model.state_dict()), trained), checkpoint.aliases()
    weights = {
        name: one for name, one in found.items() if name not in shared
    }  # each once: from_pretrained ties them again
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
    return target


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
