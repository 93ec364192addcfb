"""Layer dropping: repeated blocks of a list whose output has the shape of their input, so that they can be skipped.

    h -> h + f(h)   without the block   h -> h

Sajjad, Dalvi, Durrani, Nakov: On the Effect of Dropping Layers of Pre-trained Transformer Models, 2020, arXiv
2004.03844.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.pruning.prune_edits import Attribute, Drop
from shoestring.compression.pruning.record import tensors_in
from shoestring.measure.blocks import blocks


@dataclass(frozen=True)
class Stack:
    """Blocks of one list with the same class and shapes."""

    container: str
    length: int  # of the list
    members: tuple[int, ...]  # indices of blocks that may be removed

    @property
    def name(self) -> str:
        return f"layers {self.container}"

    def path(self, member: int) -> str:
        return f"{self.container}.{member}".lstrip(".")


def stacks_of(model: nn.Module, example: Callable[[nn.Module], Any]) -> tuple[Stack, ...]:
    """The stacks of a model: blocks of one class with weights of the same shapes, whose output has the shape of their
    input."""
    found = {name: block for name, block in blocks(model).items() if any(True for _ in block.children())}
    calls: dict[str, list[bool]] = {name: [] for name in found}
    with ExitStack() as stack, torch.no_grad():
        for name, block in found.items():

            def see(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                given, given_back = tensors_in([args, kwargs]), tensors_in(output)
                calls[name].append(bool(given and given_back) and given[0].shape == given_back[0].shape)

            stack.callback(block.register_forward_hook(see, with_kwargs=True).remove)
        example(model)
    alike: dict[Any, list[str]] = {}
    for name, block in found.items():
        container = name.rpartition(".")[0]
        if calls[name] == [True] and isinstance(model.get_submodule(container), (nn.ModuleList, nn.Sequential)):
            alike.setdefault(
                (container, type(block), tuple(tuple(one.shape) for one in block.parameters())), []
            ).append(name)
    stacks = []
    for (container, *_), names in alike.items():
        holder: Any = model.get_submodule(container)
        order = [name for name, _ in holder.named_children()]
        if len(names) > 1:
            stacks.append(Stack(container, len(order), tuple(order.index(name.rpartition(".")[2]) for name in names)))
    return tuple(stacks)


@contextmanager
def skip_blocks(model: nn.Module, stack: Stack, members: Sequence[int]) -> Iterator[None]:
    """Make these blocks return their input inside the context."""
    holder: Any = model.get_submodule(stack.container)
    with ExitStack() as hooks:
        for member in members:
            hooks.callback(holder[member].register_forward_hook(return_input, with_kwargs=True).remove)
        yield


def return_input(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    given = tensors_in([args, kwargs])[0]
    if isinstance(output, Tensor):
        return given
    if isinstance(output, tuple):
        return (given, *output[1:])
    return output


def drop_edits(model: nn.Module, stack: Stack, kept: Sequence[int], named: bool) -> list[Attribute | Drop]:
    """Edits that keep only the blocks `kept` of a list and adjust their `layer_idx`; with `named`, also attributes that
    count layers, found by their names."""
    holder: Any = model.get_submodule(stack.container)
    edits: list[Attribute | Drop] = []
    for new, old in enumerate(kept):
        for name, module in holder[old].named_modules(prefix=stack.path(old)):
            if getattr(module, "layer_idx", new) != new:
                edits.append(Attribute(name, "layer_idx", new))
    if named:
        parts = stack.container.split(".") if stack.container else []
        for length in range(len(parts)):
            edits += layer_counts(model, ".".join(parts[:length]), stack.length, kept)
    return [*edits, Drop(stack.container, stack.length, tuple(kept))]


def layer_counts(model: nn.Module, name: str, length: int, kept: Sequence[int]) -> Iterator[Attribute]:
    """Attributes of a module around a list, and of its config, that depend on the number of layers: num_hidden_layers,
    or lists with an entry per layer."""
    module: Any = model.get_submodule(name)
    for owner, config in ((module, False), (getattr(module, "config", None), True)):
        for attribute, value in (vars(owner) if hasattr(owner, "__dict__") else {}).items():
            if attribute.startswith("_"):
                continue
            if (
                type(value) is int
                and value == length
                and any(word in attribute for word in ("layer", "depth", "block"))
            ):
                yield Attribute(name, attribute, len(kept), config)
            elif (
                config
                and "layer" in attribute
                and isinstance(value, (list, tuple))
                and len(value) == length
                and all(isinstance(one, (int, float, str, bool)) for one in value)
            ):
                yield Attribute(name, attribute, [value[place] for place in kept], True)
