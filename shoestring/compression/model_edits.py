"""Edits: how a model's structure was changed before it was packed, as a manifest tells it. Each is a JSON object with its `kind`;
done again to a fresh model they give the same modules and shapes, and the weights come from the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake

Editor = Callable[[nn.Module, Sequence[Mapping[str, Any]]], nn.Module]
# kind -> "module:function", imported when it is needed
EDITORS = {
    "structure": "shoestring.compression.techniques.prune:pruned_again",
    "exits": "shoestring.compression.techniques.early_exit:exits_again",
    "factors": "shoestring.compression.techniques.factorize:factorized_again",
}


def edited(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """The model after all edits, in their order; neighbours of a kind are done together."""
    done = 0
    while done < len(edits):
        kind = str(edits[done].get("kind"))
        together = 1
        while done + together < len(edits) and edits[done + together].get("kind") == kind:
            together += 1
        if kind not in EDITORS:
            raise Mistake(
                f"the manifest has an edit of the kind {kind!r}, which this shoestring does not know: update it"
            )
        module, _, function = EDITORS[kind].partition(":")
        try:
            model = getattr(import_module(module), function)(model, edits[done : done + together])
        except Mistake:
            raise
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
            MemoryError,
        ) as error:
            raise Mistake(
                f"the edits of the kind {kind!r} can't be made to this model ({type(error).__name__}: {str(error)[:200]}): they "
                f"are of another model, or of nobody's"
            ) from error
        done += together
    return model
