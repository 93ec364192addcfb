"""A model's initial weights: from safetensors files, all or part of them, under the model's names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shoestring.core.errors import Mistake

SAFE = (".safetensors", ".safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # files written by torch.save


@dataclass(frozen=True)
class Weights:
    """Initial weights of a model, if its names and those in the files are not all the same.

        Job(model=..., weights="model.safetensors")                                   every weight is in the file, under its own name
        Weights("model.safetensors", new=("classifier.*",))                           the file has no classifier: it keeps its own values
        Weights("base/", remove_prefix="bert.", new="head.*")                         bert.encoder.0.weight -> encoder.0.weight
        Weights(["a.safetensors", "b.safetensors"], add_prefix="encoder.")            layer.0.weight -> encoder.layer.0.weight

    `files`: a safetensors file, several of them, an index (model.safetensors.index.json), or a folder of
    `from_pretrained`.
    Names in the files that begin with `remove_prefix` lose it and get `add_prefix`; others stay as they are.
    `new`: names, or patterns of names, of the model's weights that are not taken from the files.
    """

    files: Any
    remove_prefix: str = ""
    add_prefix: str = ""
    new: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        given = (self.files,) if isinstance(self.files, (str, os.PathLike)) else self.files
        if (
            not isinstance(given, Sequence)
            or not given
            or not all(isinstance(one, (str, os.PathLike)) for one in given)
        ):
            raise Mistake(f"Weights({self.files!r}): give a safetensors file, a list of them, or a folder")
        new = (self.new,) if isinstance(self.new, str) else tuple(self.new)
        if not all(isinstance(one, str) and one for one in new):
            raise Mistake(
                f'Weights(..., new={self.new!r}): give names of the model\'s weights, or patterns such as "classifier.*"'
            )
        object.__setattr__(self, "files", tuple(os.fspath(one) for one in given))
        object.__setattr__(self, "new", new)

    def model_name(self, name: str) -> str:
        """The model's name for a name in a file.

        >>> Weights("a", "bert.", "encoder.").model_name("bert.layer.0"), Weights("a", "bert.").model_name("head.bias")
        ('encoder.layer.0', 'head.bias')
        """
        return self.add_prefix + name.removeprefix(self.remove_prefix) if name.startswith(self.remove_prefix) else name

    def is_new(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.new)

    def as_code(self) -> str:
        """How it is written in a job."""
        files = repr(self.files[0] if len(self.files) == 1 else list(self.files))
        knobs = [
            f"{name}={value!r}"
            for name, value in (
                ("remove_prefix", self.remove_prefix),
                ("add_prefix", self.add_prefix),
                ("new", tuple(self.new)),
            )
            if value
        ]
        return f"shoestring.Weights({', '.join([files, *knobs])})"


def as_weights(given: Any) -> Weights | None:
    """A job's `weights` argument as Weights; None if it is empty."""
    if isinstance(given, Weights):
        return given
    return Weights(given) if given else None


def patterns(some: Sequence[str], every: Sequence[str]) -> tuple[str, ...]:
    """The fewest patterns that match `some` of all names and no others.

    >>> patterns(["head.weight", "head.bias", "body.0.bias"], ["head.weight", "head.bias", "body.0.weight", "body.0.bias"])
    ('head.*', 'body.0.bias')
    """
    wanted, found = set(some), dict[str, None]()
    for name in some:
        parts = name.split(".")
        stems = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
        whole = next((stem for stem in stems if all(one in wanted for one in every if one.startswith(stem))), None)
        found[name if whole is None else f"{whole}*"] = None
    return tuple(found)
