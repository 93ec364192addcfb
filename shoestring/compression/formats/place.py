"""A form in the place of a weight: the module computes from what is stored, whenever it is called.

    Linear.weight (a parameter)   ->   Linear.weight (a property: form.dense()), Linear.weight_form (the form, whose buffers are the weight)

The module keeps its class (a subclass is made of it), so that code that asks `isinstance(layer, nn.Linear)` goes on to work, and whoever
reads `layer.weight` gets the numbers. An embedding looks rows up without making the others. What torch keeps references to (the weights
of an LSTM) is given to it for the time of a call.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import WeightFormat
from shoestring.core.private import collect_recurrent, own_parameters, recurrent_weights

SUFFIX = "_form"  # of the name of the module that holds a weight's form


def placed(model: nn.Module, forms: Mapping[str, WeightFormat]) -> nn.Module:
    """The model with forms in the place of its weights, by name. It is changed. A weight with several names (a tied one) is one form in all
    places: give it under any one of them, or under all."""
    names = dict(model.named_parameters(remove_duplicate=False))
    by_weight = {id(names[name]): form for name, form in forms.items()}
    for module in list(model.modules()):
        mine = {name: by_weight[id(value)] for name, value in own_parameters(module).items() if id(value) in by_weight}
        if mine:
            put(module, mine)
    return model


@contextmanager
def inside(model: nn.Module, forms: Mapping[str, WeightFormat]) -> Iterator[None]:
    """While inside, the model has forms in the place of these weights. Not for recurrent layers, which keep references to theirs."""
    names = dict(model.named_parameters(remove_duplicate=False))
    weights = {id(names[name]) for name in forms}
    before = [
        (module, type(module), dict(own_parameters(module)))
        for module in model.modules()
        if weights & {id(one) for one in own_parameters(module).values()}
    ]
    placed(model, forms)
    try:
        yield
    finally:
        for module, kind, mine in before:
            for name in [name for name in mine if id(mine[name]) in weights]:
                delattr(module, name + SUFFIX)
            module.__class__ = kind
            own_parameters(module).clear()
            own_parameters(module).update(mine)


def put(module: nn.Module, forms: Mapping[str, WeightFormat]) -> None:
    """Replace weights of one module."""
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
    """A subclass whose weights of these names are computed from their forms."""

    def dense(name: str) -> property:
        return property(lambda module: getattr(module, name + SUFFIX).dense())

    body: dict[str, Any] = {name: dense(name) for name in names}
    body |= {
        "original_class": kind,
        "packed_names": names,
        "__doc__": f"{kind.__name__} that computes {', '.join(names)} from packed numbers.",
    }
    if issubclass(kind, nn.Embedding) and kind.forward is nn.Embedding.forward and names == ("weight",):
        body["forward"] = looked_up
    elif issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward and "weight" in names:
        body["forward"] = multiplied
    elif issubclass(kind, nn.RNNBase):
        body["forward"] = with_weights
    made = type(f"Packed{kind.__name__}", (kind,), body)
    copyreg.pickle(made, reduced)
    return made


def looked_up(self: nn.Embedding, index: Tensor) -> Tensor:
    """Rows of an embedding, without making the others; a table whose rows are cut to a norm is made whole, as torch cuts them in place."""
    form: WeightFormat = getattr(self, "weight" + SUFFIX)
    return form.rows(index) if self.max_norm is None else nn.Embedding.forward(self, index)


def multiplied(self: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer, as the form of its weight computes it."""
    form: WeightFormat = getattr(self, "weight" + SUFFIX)
    return form.linear(x, self.bias)


def with_weights(self: nn.RNNBase, *inputs: Any, **named: Any) -> Any:
    """A recurrent layer, with its weights made for the time of the call."""
    kind: Any = vars(type(self))["original_class"]
    with recurrent_weights(self):
        return kind.forward(self, *inputs, **named)


def reduced(module: nn.Module) -> tuple[Any, ...]:
    """How such a module is pickled: its class is made again."""
    mine = vars(type(module))
    return restored, (mine["original_class"], mine["packed_names"]), dict(module.__dict__)


def restored(kind: Any, names: tuple[str, ...]) -> nn.Module:
    made = packed_class(kind, names)
    return made.__new__(made)


def forms_of(model: nn.Module) -> dict[str, WeightFormat]:
    """The forms of a model by the first name of their weight."""
    found: dict[str, WeightFormat] = {}
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WeightFormat) and name.endswith(SUFFIX) and id(module) not in seen:
            seen.add(id(module))
            found[name.removesuffix(SUFFIX)] = module
    return found


def decoded(model: nn.Module, names: Iterable[str] | None = None) -> nn.Module:
    """The model with ordinary weights again: as fast as it was, and as large in memory. It is changed."""
    wanted = None if names is None else set(names)
    weights: dict[int, nn.Parameter] = {}
    for prefix, module in list(model.named_modules()):
        forms = {
            name: child
            for name, child in module.named_children()
            if isinstance(child, WeightFormat) and name.endswith(SUFFIX)
        }
        chosen = {
            name: form
            for name, form in forms.items()
            if wanted is None or f"{prefix}.{name}".lstrip(".").removesuffix(SUFFIX) in wanted
        }
        if not chosen:
            continue
        kind, left = (
            vars(type(module))["original_class"],
            tuple(sorted(name.removesuffix(SUFFIX) for name in forms if name not in chosen)),
        )
        module.__class__ = packed_class(kind, left) if left else kind
        for name, form in chosen.items():
            delattr(module, name)
            value = weights.setdefault(id(form), nn.Parameter(form.dense(), requires_grad=False))
            module.register_parameter(name.removesuffix(SUFFIX), value)
        if isinstance(module, nn.RNNBase) and not left:
            collect_recurrent(module)
    return model


def memory_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each once."""
    return sum(
        value.untyped_storage().nbytes()
        for value in {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
        if not isinstance(value, torch.nn.UninitializedParameter)
    )
