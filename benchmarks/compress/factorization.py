"""Factorized layers without training after: MiniLM's linear layers and word embedding, and a small convolutional net for digits.

    python benchmarks/compress/factorization.py --model FOLDER --texts FOLDER [--count 1000] [--quick]

Damage is as in codebooks.py; of the net for digits (scikit-learn's 8 x 8 digits, a third held out), accuracy. What was measured
is kept in factorization.json, and not measured again: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from codebooks import CALIBRATION, Subject, subject
from torch import Tensor, nn

from shoestring.compression.factorization.choose import edits_for
from shoestring.compression.factorization.factor_edits import fit_factors

KEPT = Path(__file__).parent / "factorization.json"


def numbers(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def linear(one: Subject, share: float, weighted: bool) -> dict[str, float]:
    moments = one.moments if weighted else None
    inside = one.model.get_submodule("encoder")
    mine = None if moments is None else {name.removeprefix("encoder."): moment for name, moment in moments.items()}
    edits = edits_for(inside, share=share, kinds=("linear",))
    smaller = fit_factors(inside, edits, mine)
    return changed(one, "encoder", smaller) | {"kept": numbers(smaller) / numbers(inside)}


def embedding(one: Subject, share: float) -> dict[str, float]:
    name = "embeddings.word_embeddings"
    before = one.model.get_submodule(name)
    smaller = fit_factors(before, edits_for(before, share=share, kinds=("embedding",)))
    return changed(one, name, smaller) | {"kept": numbers(smaller) / numbers(before)}


def changed(one: Subject, name: str, new: nn.Module) -> dict[str, float]:
    """Damage with another module in the place of one."""
    parent, _, own = name.rpartition(".")
    holder, before = one.model.get_submodule(parent), one.model.get_submodule(name)
    setattr(holder, own, new)
    mean, worst = one.damage()
    setattr(holder, own, before)
    return {"mean": mean, "worst": worst}


def digits(seed: int, epochs: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A net that was trained, inputs that it was trained on, and held-out inputs with their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, classes = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    torch.manual_seed(seed)
    order = torch.randperm(len(images))
    held, used = order[:600], order[600:]
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(epochs):
        for part in used[torch.randperm(len(used))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[part]), classes[part]).backward()
            optimizer.step()
    return net.eval(), images[used], images[held], classes[held]


@torch.no_grad()
def channel_moments(net: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Second moments of the channels of convolutions' inputs."""
    found: dict[str, Tensor] = {}
    for name, layer in net.named_children():
        if isinstance(layer, nn.Conv2d):
            rows = images.transpose(0, 1).flatten(1)
            found[f"{name}.weight"] = rows @ rows.T
        images = layer(images)
    return found


@torch.no_grad()
def convolutions(shares: tuple[float, ...], seeds: int, epochs: int) -> dict[str, Any]:
    """Accuracy on held-out digits: mean over nets."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        with torch.enable_grad():
            net, used, held, classes = digits(seed, epochs)

        def accuracy(model: nn.Module, held: Tensor = held, classes: Tensor = classes) -> float:
            return float((model(held).argmax(1) == classes).float().mean())

        rows.setdefault("whole", []).append(accuracy(net))
        for share in shares:
            edits = edits_for(net, share=share, kinds=("convolution",))
            for name, moments in (("plain", None), ("inputs' metric", channel_moments(net, used))):
                rows.setdefault(f"Tucker-2, share {share}, {name}", []).append(
                    accuracy(fit_factors(net, edits, moments))
                )
    return {name: {"accuracy": sum(values) / len(values), "nets": len(values)} for name, values in rows.items()}


def table(results: dict[str, Any]) -> str:
    lines = ["| MiniLM, without training after | numbers kept | 1 - cosine | worst |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {one['kept']:.2f} | {one['mean']:.4f} | {one['worst']:.3f} |"
        for name, one in results["minilm"].items()
    ]
    lines += [
        "",
        f"{results['texts']} texts that calibration ({CALIBRATION} others) never saw.",
        "",
        "| convolutional net for digits, without training after | accuracy | nets |",
        "|---|--:|--:|",
    ]
    lines += [f"| {name} | {one['accuracy']:.3f} | {one['nets']} |" for name, one in results["digits"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="32 texts, fewer settings, nothing is kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() and not chosen.quick else {}
    count = 32 if chosen.quick else chosen.count
    if "minilm" not in results:
        one, minilm = subject(chosen.model, chosen.texts, count), {}
        for share in (0.75,) if chosen.quick else (0.9, 0.75, 0.5):
            minilm[f"SVD, share {share}"] = linear(one, share, False)
            minilm[f"SVD in the inputs' metric, share {share}"] = linear(one, share, True)
            minilm[f"tensor train of the word embedding, share {share}"] = embedding(one, share)
            print(json.dumps(minilm), flush=True)
        results |= {"texts": count, "minilm": minilm}
    if "digits" not in results:
        results["digits"] = convolutions(
            (0.5,) if chosen.quick else (0.5, 0.25, 0.1), 1 if chosen.quick else 5, 2 if chosen.quick else 12
        )
    if not chosen.quick:
        KEPT.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
