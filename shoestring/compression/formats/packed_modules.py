"""Modules that compute from packed weights: each parameter is replaced by a weight format and decoded when it is used.

    Linear.weight (a parameter)   ->   Linear.weight_form (the weight format, a module whose buffers are the packed weight)
                                       Linear.weight (a property: weight_form.dense())

The module becomes an instance of a subclass of its own class, so `isinstance(layer, nn.Linear)` still holds and
`layer.weight` still gives the weight. An embedding decodes only the rows that it looks up. The weights of an LSTM,
which torch references elsewhere, are decoded for the duration of each call.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import WeightFormat
from shoestring.core.private import collect_recurrent, own_parameters, recurrent_weights

SUFFIX = "_form"  # a parameter's name plus this is the name of the submodule with its weight format


def place_formats(model: nn.Module, forms: Mapping[str, WeightFormat]) -> nn.Module:
    """Replace weights of the model by weight formats, in place; `forms`: by parameter name. Tied weights share one
    format: give it under one of their names, or under all."""
    names = dict(model.named_parameters(remove_duplicate=False))
    by_weight = {id(names[name]): form for name, form in forms.items()}
    for module in list(model.modules()):
        mine = {name: by_weight[id(value)] for name, value in own_parameters(module).items() if id(value) in by_weight}
        if mine:
            pack_module(module, mine)
    return model


@contextmanager
def temporary_formats(model: nn.Module, forms: Mapping[str, WeightFormat]) -> Iterator[None]:
    """Replace these weights by weight formats inside the context. Not for recurrent layers, which keep references to
    their weights."""
    names = dict(model.named_parameters(remove_duplicate=False))
    weights = {id(names[name]) for name in forms}
    before = [
        (module, type(module), dict(own_parameters(module)))
        for module in model.modules()
        if weights & {id(one) for one in own_parameters(module).values()}
    ]
    place_formats(model, forms)
    try:
        yield
    finally:
        for module, kind, mine in before:
            for name in [name for name in mine if id(mine[name]) in weights]:
                delattr(module, name + SUFFIX)
            module.__class__ = kind
            own_parameters(module).clear()
            own_parameters(module).update(mine)


def pack_module(module: nn.Module, forms: Mapping[str, WeightFormat]) -> None:
    """Replace weights of one module by weight formats."""
    there = tuple(
        name.removesuffix(SUFFIX) for name, child in module.named_children() if isinstance(child, WeightFormat)
    )
    kind = vars(type(module)).get("original_class", type(module))
    for name, form in forms.items():
        del own_parameters(module)[name]
        module.add_module(name + SUFFIX, form.train(module.training))
    module.__class__ = packed_class(kind, tuple(sorted({*there, *forms})))
    if isinstance(module, nn.RNNBase):
        collect_recurrent(module, keep=False)


@cache
def packed_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass that decodes the weights of these names from their weight formats."""

    def dense(name: str) -> property:
        return property(lambda module: getattr(module, name + SUFFIX).dense())

    body: dict[str, Any] = {name: dense(name) for name in names}
    body |= {
        "original_class": kind,
        "packed_names": names,
        "__doc__": f"{kind.__name__} that decodes {', '.join(names)} from packed weights.",
    }
    if issubclass(kind, nn.Embedding) and kind.forward is nn.Embedding.forward and names == ("weight",):
        body["forward"] = packed_embedding_forward
    elif issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward and "weight" in names:
        body["forward"] = packed_linear_forward
    elif issubclass(kind, nn.RNNBase):
        body["forward"] = packed_recurrent_forward
    made = type(f"Packed{kind.__name__}", (kind,), body)
    copyreg.pickle(made, reduce_packed_module)
    return made


def packed_embedding_forward(self: nn.Embedding, index: Tensor) -> Tensor:
    """Embedding lookup that decodes only the rows it needs. With `max_norm` the whole table is decoded, because torch
    renormalises rows in place."""
    form: WeightFormat = getattr(self, "weight" + SUFFIX)
    return form.rows(index) if self.max_norm is None else nn.Embedding.forward(self, index)


def packed_linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """Forward of a linear layer, as its weight format computes it."""
    form: WeightFormat = getattr(self, "weight" + SUFFIX)
    return form.linear(x, self.bias)


def packed_recurrent_forward(self: nn.RNNBase, *inputs: Any, **named: Any) -> Any:
    """Forward of a recurrent layer, with its weights decoded for the duration of the call."""
    kind: Any = vars(type(self))["original_class"]
    with recurrent_weights(self):
        return kind.forward(self, *inputs, **named)


def reduce_packed_module(module: nn.Module) -> tuple[Any, ...]:
    """`copyreg` reducer of packed modules: their class is created again when they are loaded."""
    mine = vars(type(module))
    return rebuild_packed_module, (mine["original_class"], mine["packed_names"]), dict(module.__dict__)


def rebuild_packed_module(kind: Any, names: tuple[str, ...]) -> nn.Module:
    made = packed_class(kind, names)
    return made.__new__(made)


def formats_of(model: nn.Module) -> dict[str, WeightFormat]:
    """The weight formats of a model, by the first name of their weight."""
    found: dict[str, WeightFormat] = {}
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WeightFormat) and name.endswith(SUFFIX) and id(module) not in seen:
            seen.add(id(module))
            found[name.removesuffix(SUFFIX)] = module
    return found


def decode_weights(model: nn.Module) -> nn.Module:
    """Replace packed weights by ordinary parameters, in place: the model is as fast and as large in memory as
    before."""
    weights: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        forms = {
            name: child
            for name, child in module.named_children()
            if isinstance(child, WeightFormat) and name.endswith(SUFFIX)
        }
        if not forms:
            continue
        module.__class__ = vars(type(module))["original_class"]
        for name, form in forms.items():
            delattr(module, name)
            value = weights.setdefault(id(form), nn.Parameter(form.dense(), requires_grad=False))
            module.register_parameter(name.removesuffix(SUFFIX), value)
        if isinstance(module, nn.RNNBase):
            collect_recurrent(module)
    return model


def memory_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    return sum(
        value.untyped_storage().nbytes()
        for value in {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
        if not isinstance(value, torch.nn.UninitializedParameter)
    )
