"""Students as people make them, of a model that is there. Anything else (factorized, sparse, quantized) is a function model -> model too.

every second layer   the repeated blocks of a model, some of them kept with their weights (Sanh, Debut, Chaumond, Wolf: DistilBERT,
                     2019, arXiv 1910.01108); the configuration of a transformers model counts those that are left
narrower             the leading part of every hidden layer of an MLP, or a factory's own argument (`--width 32` of a job)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.weights import Weights

Shrink = Callable[[nn.Module], nn.Module]  # a model -> a smaller one: the hook for other rooms
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


def repeated_blocks(model: nn.Module) -> tuple[str, list[str]]:
    """The longest run of like blocks: the name of the container that they are in, and their names in it, in order.

    >>> repeated_blocks(nn.Sequential(nn.Embedding(9, 4), *(nn.TransformerEncoderLayer(4, 1) for _ in range(3)), nn.Linear(4, 9)))
    ('', ['1', '2', '3'])
    """
    best: tuple[int, str, list[str]] = (0, "", [])
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for like in runs_of_like(module):
                weight = sum(parameter.numel() for one in like for parameter in module.get_submodule(one).parameters())
                best = max(best, (weight, name, like), key=lambda found: found[0])
    if not best[2]:
        raise Mistake(
            "the model has no ModuleList or Sequential with blocks of one kind, of which a student could keep some: make the "
            "student by an argument of its job, or give a function model -> model"
        )
    return best[1], best[2]


def runs_of_like(container: nn.ModuleList | nn.Sequential) -> list[list[str]]:
    """Names of neighbours that are alike: of one class, with weights of the same names and shapes."""
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
    """Blocks that a student keeps, counted from 0."""

    every: int = 0  # every so many, beginning with the first
    numbers: tuple[int, ...] = ()  # or exactly these

    def of(self, count: int) -> list[int]:
        found = list(self.numbers) or list(range(0, count, self.every))
        if max(found) >= count or min(found) < 0 or len(found) >= count or sorted(set(found)) != found:
            raise Mistake(
                f"--layers asks for the blocks {', '.join(map(str, found))} of {count}, counted from 0: give fewer than all, "
                f"each once, in order"
            )
        return found


def parsed_layers(written: str) -> KeptBlocks:
    """
    >>> parsed_layers("every=2"), parsed_layers("0,2,5")
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
    """The model with some of its repeated blocks, changed in place; what is kept has its weights.

    The largest repetition is thinned. Of a transformers model, `config.num_hidden_layers` and the numbers that layers carry
    (`layer_idx`, by which a cache finds its place) are set to what is left.
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
    """Set what a configuration says of its layers, where it says as many as there were."""
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
    """A copy of the model with every second of its repeated blocks."""
    return fewer_layers(deepcopy(model), KeptBlocks(every=2))


@dataclass(frozen=True)
class LayersOf(Weights):
    """Weights of a teacher's file for a student that has some of its blocks: the student's i-th block begins as the teacher's kept[i]."""

    place: str = ""  # the container of the blocks, by name
    blocks: tuple[
        tuple[str, str], ...
    ] = ()  # name of a block in the teacher -> name in the student; empty: it is left out

    def renamed(self, name: str) -> str:
        prefix = f"{self.place}." if self.place else ""
        block, _, rest = name.removeprefix(prefix).partition(".")
        known = dict(self.blocks)
        if not name.startswith(prefix) or block not in known:
            return name
        return f"{prefix}{known[block]}.{rest}" if known[block] else f"(left out) {name}"


def layers_of(model: nn.Module, kept: KeptBlocks, file: str) -> LayersOf:
    """The weights of a student that `fewer_layers` makes of such a model."""
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

    Only for a Sequential of Linear layers with what works number by number between them; anything else is refused.
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
