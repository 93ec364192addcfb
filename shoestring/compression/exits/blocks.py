"""Find the chain of blocks of a model: repeated blocks that are called one after the other, if there is a single such
chain."""

from __future__ import annotations

from torch import nn

from shoestring.core.errors import Mistake
from shoestring.measure.blocks import blocks, can_be_called

LISTS = (nn.Sequential, nn.ModuleList)


def chain_of(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name, in order: two or more members of an nn.Sequential or nn.ModuleList (or of several, such as
    stages).

    >>> list(chain_of(nn.Sequential(nn.Linear(2, 2), *(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))))
    ['1', '2']
    """
    found = {name: block for name, block in blocks(model).items() if can_be_called(block)}
    listed = {name: block for name, block in found.items() if isinstance(parent(model, name), LISTS)}
    if len(listed) < 2:
        some = [f"{name or 'the model'} ({type(block).__name__})" for name, block in list(found.items())[:6]]
        kinds = ", ".join(some) or "nothing with weights"
        raise Mistake(
            f"no chain of like blocks in {type(model).__name__}: found {kinds}; exits come after members of an nn.Sequential or "
            f"nn.ModuleList of two or more like blocks: build the model so, or use a Cascade of a small and this model"
        )
    return listed


def is_plain(module: nn.Module) -> bool:
    """Whether it calls its members one after the other, and does nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
    )


def ancestors(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that contain a module, from the model downwards."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]


def parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
