"""Make a student from a larger model. Any function model -> model may be used instead.

fewer_layers   keep some of the repeated blocks, with their weights (Sanh, Debut, Chaumond, Wolf: DistilBERT, 2019,
               arXiv 1910.01108); layer counts in the configuration of a transformers model are updated
narrower       keep the most important neurons of every hidden layer of an MLP
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.model.weights import Weights

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


def repeated_blocks(model: nn.Module) -> tuple[str, list[str]]:
    """The largest run of similar blocks: the name of their container, and their names in it, in order.

    >>> repeated_blocks(nn.Sequential(nn.Embedding(9, 4), *(nn.TransformerEncoderLayer(4, 1) for _ in range(3)), nn.Linear(4, 9)))
    ('', ['1', '2', '3'])
    """
    best: tuple[int, str, list[str]] = (0, "", [])
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for like in runs_of_similar_blocks(module):
                weight = sum(parameter.numel() for one in like for parameter in module.get_submodule(one).parameters())
                best = max(best, (weight, name, like), key=lambda found: found[0])
    if not best[2]:
        raise Mistake(
            "the model has no ModuleList or Sequential of repeated blocks, of which a student could keep some: make the student "
            "smaller by an argument of its job, or give a function model -> model"
        )
    return best[1], best[2]


def runs_of_similar_blocks(container: nn.ModuleList | nn.Sequential) -> list[list[str]]:
    """Runs of consecutive similar blocks: of one class, with parameters of the same names and shapes."""
    found: list[list[str]] = []
    before: object = None
    for name, child in container.named_children():
        shape = (type(child), tuple((one, tuple(weight.shape)) for one, weight in child.named_parameters()))
        if shape[1] and shape == before:
            found[-1].append(name)
        elif shape[1]:
            found.append([name])
        before = shape if shape[1] else None
    return [one for one in found if len(one) > 1]


@dataclass(frozen=True)
class KeptBlocks:
    """The blocks that a student keeps, counted from 0."""

    every: int = 0  # every n-th block, beginning with the first
    numbers: tuple[int, ...] = ()  # or these blocks

    def of(self, count: int) -> list[int]:
        found = list(self.numbers) or list(range(0, count, self.every))
        if max(found) >= count or min(found) < 0 or len(found) >= count or sorted(set(found)) != found:
            raise Mistake(
                f"--layers asks for the blocks {', '.join(map(str, found))} of {count}, counted from 0: give fewer than all, "
                f"each once, in order"
            )
        return found


def parse_layers(written: str) -> KeptBlocks:
    """Parse --layers.

    >>> parse_layers("every=2"), parse_layers("0,2,5")
    (KeptBlocks(every=2, numbers=()), KeptBlocks(every=0, numbers=(0, 2, 5)))
    """
    if match := re.fullmatch(r"every=(\d+)", written.replace(" ", "")):
        if int(match[1]) < 2:
            raise Mistake(f"--layers {written}: every block would be kept; give every=2 or more")
        return KeptBlocks(every=int(match[1]))
    if re.fullmatch(r"\d+(,\d+)*", written.replace(" ", "")):
        return KeptBlocks(numbers=tuple(map(int, written.split(","))))
    raise Mistake(f"--layers {written}: write every=2, or the blocks to keep, counted from 0: 0,2,5")


def fewer_layers(model: nn.Module, kept: KeptBlocks) -> nn.Module:
    """Keep only some blocks of the model's largest run of similar blocks, in place, with their weights.

    In a transformers model, `config.num_hidden_layers` and the `layer_idx` of each layer (used by key/value caches) are
    updated.
    """
    place, names = repeated_blocks(model)
    numbers = kept.of(len(names))
    container = model.get_submodule(place)
    assert isinstance(container, (nn.ModuleList, nn.Sequential)), "blocks are in one of them"
    chosen = {names[number] for number in numbers}
    left = [child for name, child in container.named_children() if name in chosen or name not in names]
    del container[:]
    for child in left:
        container.append(child)
    for number, child in enumerate(container):
        for module in child.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = number  # type: ignore[assignment]
    count_layers(model, len(names), len(numbers), numbers)
    return model


def count_layers(model: nn.Module, before: int, now: int, numbers: Sequence[int]) -> None:
    """Update layer counts in configurations, where they equal the old number of layers."""
    for config in {
        id(one): one for one in (getattr(module, "config", None) for module in model.modules()) if one is not None
    }.values():
        for name in LAYER_COUNTS:
            if getattr(config, name, None) == before:
                setattr(config, name, now)
        types = getattr(config, "layer_types", None)
        if isinstance(types, list) and len(types) == before:
            config.layer_types = [types[number] for number in numbers]


def every_second(model: nn.Module) -> nn.Module:
    """A copy of the model with every second one of its repeated blocks."""
    return fewer_layers(deepcopy(model), KeptBlocks(every=2))


@dataclass(frozen=True)
class LayersOf(Weights):
    """Weights of a teacher for a student with some of its blocks: the student's i-th block starts as the teacher's
    kept[i]."""

    place: str = ""  # name of the blocks' container
    blocks: tuple[tuple[str, str], ...] = ()  # (name in the teacher, name in the student); empty: the block is left out

    def model_name(self, name: str) -> str:
        prefix = f"{self.place}." if self.place else ""
        block, _, rest = name.removeprefix(prefix).partition(".")
        known = dict(self.blocks)
        if not name.startswith(prefix) or block not in known:
            return name
        return f"{prefix}{known[block]}.{rest}" if known[block] else f"(left out) {name}"


def layers_of(model: nn.Module, kept: KeptBlocks, file: str) -> LayersOf:
    """The initial weights of a student that `fewer_layers` makes from this model."""
    place, names = repeated_blocks(model)
    numbers = kept.of(len(names))
    container = model.get_submodule(place)
    chosen = {names[number] for number in numbers}
    left = [name for name, _ in container.named_children() if name in chosen or name not in names]
    new = {name: str(number) for number, name in enumerate(left)}
    return LayersOf(
        file, place=place, blocks=tuple((name, new.get(name, "")) for name, _ in container.named_children())
    )


def narrower(model: nn.Sequential, share: float) -> nn.Sequential:
    """A copy of an MLP whose hidden layers keep this share of their neurons, those with the largest outgoing weights.

    The model must be a Sequential of Linear layers with elementwise layers in between.
    """
    if not 0 < share < 1:
        raise Mistake(f"narrower(share={share:g}): give a share between 0 and 1")
    made = deepcopy(model)
    linear = [layer for layer in made if isinstance(layer, nn.Linear)]
    odd = [type(layer).__name__ for layer in made if not isinstance(layer, (nn.Linear, *BY_NUMBER))]
    if odd or len(linear) < 2:
        raise Mistake(
            f"narrower: the model has {odd[0] if odd else 'no hidden layer'}, and only a Sequential of Linear layers with "
            f"activations and dropout between can be cut by its neurons: give the student's job an argument for its width"
        )
    for before, after in pairwise(linear):
        count = max(round(share * before.out_features), 1)
        best = after.weight.detach().norm(dim=0).topk(count).indices.sort().values
        with torch.no_grad():
            before.weight = nn.Parameter(before.weight[best].clone())
            before.bias = None if before.bias is None else nn.Parameter(before.bias[best].clone())
            after.weight = nn.Parameter(after.weight[:, best].clone())
        before.out_features = after.in_features = count
    return made


BY_NUMBER = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Dropout, nn.Identity, nn.Flatten)
