"""Structure edits in a manifest: how a model was pruned or factorized before it was packed.

Each edit is a JSON object with its `kind`. Applied to a freshly built model, edits give the same modules and shapes as
before; the weights come from the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake

# kind -> "module:function", imported on demand
EDITORS = {
    "structure": "shoestring.compression.techniques.prune:apply_pruning",
    "factors": "shoestring.compression.techniques.factorize:apply_factorization",
    "cascade": "shoestring.compression.techniques.cascade:cascade_again",
    "exits": "shoestring.compression.techniques.early_exit:exits_again",
}


def apply_edits(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Apply edits in order; consecutive edits of one kind are applied together."""
    done = 0
    while done < len(edits):
        kind = str(edits[done].get("kind"))
        together = 1
        while done + together < len(edits) and edits[done + together].get("kind") == kind:
            together += 1
        if kind not in EDITORS:
            raise Mistake(
                f"the manifest has an edit of the kind {kind!r}, which this shoestring does not know: update shoestring"
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
                f"edits of the kind {kind!r} can't be applied to this model ({type(error).__name__}: {str(error)[:200]}): they "
                f"belong to another model, or are damaged"
            ) from error
        done += together
    return model
