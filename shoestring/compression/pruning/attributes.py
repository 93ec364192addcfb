"""Update size attributes of modules after pruning, such as `out_features` or `num_heads`.

Sizes of torch's own layers follow from their weights. Which attributes a user's forward reads is not known in general,
so several guesses are made, and the caller keeps the first one with which the pruned model computes the right outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from shoestring.compression.pruning.groups import UnitGroup
from shoestring.compression.pruning.prune_edits import Attribute, Narrow, UnitCut
from shoestring.core.private import BATCH_NORMS

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOWN = (
    nn.Linear,
    nn.Embedding,
    nn.GroupNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.LayerNorm,
    BATCH_NORMS,
    *CONVOLUTIONS,
)
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}
COUNTS = re.compile(r"^(?=.*head)(?!.*(dim|size|width|mask)).*$")  # num_attention_heads, n_head
WIDTHS = re.compile(r"all_head|inner|split_size|total")  # all_head_size, inner_dim
GUESSES = ("by name", "none", "all", "counts", "widths")


def owner_of(weight: str) -> str:
    return weight.rpartition(".")[0]


def narrow_heads(model: nn.Module, cuts: Sequence[UnitCut]) -> list[Narrow | Attribute]:
    """Edits for pruned heads of nn.MultiheadAttention, which becomes a NarrowAttention; nn.TransformerEncoder must then
    not use nested tensors, which need torch's fused kernel."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = dict.fromkeys(owner_of(place.weight) for cut in cuts if cut.kind == "heads" for place in cut.places)
    names = [name for name in owners if isinstance(modules[name], nn.MultiheadAttention)]
    encoders = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.TransformerEncoder)
        and any(inside.startswith(f"{name}.".lstrip(".")) for inside in names)
    ]
    return [*(Narrow(name) for name in names), *(Attribute(name, "use_nested_tensor", False) for name in encoders)]


def sizes_of_layers(
    whole: nn.Module, cut: nn.Module, groups: Sequence[UnitGroup], cuts: Sequence[UnitCut]
) -> list[Attribute]:
    """Size attributes of torch's layers (and Conv1D of transformers), read from the remaining weights."""
    before = dict(whole.named_modules(remove_duplicate=False))
    shares = {
        weight: (len(one.kept), one.size) for group, one in zip(groups, cuts, strict=True) for weight in group.grouped
    }
    found = []
    for name, module in cut.named_modules(remove_duplicate=False):
        kept, size = next((share for weight, share in shares.items() if owner_of(weight) == name), (1, 1))
        for attribute, value in layer_sizes(module, kept, size):
            if getattr(before[name], attribute, value) != value:
                found.append(Attribute(name, attribute, value))
    return found


def layer_sizes(module: Any, kept: int, size: int) -> Iterator[tuple[str, int]]:
    """(attribute, value) pairs of a layer, of whose groups `kept` of `size` remain."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        yield from zip(("out_features", "in_features"), module.weight.shape, strict=True)
    elif isinstance(module, nn.Embedding):
        yield from zip(("num_embeddings", "embedding_dim"), module.weight.shape, strict=True)
    elif isinstance(module, CONVOLUTIONS):
        groups = module.groups * kept // size
        one, other = module.weight.shape[0], module.weight.shape[1] * groups
        yield "groups", groups
        yield from zip(
            ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels"),
            (one, other),
            strict=True,
        )
    elif isinstance(module, BATCH_NORMS):
        channels = module.weight if module.weight is not None else module.running_mean
        if isinstance(channels, Tensor):
            yield "num_features", len(channels)
    elif isinstance(module, nn.GroupNorm):
        if module.weight is not None:
            yield from (("num_channels", len(module.weight)), ("num_groups", module.num_groups * kept // size))
    elif isinstance(module, nn.RNNBase):
        gates = next(number for kind, number in GATES.items() if isinstance(module, kind))
        yield "hidden_size", module.get_parameter("weight_hh_l0").shape[0] // gates
        yield "input_size", module.get_parameter("weight_ih_l0").shape[1]
    elif type(module).__name__ == "NarrowAttention":
        yield "num_heads", module.out_proj.weight.shape[1] // module.head_dim
    elif isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "nf") and hasattr(module, "nx"):
        yield from zip(("nx", "nf"), weight.shape, strict=True)


def guess_attributes(model: nn.Module, cut: UnitCut, guess: str) -> list[Attribute]:
    """Attributes to change in modules around a cut, by one of `GUESSES`: those with telling names, none, or those with
    the right value."""
    if guess == "none":
        return []
    inner = [place.inner for place in cut.places]
    counts = {cut.size, cut.size * max(inner) // min(inner)}  # for grouped-query attention: key heads and query heads
    widths = {cut.size * place.inner for place in cut.places} | {
        place.outer * cut.size * place.inner for place in cut.places
    }
    found = []
    for name, module in modules_around(model, cut):
        for attribute, value in vars(module).items():
            if type(value) is not int or attribute.startswith("_"):
                continue
            counted, wide = value in counts, value in widths
            if guess == "by name":
                right = cut.kind == "heads" and (
                    bool(counted and COUNTS.match(attribute)) or bool(wide and WIDTHS.search(attribute))
                )
            else:
                right = (counted and guess in ("all", "counts")) or (wide and guess in ("all", "widths"))
            if right:
                found.append(Attribute(name, attribute, value * len(cut.kept) // cut.size))
    return found


def modules_around(model: nn.Module, cut: UnitCut) -> list[tuple[str, nn.Module]]:
    """Modules between the owners of a cut's weights and their common ancestor, and children of these without
    weights."""
    owners = [owner_of(place.weight).split(".") for place in cut.places]
    shared = 0
    while all(len(one) > shared and one[shared] == owners[0][shared] for one in owners):
        shared += 1
    names = {".".join(one[:length]) for one in owners for length in range(shared, len(one) + 1)}
    modules = dict(model.named_modules(remove_duplicate=False))
    children = {
        f"{name}.{child}".lstrip(".")
        for name in names
        for child, module in modules[name].named_children()
        if not any(True for _ in module.parameters())
    }
    return [(name, modules[name]) for name in sorted(names | children) if not isinstance(modules[name], KNOWN)]
