"""MiniLM on one thread: eager torch, torchao's int8 eager and compiled, onnxruntime in float32, its own dynamic int8, and ours.

    python benchmarks/compress/onnxruntime_speed.py --model FOLDER --texts 'GLOB_OF_TXT' [--quick]

Ways take turns, call by call; a time is the median over the rounds, and the ratio to eager is that of medians (beside it: that of minima).
Fidelity: cosine of sentence embeddings (mean over tokens) to float32 in torch, over texts that calibration never saw.
Results: onnxruntime_speed.json beside this file. Where a CPU advertises AMX and has none, set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before.
"""

from __future__ import annotations

import argparse
import copy
import glob
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).with_suffix(".json")
SHAPES = {"1 x 24": (1, 24), "4 x 64": (4, 64)}
CALIBRATION, HELD_OUT = 128, 1024


def texts(pattern: str, count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sentences to calibrate with, and others to judge with: none is in both."""
    found = {
        one.strip()
        for path in sorted(glob.glob(pattern))
        for one in re.split(r"(?<=[.!?])\s+", Path(path).read_text(errors="ignore"))
    }
    chosen = sorted(one for one in found if 30 < len(one) < 300)
    random.Random(seed).shuffle(chosen)
    return chosen[:CALIBRATION], chosen[CALIBRATION : CALIBRATION + count]


def batches(tokenizer: Any, lines: Sequence[str], size: int) -> list[dict[str, Tensor]]:
    ordered = sorted(lines, key=len)
    return [
        dict(tokenizer(ordered[at : at + size], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for at in range(0, len(ordered), size)
    ]


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].float()
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def hidden_states(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).last_hidden_state
    return found


Way = tuple[int, Callable[..., Tensor], list[str]]


def ways(
    model: nn.Module, sample: dict[str, Tensor], calibration: list[dict[str, Tensor]], folder: Path
) -> dict[str, Way]:
    """Name -> bytes on disk, how to call it, and what was told."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from shoestring.compression.onnx.check import run_session, session
    from shoestring.compression.onnx.export import export_onnx

    plain = export_onnx(model, hidden_states, sample, folder / "float32.onnx")
    fast = export_onnx(model, hidden_states, sample, folder / "fast.onnx", fast=True, calibration=calibration)
    quantize_dynamic(str(plain.path), str(folder / "dynamic.onnx"), per_channel=True, weight_type=QuantType.QInt8)

    def eager(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return hidden_states(model, batch)

    def runner(path: Path) -> Callable[[dict[str, Tensor]], Tensor]:
        opened = session(path)
        return lambda batch: torch.from_numpy(run_session(opened, batch)[0])

    size = sum(one.numel() * one.element_size() for one in model.parameters())
    said = [*fast.notes, f"difference {fast.largest_difference:.1e} (its norm by the outputs' norm)"]
    return {
        "torch eager, float32": (size, eager, []),
        **torchao_ways(model, sample),
        "onnxruntime, float32": (plain.bytes, runner(plain.path), list(plain.notes)),
        "onnxruntime, dynamic int8 per channel": (
            (folder / "dynamic.onnx").stat().st_size,
            runner(folder / "dynamic.onnx"),
            [],
        ),
        "shoestring, fast": (fast.bytes, runner(fast.path), said),
    }


def torchao_ways(model: nn.Module, sample: dict[str, Tensor]) -> dict[str, Way]:
    """Those that run here; why others do not is printed."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    found: dict[str, Way] = {}
    for name, config in (
        ("int8 weights", Int8WeightOnlyConfig),
        ("int8 weights and activations", Int8DynamicActivationInt8WeightConfig),
    ):
        small = copy.deepcopy(model)
        quantize_(small, config())
        with tempfile.NamedTemporaryFile() as file:
            torch.save(small.state_dict(), file.name)
            size = Path(file.name).stat().st_size
        for how, ready in (("eager", small), ("compiled", torch.compile(small, dynamic=True))):

            def call(batch: dict[str, Tensor], ready: Any = ready) -> Tensor:
                with torch.no_grad():
                    return hidden_states(ready, batch)

            try:
                call(sample)
            except Exception as error:
                print(f"torchao, {name}, {how} does not run: {type(error).__name__}: {error}"[:400], flush=True)
                continue
            found[f"torchao, {name}, {how}"] = (size, call, [])
    return found


def timed(
    calls: dict[str, Callable[..., Tensor]], batch: dict[str, Tensor], rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each, all taking turns; the second of two calls counts."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            call(batch)
            begin = time.perf_counter()
            call(batch)
            if number >= 2:
                taken[name].append(1000 * (time.perf_counter() - begin))
    return {name: {"median": statistics.median(found), "least": min(found)} for name, found in taken.items()}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(arguments.model), AutoModel.from_pretrained(arguments.model).eval()
    learn, judge = texts(arguments.texts, 64 if arguments.quick else HELD_OUT)
    calibration, held = batches(tokenizer, learn, 16), batches(tokenizer, judge, 8)
    with tempfile.TemporaryDirectory() as folder:
        all_ways = ways(model, held[0], calibration, Path(folder))
        outputs = {
            name: torch.cat([pooled(call(batch), batch["attention_mask"]) for batch in held])
            for name, (_, call, _) in all_ways.items()
        }
        wanted = outputs["torch eager, float32"]
        times = {}
        for shape, (samples, length) in SHAPES.items():
            batch = {
                "input_ids": torch.randint(1000, 20000, (samples, length)),
                "attention_mask": torch.ones(samples, length, dtype=torch.int64),
                "token_type_ids": torch.zeros(samples, length, dtype=torch.int64),
            }
            times[shape] = timed(
                {name: call for name, (_, call, _) in all_ways.items()}, batch, 5 if arguments.quick else 100
            )
    rows = {}
    for name, (size, _, notes) in all_ways.items():
        cosine = (outputs[name] * wanted).sum(1)
        rows[name] = {
            "bytes": size,
            "cosine_mean": float(cosine.mean()),
            "cosine_worst": float(cosine.min()),
            "notes": notes,
            "ms": {shape: found[name] for shape, found in times.items()},
        }
    return {"texts": len(judge), "calibration": len(learn), "quick": arguments.quick, "rows": rows}


def table(results: dict[str, Any]) -> str:
    shapes = list(SHAPES)
    eager = results["rows"]["torch eager, float32"]["ms"]
    lines = [
        f"| {'quick try, ' * results['quick']}{results['texts']} texts | MB | "
        + " | ".join(f"{shape}: ms, times eager (of minima)" for shape in shapes)
        + " | cosine, mean | worst |",
        "|---" * (4 + len(shapes)) + "|",
    ]
    for name, row in results["rows"].items():
        speeds = [
            f"{row['ms'][shape]['median']:.2f}, {eager[shape]['median'] / row['ms'][shape]['median']:.2f} "
            f"({eager[shape]['least'] / row['ms'][shape]['least']:.2f})"
            for shape in shapes
        ]
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:.1f} | {' | '.join(speeds)} | {row['cosine_mean']:.5f} | {row['cosine_worst']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with MiniLM and its tokenizer")
    parser.add_argument("--texts", required=True, help="pattern of text files")
    parser.add_argument("--quick", action="store_true", help="a try: 64 texts, 5 rounds; nothing is written")
    parser.add_argument("--table", action="store_true", help="only print the table of the last results")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if arguments.table else measured(arguments)
    if not (arguments.quick or arguments.table):
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
