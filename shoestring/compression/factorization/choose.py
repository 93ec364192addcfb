"""Choose the layers to factorize and their ranks, from the share of parameters to keep or from a given rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.compression.factorization.factor_edits import (
    FactorEdit,
    LowRankEdit,
    TensorTrainEdit,
    TuckerEdit,
    apply_factor_edits,
    is_transposed,
)
from shoestring.compression.factorization.ranks import (
    linear_rank,
    three_factors,
    three_factors_at_least,
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
    edits: tuple[FactorEdit, ...]
    told: tuple[str, ...]  # messages: what was left alone, and why


def edits_for(
    model: nn.Module,
    example: Example | None = None,
    *,
    share: float | None = None,
    rank: int | None = None,
    kinds: Collection[str] = ("linear", "convolution"),
) -> tuple[FactorEdit, ...]:
    """The edits of `factorization_for`, without its messages."""
    return factorization_for(model, example, share=share, rank=rank, kinds=kinds).edits


def factorization_for(
    model: nn.Module,
    example: Example | None = None,
    *,
    share: float | None = None,
    rank: int | None = None,
    kinds: Collection[str] = ("linear", "convolution"),
) -> Factorization:
    """Choose edits that factorize layers to a share of their parameters, or to a rank; layers that would not get
    smaller are left alone.

    `example` runs the model: edits with which it fails are left out. Every layer gets the same share. Ranks chosen from
    the joint spectrum of all W L, with the same number of parameters in total, did more damage to MiniLM (.132 against
    .114 at a share of .75).
    """
    check(share, rank, kinds)
    told: list[str] = []
    edits: list[FactorEdit] = []
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
                f"{name}.in_proj_weight: left alone, because attention reads it directly, as three matrices in one"
            )
    edits, failed = runnable_edits(model, edits, example)
    if not edits:
        why = "; ".join([*told, *failed]) or f"the model has none of the kinds {', '.join(kinds)}"
        raise Mistake(f"no layer can be factorized: {why}")
    return Factorization(tuple(edits), (*told, *failed))


def check(share: float | None, rank: int | None, kinds: Collection[str]) -> None:
    if (share is None) == (rank is None):
        raise Mistake(
            "a factorization needs either the share of a layer's parameters to keep, or a rank: give one of them"
        )
    if share is not None and not 0 < share < 1:
        raise Mistake(f"share={share}: give a share between 0 and 1; 0.5 keeps half of the parameters")
    if rank is not None and rank < 1:
        raise Mistake(f"rank={rank}: give 1 or more")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise Mistake(f"the kind of layers {unknown[0]!r} is unknown: there are {', '.join(KINDS)}")


def kind_of(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear) or is_transposed(layer):
        return "linear"
    return "convolution" if isinstance(layer, nn.Conv2d) else "embedding" if isinstance(layer, nn.Embedding) else ""


def refusal(model: nn.Module, layer: Any) -> str:
    """Why a layer can't be factorized; empty if it can."""
    plain = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Embedding) if isinstance(layer, kind)), None)
    if plain is not None and type(layer).forward is not plain.forward:
        return f"a {type(layer).__name__} has a forward of its own"
    if "weight" not in own_parameters(layer) or isinstance(layer.weight, nn.UninitializedParameter):
        return "its weight is not a plain parameter (it is parametrized, packed or lazy)"
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is layer.weight]
    owners = {
        id(module) for module in model.modules() for one in own_parameters(module).values() if one is layer.weight
    }
    if len(owners) > 1:
        return f"its weight is tied ({', '.join(names)}): factors would be stored in addition to it"
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return f"it has {layer.groups} groups, whose channels have no common factor"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return "it uses max_norm, scale_grad_by_freq or sparse gradients, which a tensor train does not support"
    return ""


def edit_for(name: str, layer: Any, share: float | None, rank: int | None) -> FactorEdit | str:
    """The edit of one layer, or the reason why it would save nothing."""
    if isinstance(layer, nn.Embedding):
        return embedding_edit(name, layer, share, rank)
    shape = tuple(layer.weight.shape)
    outputs, inputs = (shape[1], shape[0]) if is_transposed(layer) else shape[:2]
    pixels, count = layer.weight[0, 0].numel(), layer.weight.numel()
    if pixels == 1:
        chosen = linear_rank(inputs, outputs, share) if share is not None else rank or 0
        saves, said = chosen * (inputs + outputs) < count, f"rank {chosen}"
        found: FactorEdit = LowRankEdit(name, chosen)
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


def embedding_edit(name: str, layer: nn.Embedding, share: float | None, rank: int | None) -> FactorEdit | str:
    rows, columns, count = (
        three_factors_at_least(layer.num_embeddings),
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


def runnable_edits(
    model: nn.Module, edits: list[FactorEdit], example: Example | None
) -> tuple[list[FactorEdit], list[str]]:
    """The edits with which the example runs, and messages about the others."""
    if example is None or not edits or not forward_failure(model, edits, example):
        return edits, []
    failures = [forward_failure(model, [edit], example) for edit in edits]
    kept = [edit for edit, said in zip(edits, failures, strict=True) if not said]
    told = [
        f"{edit.module}: the model does not run with it factorized ({why})"
        for edit, why in zip(edits, failures, strict=True)
        if why
    ]
    if kept and (together := forward_failure(model, kept, example)):
        raise Mistake(
            f"the model does not run with all these layers factorized ({together}): ask for fewer kinds of layers"
        )
    return kept, told


@torch.no_grad()
def forward_failure(model: nn.Module, edits: list[FactorEdit], example: Example) -> str:
    try:
        example(apply_factor_edits(model, edits))
    except Exception as error:  # whatever the model's own code raises
        return f"{type(error).__name__}: {error}"
    return ""
