"""The techniques that a federation can use: ours, those that installed packages bring, and instances that a script gives.

A package brings one by an entry point of the group `shoestring.federated` whose name is that of the class:

    [project.entry-points."shoestring.federated"]
    MajorityVote = "my_package:MajorityVote"

A plan that is read back names its techniques, and never where they are: only what is offered here can be made of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.technique import built, described, parsed, text
from shoestring.federated.catalogue import CATALOGUE
from shoestring.federated.plugin import TECHNIQUES
from shoestring.federated.technique import FederatedTechnique


@dataclass(frozen=True)
class Offered:
    kinds: tuple[type[FederatedTechnique], ...]
    instances: tuple[FederatedTechnique, ...] = ()  # that a script gives

    def written(self, words: str) -> FederatedTechnique:
        """The technique that is written so."""
        return next((one for one in self.instances if text(one) == words), None) or parsed(words, self.kinds)

    def kept(self, name: str, knobs: Mapping[str, Any]) -> FederatedTechnique:
        """The technique that a plan was kept with."""
        same = (
            one
            for one in self.instances
            if json.dumps(described(one), default=repr) == json.dumps({"name": name, "knobs": knobs})
        )
        return next(same, None) or built(name, knobs, self.kinds)


def offered(instances: Iterable[FederatedTechnique] = ()) -> Offered:
    """Everything that can be used, with what a script gives."""
    given = tuple(instances)
    kinds: dict[str, type[FederatedTechnique]] = {kind.__name__: kind for kind in CATALOGUE}
    for kind in (*map(from_package, entry_points(group=TECHNIQUES)), *map(type, given)):
        name = kind.__name__
        if kinds.get(name, kind) is not kind:
            raise Mistake(
                f"the technique {name} of {kind.__module__} has the name of {kinds[name].__module__}.{name}: give it another one"
            )
        kinds[name] = checked_kind(kind)
    return Offered(tuple(kinds.values()), given)


def from_package(entry: EntryPoint) -> type[FederatedTechnique]:
    try:
        found: type[FederatedTechnique] = entry.load()
    except Exception as error:
        raise Mistake(
            f"the technique {entry.name} of {entry.value} can't be imported ({type(error).__name__}: {error}): mend or remove "
            f"the package that brings it"
        ) from error
    if not isinstance(found, type) or found.__name__ != entry.name:
        raise Mistake(f"the entry point {entry.name} of {entry.value} is no class of that name: call it like the class")
    return found


def checked_kind(kind: type[FederatedTechnique]) -> type[FederatedTechnique]:
    if not issubclass(kind, FederatedTechnique):
        raise Mistake(
            f"{kind.__module__}.{kind.__name__} is no FederatedTechnique: inherit from shoestring.federated.technique's"
        )
    if not hasattr(kind, "why"):
        raise Mistake(
            f"{kind.__module__}.{kind.__name__} does not say what it is good for: give it `why: ClassVar[str]`, a few words"
        )
    return kind
