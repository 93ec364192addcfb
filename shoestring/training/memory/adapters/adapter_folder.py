"""What LowRank trained, as a folder that `peft.PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file
from shoestring.core.running.run_state import StoredTensor
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint, reading_untrusted
from shoestring.runs.reports.export import Exported, WeightsExport, low_rank, model_of, new, not_in_file
from shoestring.runs.weights.tensors import write_tensors

PEFT = "base_model.model."  # what PEFT has before every name of the model


def export_adapter(asked: WeightsExport) -> Exported:
    """What LowRank trained, for the model that it began from."""
    base = getattr(getattr(model_of(asked.job().model), "config", None), "name_or_path", "") or None
    with reading_untrusted(asked.checkpoint):
        made = adapter_folder(asked.checkpoint, base, asked.target, asked.trained)
    return Exported(made, tuple(filter(None, [not_in_file(asked.checkpoint)])))


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
    """The modules that an adapter must have whole: those with a weight that was trained as it is, or with statistics."""
    return sorted({name.rpartition(".")[0] for name in (*state["also"], *state["statistics"])})
