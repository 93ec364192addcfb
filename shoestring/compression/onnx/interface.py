"""Graph inputs and outputs of an ONNX file, and their names, taken from the model's forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, map_leaves
from shoestring.core.errors import Mistake

Forward = Callable[[nn.Module, Any], Any]
SEQUENCES = 3  # dimensions of (batch, length, features) or (batch, features, length)
AXES = {0: "batch", 1: "length", 2: "height", 3: "width"}  # names of dynamic axes


@dataclass(frozen=True)
class Interface:
    """How a job's batches map to graph inputs."""

    names: tuple[str, ...]  # of the batch's tensors, in order
    labels: frozenset[str] = frozenset()  # keys of the batch that only the loss reads

    def part(self, batch: Batch) -> Batch:
        """The batch without labels, with every tensor copied: a tensor that occurs twice (labels that are the inputs
        themselves) would become a single input."""
        kept = without_keys(batch, self.labels) if self.labels else batch
        return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, kept)

    def feed(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of a batch by graph input name."""
        return dict(zip(self.names, (one for _, one in named_tensors(self.part(batch))), strict=True))


def interface_of(model: nn.Module, forward: Forward, batch: Batch) -> Interface:
    """Find the interface by calling the model on the batch."""
    labels = loss_keys(model, forward, batch)
    part = Interface((), labels).part(batch)
    if not (own := [name for name, _ in named_tensors(part)]):
        raise Mistake(
            "the batch holds no tensor, and only tensors can be inputs of an ONNX file: give a batch with a tensor in it"
        )
    said = parameter_names(model, forward, part)
    chosen = [said.get(id(one), name) for name, one in named_tensors(part)]
    names = [one if chosen.count(one) == 1 else name for one, name in zip(chosen, own, strict=True)]
    return Interface(tuple(names if len(set(names)) == len(names) else own), labels)


def parameter_names(model: nn.Module, forward: Forward, batch: Batch) -> dict[int, str]:
    """The forward's parameter names of the batch's tensors, by id, for tensors that are passed to the model
    unchanged."""
    found: dict[int, str] = {}

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            bound = inspect.signature(module.forward).bind(*args, **named)
        except (TypeError, ValueError):  # the call itself will raise the error
            return
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            pairs = (
                value.items()
                if kind is inspect.Parameter.VAR_KEYWORD
                else (
                    ((f"{name}_{number}", one) for number, one in enumerate(value))
                    if kind is inspect.Parameter.VAR_POSITIONAL
                    else ((name, value),)
                )
            )
            for key, one in pairs:
                if isinstance(one, Tensor):
                    found.setdefault(id(one), str(key))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            forward(model, batch)
    finally:
        hook.remove()
    return found


# Outputs


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested containers, named by their path.

    >>> [name for name, _ in named_tensors({"ids": torch.zeros(1), "states": (torch.zeros(1), [torch.zeros(1)])})]
    ['ids', 'states_0', 'states_1_0']
    """
    if isinstance(value, Tensor):
        yield name or "input", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from named_tensors(one, f"{name}_{key}".lstrip("_"))
    elif isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        for key, one in zip(keys, value, strict=True):
            yield from named_tensors(
                one, f"{name}_{key}" if name else str(key) if hasattr(value, "_fields") else f"input_{key}"
            )


def all_outputs(result: Any) -> dict[str, Tensor]:
    alone = isinstance(result, (Tensor, tuple, list)) and not hasattr(result, "_fields")
    return dict(named_tensors({"output": result} if alone else result))


def loss_names(found: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of outputs that are losses: by name, or scalars beside larger outputs (transformers models without
    names)."""
    several = any(one.ndim for one in found.values())
    return frozenset(
        name
        for name, one in found.items()
        if name == "loss" or name.endswith("_loss") or (several and not one.ndim and one.is_floating_point())
    )


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The outputs to export, by name: every tensor except losses."""
    found = all_outputs(result)
    left_out = loss_names(found)
    kept = {name: one for name, one in found.items() if name not in left_out}
    if not kept:
        what = "nothing but a loss" if found else f"{type(result).__name__} without a tensor in it"
        raise Mistake(
            f"the forward gives {what}, and only tensors that answer something can be outputs of an ONNX file: give the Job a "
            f"forward that returns them"
        )
    return kept


def loss_keys(model: nn.Module, forward: Forward, batch: Batch) -> frozenset[str]:
    """Keys of a batch that only the loss reads: without them the loss disappears and all other outputs stay the
    same."""
    if not isinstance(batch, Mapping):
        return frozenset()
    with torch.no_grad():
        whole = all_outputs(forward(model, batch))
        wanted = {name: one for name, one in whole.items() if name not in loss_names(whole)}
        found: frozenset[str] = frozenset()
        for key, value in batch.items():
            if len(wanted) == len(whole) or not isinstance(value, Tensor):
                continue
            try:
                rest = all_outputs(forward(model, without_keys(batch, {key})))
            except Exception:  # the job's own code needs it
                continue
            if (
                not loss_names(rest)
                and rest.keys() == wanted.keys()
                and all(one.shape == rest[name].shape and torch.equal(one, rest[name]) for name, one in wanted.items())
            ):
                found |= {key}
    return found


def without_keys(batch: Mapping[str, Any], keys: frozenset[str] | set[str]) -> Batch:
    kept = {key: value for key, value in batch.items() if key not in keys}
    return kept if type(batch) is dict else type(batch)(kept)  # type: ignore[call-arg]


# Axes


def name_axes(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Name dynamic axes by their meaning instead of the exporter's symbols. Axes of several inputs share a name if they
    had the same size."""
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for one in model.graph.input:
        for at, size in enumerate(one.type.tensor_type.shape.dim):
            if not size.dim_param or one.name not in tensors or size.dim_param in names:
                continue
            word, count = axis_name(at, tensors[one.name], f"{one.name}_{at}", one), tensors[one.name].shape[at]
            names[size.dim_param] = word if sizes.setdefault(word, count) == count else f"{one.name}_{word}"
    for one in (*model.graph.input, *model.graph.output):
        for size in one.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), size.dim_param)


def axis_name(at: int, tensor: Tensor, other: str, info: Any) -> str:
    """What a dynamic axis of an input is. The last of three is the length if the second is fixed: (batch, features,
    length)."""
    second = info.type.tensor_type.shape.dim[1].dim_param if tensor.ndim > 1 else ""
    if tensor.ndim == SEQUENCES and at == SEQUENCES - 1:
        return other if second else "length"
    return AXES.get(at, other)


def replace_tensors(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The batch with its tensors replaced, in order."""
    left = iter(tensors)
    return map_leaves(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, batch)
