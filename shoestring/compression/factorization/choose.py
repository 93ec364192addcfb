"""Which layers are factorized, and with which ranks: the share of its numbers that each keeps, or a rank; the rest is told."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.compression.factorization.edits import (
    Edit,
    LowRankEdit,
    TensorTrainEdit,
    TuckerEdit,
    edited,
    is_transposed,
)
from shoestring.compression.factorization.ranks import (
    linear_rank,
    three_covering,
    three_factors,
    train_numbers,
    train_ranks,
    tucker_numbers,
    tucker_ranks,
)
from shoestring.core.errors import Mistake
from shoestring.core.private import own_parameters

Example = Callable[[nn.Module], Any]
KINDS = ("linear", "convolution", "embedding")


@dataclass(frozen=True)
class Factorization:
    edits: tuple[Edit, ...]
    told: tuple[str, ...]  # what was left alone, and why


def edits_for(
    model: nn.Module,
    example: Example | None = None,
    *,
    share: float | None = None,
    rank: int | None = None,
    kinds: Collection[str] = ("linear", "convolution"),
) -> tuple[Edit, ...]:
    """Edits that factorize every layer of these kinds that can be: see `factorization_for`, which also tells what was left alone."""
    return factorization_for(model, example, share=share, rank=rank, kinds=kinds).edits


def factorization_for(
    model: nn.Module,
    example: Example | None = None,
    *,
    share: float | None = None,
    rank: int | None = None,
    kinds: Collection[str] = ("linear", "convolution"),
) -> Factorization:
    """Factorize layers to a share of their numbers, or to a rank; what would save nothing is left alone.

    `example` runs the model: an edit after which it fails is not made. Every layer gets the same share: ranks given by the spectra of
    all W L together, the same numbers in all, did more damage to MiniLM (.132 against .114 at a share of .75).
    """
    check(share, rank, kinds)
    told: list[str] = []
    edits: list[Edit] = []
    for name, layer in model.named_modules():
        reason = "" if kind_of(layer) in kinds else "-"
        reason = reason or refusal(model, layer)
        found = None if reason else edit_for(name, layer, share, rank)
        if isinstance(found, str) or reason not in ("", "-"):
            told.append(f"{name}: {found if isinstance(found, str) else reason}")
        elif found is not None:
            edits.append(found)
        if isinstance(layer, nn.MultiheadAttention) and "linear" in kinds:
            told.append(
                f"{name}.in_proj_weight: three products in one weight, which attention reads itself; it is left alone"
            )
    edits, failed = tried(model, edits, example)
    if not edits:
        why = "; ".join([*told, *failed]) or f"the model has none of the kinds {', '.join(kinds)}"
        raise Mistake(f"no layer can be factorized: {why}")
    return Factorization(tuple(edits), (*told, *failed))


def check(share: float | None, rank: int | None, kinds: Collection[str]) -> None:
    if (share is None) == (rank is None):
        raise Mistake(
            "a factorization needs either the share of a layer's numbers that is kept, or a rank: give one of them"
        )
    if share is not None and not 0 < share < 1:
        raise Mistake(f"a share of {share} numbers: give one between 0 and 1, 0.5 keeps half of them")
    if rank is not None and rank < 1:
        raise Mistake(f"a rank of {rank}: the least is 1")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise Mistake(f"layers of the kind {unknown[0]!r}: there are {', '.join(KINDS)}")


def kind_of(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear) or is_transposed(layer):
        return "linear"
    return "convolution" if isinstance(layer, nn.Conv2d) else "embedding" if isinstance(layer, nn.Embedding) else ""


def refusal(model: nn.Module, layer: Any) -> str:
    """Why a layer is left alone; empty if it is not."""
    plain = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Embedding) if isinstance(layer, kind)), None)
    if plain is not None and type(layer).forward is not plain.forward:
        return f"a {type(layer).__name__} computes in a way of its own"
    if "weight" not in own_parameters(layer) or isinstance(layer.weight, nn.UninitializedParameter):
        return "its weight is no parameter of its own (it is parametrized, packed or lazy)"
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is layer.weight]
    owners = {
        id(module) for module in model.modules() for one in own_parameters(module).values() if one is layer.weight
    }
    if len(owners) > 1:
        return f"its weight is shared ({', '.join(names)}): a factorized one would be stored beside it"
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return f"it has {layer.groups} groups, whose channels are not mixed: there is no common factor"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return "it limits norms, scales gradients or has sparse ones, which a tensor train does not"
    return ""


def edit_for(name: str, layer: Any, share: float | None, rank: int | None) -> Edit | str:
    """The edit of one layer, or why it would save nothing."""
    if isinstance(layer, nn.Embedding):
        return embedding_edit(name, layer, share, rank)
    shape = tuple(layer.weight.shape)
    outputs, inputs = (shape[1], shape[0]) if is_transposed(layer) else shape[:2]
    pixels, count = layer.weight[0, 0].numel(), layer.weight.numel()
    if pixels == 1:
        chosen = linear_rank(inputs, outputs, share) if share is not None else rank or 0
        saves, said = chosen * (inputs + outputs) < count, f"rank {chosen}"
        found: Edit = LowRankEdit(name, chosen)
    else:
        ranks = (
            tucker_ranks(inputs, outputs, pixels, share)
            if share is not None
            else (min(rank or 0, outputs), min(rank or 0, inputs))
        )
        saves, said = tucker_numbers(inputs, outputs, pixels, ranks) < count, f"ranks {ranks}"
        found, chosen = TuckerEdit(name, ranks), min(ranks)
    if chosen < 1:
        return f"a share of {share} of its {count} numbers is not enough for rank 1"
    return found if saves else f"{said} saves nothing of {count} numbers"


def embedding_edit(name: str, layer: nn.Embedding, share: float | None, rank: int | None) -> Edit | str:
    rows, columns, count = (
        three_covering(layer.num_embeddings),
        three_factors(layer.embedding_dim),
        layer.weight.numel(),
    )
    most = rows[0] * columns[0], rows[2] * columns[2]
    ranks = (
        train_ranks(rows, columns, int(share * count))
        if share is not None
        else (min(rank or 0, most[0]), min(rank or 0, most[1]))
    )
    if min(ranks) < 1:
        return f"a share of {share} of its {count} numbers is not enough for rank 1"
    if train_numbers(rows, columns, ranks) >= count:
        return f"ranks {ranks} save nothing of {count} numbers"
    return TensorTrainEdit(name, rows, columns, ranks)


def tried(model: nn.Module, edits: list[Edit], example: Example | None) -> tuple[list[Edit], list[str]]:
    """The edits with which the example runs, and what was said of the others."""
    if example is None or not edits or not failure(model, edits, example):
        return edits, []
    failures = [failure(model, [edit], example) for edit in edits]
    kept = [edit for edit, said in zip(edits, failures, strict=True) if not said]
    told = [
        f"{edit.module}: the model does not run with it factorized ({why})"
        for edit, why in zip(edits, failures, strict=True)
        if why
    ]
    if kept and (together := failure(model, kept, example)):
        raise Mistake(
            f"the model does not run with its layers factorized together ({together}): give a rank for fewer kinds of layers"
        )
    return kept, told


@torch.no_grad()
def failure(model: nn.Module, edits: list[Edit], example: Example) -> str:
    try:
        example(edited(model, edits))
    except Exception as error:  # whatever the model's own code raises
        return f"{type(error).__name__}: {error}"
    return ""
