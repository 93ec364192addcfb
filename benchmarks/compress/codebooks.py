"""Codebooks beside the grid, at equal bytes: MiniLM's linear layers, and its word embedding, stored in one way each; damage to sentences.

    python benchmarks/compress/codebooks.py --model FOLDER --texts FOLDER [--quick] [--only linear|embedding]

FOLDER of the model: all-MiniLM-L6-v2 as transformers loads it; of the texts: State of the Union addresses, one .txt each. Damage is
1 - cosine of sentence embeddings (mean pooling, normed) to the original model's, mean and worst, on texts that calibration never saw. What
was measured is kept in codebooks.json by its name, and not measured again: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.quantization.product_codes import VectorCoding, fit_product_codes
from shoestring.compression.quantization.rounding import GridSetting, round_to_grid
from shoestring.compression.quantization.scalar_codes import fit_codebook

HERE = Path(__file__).parent
KEPT = HERE / "codebooks.json"
CALIBRATION, FIRST_TEST = 128, 1000
Stored = tuple[Tensor, int]  # the weight as it comes back, and its bytes


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    tests: list[Any]
    expected: Tensor
    moments: dict[str, Tensor]  # of the inputs of linear layers, by weight
    counts: Tensor  # how often each word was in the calibration

    @torch.no_grad()
    def damage(self) -> tuple[float, float]:
        cosines = (sentences(self.model, self.tests) * self.expected).sum(-1)
        return 1 - float(cosines.mean()), 1 - float(cosines.min())

    def weights(self, part: str) -> dict[str, Tensor]:
        if part == "embedding":
            return {
                "embeddings.word_embeddings.weight": self.model.get_submodule("embeddings.word_embeddings").weight.data
            }
        return {name: self.model.get_parameter(name).data for name in self.moments}


@torch.no_grad()
def sentences(model: nn.Module, batches: list[Any]) -> Tensor:
    found = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1).float()
        found.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def subject(folder: str, texts: str, count: int) -> Subject:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    speeches = [file.read_text(errors="ignore") for file in sorted(Path(texts).glob("*.txt"))]
    found = [one.strip() for speech in speeches for one in re.split(r"(?<=[.!?])\s+", speech) if 30 < len(one) < 300]
    random.Random(0).shuffle(found)

    def batches(some: list[str]) -> list[Any]:
        parts = [sorted(some, key=len)[first : first + 32] for first in range(0, len(some), 32)]
        return [tokenizer(part, padding=True, truncation=True, max_length=128, return_tensors="pt") for part in parts]

    calibration, tests = batches(found[:CALIBRATION]), batches(found[FIRST_TEST : FIRST_TEST + count])
    moments: dict[str, Tensor] = {}
    mask = torch.ones(0)

    def look(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])[mask.reshape(-1)]
            moments[name] = moments.get(name, torch.zeros(1)) + rows.T @ rows

        return note

    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "pooler" not in name}
    hooks = [one.register_forward_hook(look(f"{name}.weight")) for name, one in linears.items()]
    for batch in calibration:
        mask = batch["attention_mask"].bool()
        sentences(model, [batch])
    for hook in hooks:
        hook.remove()
    words = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in calibration])
    counts = torch.bincount(words, minlength=model.config.vocab_size).float()
    return Subject(model, tests, sentences(model, tests), moments, counts)


Way = Callable[
    [Tensor, "Tensor | None"], Stored
]  # of a weight, and its second moment (of an embedding: counts of its rows)


def importance(weight: Tensor, moment: Tensor | None) -> Tensor | None:
    """Of columns, the mean squares of inputs; of rows of an embedding, how often they were looked up, and once more."""
    if moment is None:
        return None
    return moment.diagonal() if moment.dim() == 2 else (1 + moment)[:, None]


def by_grid(bits: int, group: int, compensated: bool = False) -> Way:
    def stored(weight: Tensor, moment: Tensor | None) -> Stored:
        metric = moment if compensated and moment is not None and moment.dim() == 2 else None
        (one,) = round_to_grid(weight, [GridSetting(bits, group)], metric)
        form = GridFormat.of(one.codes, one.scales, one.zeros, bits, group, tuple(weight.shape), weight.dtype)
        return form.dense(), form.stored_bytes

    return stored


def by_codebook(bits: int, group: int, method: str, weighted: bool) -> Way:
    def stored(weight: Tensor, moment: Tensor | None) -> Stored:
        form = fit_codebook(weight, bits, group, importance(weight, moment) if weighted else None, method)
        return form.dense(), form.stored_bytes

    return stored


def by_product(recipe: VectorCoding, weighted: bool) -> Way:
    def stored(weight: Tensor, moment: Tensor | None) -> Stored:
        form = fit_product_codes(weight, recipe, importance(weight, moment) if weighted else None)
        return form.dense(), form.stored_bytes

    return stored


def by_faiss(length: int, bits: int, stages: int) -> Way:
    """faiss alone: vectors of neighbours, or (stages 0) a product quantizer of whole rows; tables are float32 there."""

    def stored(weight: Tensor, moment: Tensor | None) -> Stored:
        import faiss

        faiss.omp_set_num_threads(1)
        columns = weight.shape[1]
        if stages:
            quantizer = faiss.ResidualQuantizer(length, stages, bits)
            quantizer.train_type = faiss.ResidualQuantizer.Train_default
            tables, points = 4 * stages * 2**bits * length, weight.reshape(-1, length)
        else:
            quantizer = faiss.ProductQuantizer(columns, columns // length, bits)
            tables, points = 4 * 2**bits * columns, weight
        given = np.ascontiguousarray(points.numpy())
        quantizer.train(given[np.random.default_rng(0).permutation(len(given))[: 1 << 15]])
        codes = quantizer.compute_codes(given)
        return torch.from_numpy(quantizer.decode(codes)).view(weight.shape), codes.nbytes + tables

    return stored


def scalar_ways() -> Iterator[tuple[str, Way]]:
    for bits in (4, 3, 2):
        yield f"grid, nearest, {bits} bits", by_grid(bits, 64)
        yield f"percentile, {bits} bits", by_codebook(bits, 64, "percentile", False)
        yield f"k-means, {bits} bits", by_codebook(bits, 64, "kmeans", False)
        yield f"weighted k-means, {bits} bits", by_codebook(bits, 64, "kmeans", True)
    yield "grid, nearest, 8 bits", by_grid(8, 384)
    for name, method, weighted in (
        ("percentile", "percentile", False),
        ("k-means", "kmeans", False),
        ("weighted k-means", "kmeans", True),
    ):
        yield f"{name}, 8 bits, no scales", by_codebook(8, 0, method, weighted)
        yield f"{name}, 4 bits, no scales", by_codebook(4, 0, method, weighted)


def ways(part: str) -> Iterator[tuple[str, Way]]:
    yield from scalar_ways()
    if part == "linear":
        yield from ((f"grid, GPTQ, {bits} bits", by_grid(bits, 64, True)) for bits in (4, 3, 2))
    pairs, fours = VectorCoding(2, 8), VectorCoding(4, 8)
    books = (
        0 if part == "embedding" else 32
    )  # a codebook a place is larger than a linear layer: there, one for every 64 columns' places
    product = VectorCoding(2, 6, books=books)
    turn = 384 if part == "embedding" else 64
    for name, recipe in (
        ("vector k-means, 2 x 8 bits", pairs),
        ("vector k-means, 4 x 8 bits", fours),
        ("PQ, 2 x 6 bits", product),
    ):
        yield name, by_product(replace(recipe, rounds=0), False)
        yield f"{name}, weighted", by_product(recipe, True)
    scale = part == "linear"  # a scale is a column's, and rows are what differs in an embedding
    yield (
        "OPQ, 2 x 6 bits, weighted" if scale else "OPQ, 2 x 6 bits",
        by_product(replace(product, rotation=turn, scaled=scale), scale),
    )
    for name, method in (("RQ", "residual"), ("LSQ", "local search")):
        recipe = VectorCoding(4, 8, stages=2, method=method)
        yield f"{name}, 2 codes of 8 bits for 4", by_product(replace(recipe, rounds=0), False)
        yield f"{name}, 2 codes of 8 bits for 4, weighted", by_product(recipe, True)
    yield "RQ, 2 codes of 8 bits for 8, weighted", by_product(VectorCoding(8, 8, stages=2), True)
    yield "faiss PQ, 2 x 6 bits", by_faiss(2, 6, 0)
    yield "faiss RQ, 2 codes of 8 bits for 4", by_faiss(4, 8, 2)


def measured(one: Subject, part: str, way: Way) -> dict[str, float]:
    weights, total, count, begun = one.weights(part), 0, 0, time.process_time()
    before = {name: weight.clone() for name, weight in weights.items()}
    for name, weight in weights.items():
        found, stored = way(weight.clone(), one.counts if part == "embedding" else one.moments[name])
        weight.copy_(found)
        total, count = total + stored, count + weight.numel()
    seconds = time.process_time() - begun
    mean, worst = one.damage()
    for name, weight in weights.items():
        weight.copy_(before[name])
    return {"bytes": total, "bits": 8 * total / count, "mean": mean, "worst": worst, "cpu_seconds": seconds}


def table(results: dict[str, Any]) -> str:
    """What was measured, the smallest damage last within a part, by bits a number."""
    lines = []
    for part in ("linear", "embedding"):
        rows = sorted(results.get(part, {}).items(), key=lambda row: -row[1]["bits"])
        title = {"linear": "all linear layers", "embedding": "the word embedding"}[part]
        lines += [
            f"| {title}: stored as | bits a number, all counted | 1 - cosine | worst | seconds to fit |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {name} | {one['bits']:.2f} | {one['mean']:.5f} | {one['worst']:.4f} | {one['cpu_seconds']:.0f} |"
            for name, one in rows
        ]
        lines.append("")
    return "\n".join(lines) + f"{results.get('texts', 0)} texts that calibration ({CALIBRATION} others) never saw."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--count", type=int, default=1000, help="texts that damage is measured on")
    parser.add_argument("--only", choices=("linear", "embedding"), default=None)
    parser.add_argument("--names", default="", help="a regular expression: which ways")
    parser.add_argument("--quick", action="store_true", help="32 texts, two ways, nothing is kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    one = subject(chosen.model, chosen.texts, 32 if chosen.quick else chosen.count)
    results: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() and not chosen.quick else {}
    results["texts"] = 32 if chosen.quick else chosen.count
    for part in (chosen.only,) if chosen.only else ("linear", "embedding"):
        wanted = [(name, way) for name, way in ways(part) if re.search(chosen.names, name)]
        for name, way in wanted[:2] if chosen.quick else wanted:
            if name not in results.setdefault(part, {}):
                results[part][name] = measured(one, part, way)
                print(part, name, json.dumps(results[part][name]), flush=True)
            if not chosen.quick:
                KEPT.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
