"""What choosing costs: CPU seconds a million weights, and memory beside the model's, for the first size that is asked for.

    python benchmarks/compress/search_cost.py [--only resnet18,llama16m]

Each model is built from a configuration of transformers with random weights (SmolLM2-135M: its own weights, `smollm.py`) and searched in a
fresh process with one thread. Counted is everything from drawing samples to the confirmed plan: seconds of user and system time of the
process; and the highest resident memory (VmHWM) less what is resident beside the model's weights before the search: the interpreter, torch,
the model's library and the data. So the model itself is one of the times its memory that are told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RESULTS = HERE / "search_cost.json"
SHARE = 0.15  # of the weights' bytes: the size asked for
LENGTH, SAMPLES, BATCH = 64, 512, 16
MODELS = ("resnet18", "resnet18 at 224", "llama16m", "bert", "gpt2", "smollm2")


def resnet(side: int) -> tuple[Any, Any]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000
    )
    return ResNetForImageClassification(config), lambda: {"pixel_values": torch.randn(BATCH, 3, side, side)}


def words(model: Any, vocabulary: int) -> tuple[Any, Any]:
    import torch

    return model, lambda: {"input_ids": torch.randint(0, vocabulary, (BATCH, LENGTH))}


def network(name: str) -> tuple[Any, Any]:
    """A model, and what draws a batch for it."""
    import transformers as hf

    if name.startswith("resnet18"):
        return resnet(224 if name.endswith("224") else 64)
    if name == "llama16m":
        size = hf.LlamaConfig(
            vocab_size=8000,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
        )
        size.use_cache = False
        return words(hf.LlamaForCausalLM(size), 8000)
    if name == "bert":
        return words(
            hf.BertForSequenceClassification(
                hf.BertConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
            ),
            30000,
        )
    if name == "gpt2":
        return words(hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), 50000)
    import smollm

    every = iter(smollm.pieces())
    return smollm.network(), lambda: next(every)


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the highest since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def measured(name: str) -> dict[str, Any]:
    """In this process: the search for the first size."""
    import resource

    import torch

    from shoestring import Job
    from shoestring.compression.begin import begin_session
    from shoestring.compression.calibration.scratch import trim
    from shoestring.compression.library import source_of
    from shoestring.compression.session import CompressOptions
    from shoestring.core.budget import Budget

    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = network(name)[1]
    batches = [draw() for _ in range(SAMPLES // BATCH)]
    half = len(batches) // 2

    def forward(model: Any, batch: Any) -> Any:
        return model(**batch).logits

    job = Job(
        model=lambda: network(name)[0],
        data=lambda: batches[:half],
        held_out=lambda: batches[half:],
        forward=forward,
        loss=lambda output, batch: output.square().mean(),
    )
    source = source_of(job, None, {})
    weights = sum(one.numel() for one in source.model.parameters())
    held = sum(one.nbytes for one in source.model.parameters())
    del draw
    trim()
    before = resident("VmRSS") - held
    Path("/proc/self/clear_refs").write_text("5")
    begun = resource.getrusage(resource.RUSAGE_SELF)
    found = begin_session(source, CompressOptions(Budget(size=int(SHARE * held)), unseen=64))
    ended = resource.getrusage(resource.RUSAGE_SELF)
    highest = resident("VmHWM")
    seconds = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    assert found.plan.details.checked is not None
    return {
        "weights": weights,
        "seconds": seconds,
        "seconds_a_million": seconds / (weights / 1e6),
        "times_memory": (highest - before) / held,
        "predicted": found.plan.details.cost.known_figures["damage"],
        "damage": found.plan.details.checked.damage,
    }


def table(results: dict[str, Any]) -> str:
    rows = [
        "| model | weights | CPU seconds | a million weights | times the model's memory | predicted damage | measured |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows += [
        f"| {name} | {one['weights'] / 1e6:.1f} M | {one['seconds']:.0f} | {one['seconds_a_million']:.2f} | {one['times_memory']:.1f} | "
        f"{one['predicted']:.5f} | {one['damage']:.5f} |"
        for name, one in results.items()
    ]
    return "\n".join(rows)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--only", default=",".join(MODELS))
    asked.add_argument("--inside", action="store_true", help="measure one model in this process")
    options = asked.parse_args()
    if options.inside:
        print(json.dumps(measured(options.only)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only.split(","):
        child = subprocess.run(
            [sys.executable, __file__, "--inside", "--only", name], capture_output=True, text=True, check=False
        )
        if child.returncode:
            raise SystemExit(child.stderr)
        results[name] = json.loads(child.stdout.splitlines()[-1])
        RESULTS.write_text(json.dumps(results, indent=1))
        print(name, results[name], flush=True)
    print(table({name: results[name] for name in MODELS if name in results}))


if __name__ == "__main__":
    main()
