"""Factorization edits as data: which layer is replaced by which chain of smaller layers. The new weights' names follow
from the edits alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.factorization.chains import LowRankConv, LowRankLinear, TrainEmbedding, TuckerConv
from shoestring.compression.factorization.values import low_rank, tensor_train, tucker
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Json, Unreadable, to_json
from shoestring.core.files.codec import from_json as value_from_json


@dataclass(frozen=True)
class LowRankEdit:
    """Replace a linear layer, a Conv1D of transformers or a 1 x 1 convolution by two layers."""

    module: str
    rank: int


@dataclass(frozen=True)
class TuckerEdit:
    """Replace a convolution by three."""

    module: str
    ranks: tuple[int, int]  # channels of the core: outputs, inputs


@dataclass(frozen=True)
class TensorTrainEdit:
    """Replace an embedding by a tensor train."""

    module: str
    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    ranks: tuple[int, int]


FactorEdit = LowRankEdit | TuckerEdit | TensorTrainEdit
EDITS: dict[str, Any] = {kind.__name__: kind for kind in (LowRankEdit, TuckerEdit, TensorTrainEdit)}
MOST_NUMBERS = 1 << 16  # parameters that a small layer may have after an edit
Moments = Mapping[str, Tensor]  # second moments of inputs, sums of x x^T, by the weight's name


def apply_factor_edits(model: nn.Module, edits: Sequence[FactorEdit]) -> nn.Module:
    """A copy of the model with layers replaced by chains, whose weights are not fitted yet.

    >>> changed = apply_factor_edits(nn.Sequential(nn.Linear(8, 6)), [LowRankEdit("0", 2)])
    >>> [(name, tuple(one.shape)) for name, one in changed.named_parameters()]
    [('0.0.weight', (2, 8)), ('0.1.weight', (6, 2)), ('0.1.bias', (6,))]
    """
    result = copy.deepcopy(model)
    for edit in edits:
        before = module_of(result, edit)
        chain = chain_for(before, edit).train(before.training)
        chain.requires_grad_(next(before.parameters()).requires_grad)
        places = [name for name, one in result.named_modules(remove_duplicate=False) if one is before]
        for name in places:
            if not name:
                result = chain
            else:
                parent, _, own = name.rpartition(".")
                setattr(result.get_submodule(parent), own, chain)
    return result


@torch.no_grad()
def fit_factors(model: nn.Module, edits: Sequence[FactorEdit], moments: Moments | None = None) -> nn.Module:
    """A copy of the model with layers replaced by chains, fitted to approximate the original as well as their ranks
    allow."""
    result = apply_factor_edits(model, edits)
    for edit in edits:
        before: Any = module_of(model, edit)
        if before.weight.is_meta:
            raise Mistake(f"{edit.module} is on the meta device, without values: give the trained model")
        moment = (moments or {}).get(f"{edit.module}.weight")
        chain: Any = result.get_submodule(edit.module)
        for target, value in zip(chain_weights(chain), factors(before, edit, moment), strict=True):
            target.copy_(value.view(target.shape))
        if getattr(before, "bias", None) is not None:
            chain.bias.copy_(before.bias)
    return result


def factors(layer: Any, edit: FactorEdit, moment: Tensor | None) -> tuple[Tensor, ...]:
    """Values for the weights of a chain, in its order."""
    match edit:
        case LowRankEdit():
            weight = layer.weight.T if is_transposed(layer) else layer.weight.flatten(1)
            left, right = low_rank(weight, edit.rank, moment)
            return right, left
        case TuckerEdit():
            left, core, right = tucker(layer.weight, edit.ranks, moment)
            return right, core, left
        case TensorTrainEdit():
            return tensor_train(layer.weight, edit.rows, edit.columns, edit.ranks)


def chain_weights(chain: Any) -> tuple[Tensor, ...]:
    return tuple(chain.cores) if isinstance(chain, TrainEmbedding) else tuple(one.weight for one in chain)


def is_transposed(layer: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def module_of(model: nn.Module, edit: FactorEdit) -> nn.Module:
    try:
        return model.get_submodule(edit.module)
    except AttributeError:
        raise Mistake(f"the model has no module {edit.module!r}: these edits are of another model") from None


def chain_for(layer: Any, edit: FactorEdit) -> nn.Module:
    """The chain that replaces a layer, with its dtype and on its device."""
    check_replaceable(layer, edit)
    kind = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    stride: Any = getattr(layer, "stride", 1)
    padding: Any = getattr(layer, "padding", 0)
    bias = getattr(layer, "bias", None) is not None
    match edit:
        case LowRankEdit(rank=rank) if isinstance(layer, nn.Conv2d):
            first = nn.Conv2d(
                layer.in_channels, rank, 1, stride, padding, bias=False, padding_mode=layer.padding_mode, **kind
            )
            return LowRankConv(first, nn.Conv2d(rank, layer.out_channels, 1, bias=bias, **kind))
        case LowRankEdit(rank=rank):
            turned = is_transposed(layer)
            inputs, outputs = layer.weight.shape if turned else reversed(layer.weight.shape)
            return LowRankLinear(inputs, outputs, rank, bias, turned, **kind)
        case TuckerEdit(ranks=(outputs, inputs)):
            core = nn.Conv2d(
                inputs,
                outputs,
                layer.kernel_size,
                stride,
                padding,
                layer.dilation,
                bias=False,
                padding_mode=layer.padding_mode,
                **kind,
            )
            return TuckerConv(
                nn.Conv2d(layer.in_channels, inputs, 1, bias=False, **kind),
                core,
                nn.Conv2d(outputs, layer.out_channels, 1, bias=bias, **kind),
            )
        case TensorTrainEdit():
            if prod(edit.columns) != layer.embedding_dim or prod(edit.rows) < layer.num_embeddings:
                raise Mistake(
                    f"{edit.module} is a table of {layer.num_embeddings} x {layer.embedding_dim}, and the tensor train of "
                    f"{prod(edit.rows)} x {prod(edit.columns)}: these edits are of another model"
                )
            return TrainEmbedding(layer.num_embeddings, edit.rows, edit.columns, edit.ranks, layer.padding_idx, **kind)


def check_replaceable(layer: Any, edit: FactorEdit) -> None:
    """Raise Mistake for an edit of another kind of layer, or one that makes the layer larger."""
    kinds: tuple[Any, ...] = {
        LowRankEdit: (nn.Linear, nn.Conv2d),
        TuckerEdit: (nn.Conv2d,),
        TensorTrainEdit: (nn.Embedding,),
    }[type(edit)]
    if not isinstance(layer, kinds) and not (isinstance(edit, LowRankEdit) and is_transposed(layer)):
        raise Mistake(
            f"{edit.module} is a {type(layer).__name__}, which {type(edit).__name__} can't replace: these edits are of another "
            f"model"
        )
    if (count := numbers_in_chain(layer, edit)) > MOST_NUMBERS + 4 * layer.weight.numel():
        raise Mistake(
            f"{edit.module} has {layer.weight.numel()} parameters, and would have {count} after {edit}: factorization never "
            f"makes a layer larger, so the manifest was changed; use an intact folder"
        )


def numbers_in_chain(layer: Any, edit: FactorEdit) -> int:
    """Number of parameters of the chain that replaces a layer, without the bias."""
    outputs, inputs, *window = layer.weight.shape
    match edit:
        case LowRankEdit(rank=rank):
            return int(rank * (inputs * prod(window) + outputs))
        case TuckerEdit(ranks=(left, right)):
            return int(inputs * right + left * right * prod(window) + left * outputs)
        case TensorTrainEdit():
            ranks = (1, *edit.ranks, 1)
            return sum(ranks[one] * edit.rows[one] * edit.columns[one] * ranks[one + 1] for one in range(3))


def factor_edits_to_json(edits: Iterable[FactorEdit]) -> Json:
    return [{"edit": type(edit).__name__} | to_json(edit) for edit in edits]


def factor_edits_from_json(data: Json) -> tuple[FactorEdit, ...]:
    """
    >>> edits = (LowRankEdit("fc", 3), TuckerEdit("conv", (4, 5)), TensorTrainEdit("words", (3, 4, 5), (2, 2, 2), (7, 8)))
    >>> factor_edits_from_json(factor_edits_to_json(edits)) == edits
    True
    """
    if not isinstance(data, list) or any(not isinstance(one, dict) or one.get("edit") not in EDITS for one in data):
        raise Mistake(
            f"factorization edits must be a list of {', '.join(EDITS)}: the manifest was changed, use an intact folder"
        )
    try:
        found = tuple(
            value_from_json(EDITS[one["edit"]], {name: value for name, value in one.items() if name != "edit"})
            for one in data
        )
    except (Unreadable, KeyError, TypeError, ValueError) as error:
        raise Mistake(
            f"a factorization can't be read ({error}): the manifest was changed, use an intact folder"
        ) from None
    if any(number < 1 for one in found for number in numbers_of(one)):
        raise Mistake("a factorization has a rank below 1: the manifest was changed, use an intact folder")
    return found


def numbers_of(edit: FactorEdit) -> tuple[int, ...]:
    match edit:
        case LowRankEdit(rank=rank):
            return (rank,)
        case TuckerEdit(ranks=ranks):
            return ranks
        case TensorTrainEdit():
            return (*edit.rows, *edit.columns, *edit.ranks)
