"""Which techniques a federation can use: those of the catalogue, of installed packages, and instances passed by a
script.

A package adds a technique by an entry point in the group `shoestring.federated`, named like the class:

    [project.entry-points."shoestring.federated"]
    MajorityVote = "my_package:MajorityVote"

A saved plan names its techniques without saying where their code is, so reading a plan can only make techniques listed
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.technique import parse_technique, technique_from, technique_json, text
from shoestring.federated.catalogue import CATALOGUE
from shoestring.federated.plugin import TECHNIQUES
from shoestring.federated.technique import FederatedTechnique


@dataclass(frozen=True)
class AvailableTechniques:
    kinds: tuple[type[FederatedTechnique], ...]
    instances: tuple[FederatedTechnique, ...] = ()  # passed by a script

    def parse(self, words: str) -> FederatedTechnique:
        """The technique spelled by the words of a `--use`, such as "FedAdam(lr=0.01)"."""
        return next((one for one in self.instances if text(one) == words), None) or parse_technique(words, self.kinds)

    def restore(self, name: str, knobs: Mapping[str, Any]) -> FederatedTechnique:
        """The technique that a saved plan describes."""
        same = (
            one
            for one in self.instances
            if json.dumps(technique_json(one), default=repr) == json.dumps({"name": name, "knobs": knobs})
        )
        return next(same, None) or technique_from(name, knobs, self.kinds)


def available_techniques(instances: Iterable[FederatedTechnique] = ()) -> AvailableTechniques:
    """All techniques that can be used: of the catalogue, of installed packages, and the given instances."""
    given = tuple(instances)
    kinds: dict[str, type[FederatedTechnique]] = {kind.__name__: kind for kind in CATALOGUE}
    for kind in (*map(load_entry_point, entry_points(group=TECHNIQUES)), *map(type, given)):
        name = kind.__name__
        if kinds.get(name, kind) is not kind:
            raise Mistake(
                f"the technique {name} of {kind.__module__} has the same name as {kinds[name].__module__}.{name}: rename it"
            )
        kinds[name] = require_technique_class(kind)
    return AvailableTechniques(tuple(kinds.values()), given)


def load_entry_point(entry: EntryPoint) -> type[FederatedTechnique]:
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


def require_technique_class(kind: type[FederatedTechnique]) -> type[FederatedTechnique]:
    if not issubclass(kind, FederatedTechnique):
        raise Mistake(
            f"{kind.__module__}.{kind.__name__} is no FederatedTechnique: derive it from shoestring.federated.technique.FederatedTechnique"
        )
    if not hasattr(kind, "why"):
        raise Mistake(
            f"{kind.__module__}.{kind.__name__} has no `why: ClassVar[str]`: say in a few words what it is good for"
        )
    return kind
