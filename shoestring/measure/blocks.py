"""The blocks of any nn.Module: its repeated parts, found in the module tree, by name.

A block is an element of a ModuleList or Sequential in which classes repeat; without one, the children of the model (or
of its only child) are its blocks. Blocks do not nest: an outer repetition wins over an inner one, unless the elements
of the outer one differ much in size. Such elements are stages, as in a ResNet, and the blocks are inside them. A block
is a module that can be called. An element that can't (a list of attention and MLP) only holds modules: those are the
blocks. A TorchScript module is none, because torch lets nobody replace its forward or hook into it.
"""

from __future__ import annotations

from collections import Counter
from inspect import getattr_static

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by their full name, in the order of the module tree.

    >>> net = nn.Sequential(nn.Embedding(9, 4), *(nn.TransformerEncoderLayer(4, 1) for _ in range(2)), nn.Linear(4, 9))
    >>> list(blocks(net))
    ['1', '2']
    """
    found = dict(repeated_members(model, ""))
    if not found:
        found = {name: child for name, child in outermost(model) if any(True for _ in child.parameters())}
    return unique(found)


def repeated_members(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Members of repetitions at or below a module, outermost first."""
    children = [(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children()]
    below = {child: repeated_members(part, child) for child, part in children}
    members = [(child, part) for child, part in children if holds_weights(part)]
    if isinstance(module, CONTAINERS):
        kinds = Counter(type(part) for _, part in members)
        members = [(child, part) for child, part in members if kinds[type(part)] > 1 and has_insides(part)]
        if len(members) > 1:
            stages = are_stages([part for _, part in members])
            for child, part in members:
                below[child] = called_parts(part, child, stages)
    return [found for child, _ in children for found in below[child]]


def called_parts(part: nn.Module, name: str, stages: bool) -> list[tuple[str, nn.Module]]:
    """The blocks in a member of a repetition: itself, or its children if it can't be called."""
    if can_be_called(part):
        return (repeated_members(part, name) if stages else []) or [(name, part)]
    return [
        found
        for child, inner in part.named_children()
        if holds_weights(inner) and has_insides(inner)
        for found in called_parts(inner, f"{name}.{child}", stages)
    ]


def can_be_called(module: nn.Module) -> bool:
    """Whether a module computes something itself; ModuleList and ModuleDict only hold modules that do."""
    return getattr_static(type(module), "forward") is not nn.Module.forward or "forward" in module.__dict__


def are_stages(members: list[nn.Module]) -> bool:
    sizes = [sum(parameter.numel() for parameter in member.parameters()) for member in members]
    return max(sizes) > 1.5 * min(sizes)


def outermost(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a model, looking through models that only wrap another."""
    children = children_of(model)
    if len(children) == 1 and list(children[0][1].children()):
        name, only = children[0]
        return [(f"{name}.{child}".rstrip("."), part) for child, part in outermost(only)] or children
    return children or [("", model)]


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a module, with containers that can't be called replaced by their members."""
    return [
        (f"{name}.{member}".rstrip("."), part)
        for name, child in module.named_children()
        for member, part in ([("", child)] if can_be_called(child) else children_of(child))
    ]


def holds_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def has_insides(module: nn.Module) -> bool:
    """Whether a module has submodules or weighs as much as one that has; a lone Linear or Conv is too small to be a
    block."""
    return bool(list(module.children())) or isinstance(module, (nn.RNNBase, nn.MultiheadAttention))


def unique(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules without duplicates, one reached by two names under the first, and without those of TorchScript."""
    first = {id(part): name for name, part in reversed(found.items()) if not isinstance(part, torch.jit.ScriptModule)}
    return {name: part for name, part in found.items() if first.get(id(part)) == name}
