"""The exported names: a written list, so that none comes or goes unnoticed; where each lives, and that it is documented and typed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoestring

PACKAGE = Path(shoestring.__file__).parent
EXPORTED = [
    "AdaptiveRecurrent",
    "AdaptiveTokens",
    "AdaptiveUnits",
    "ByColumn",
    "Dirichlet",
    "Federated",
    "FitResult",
    "Iid",
    "Job",
    "Lamb",
    "Lars",
    "Local",
    "Mistake",
    "Numbered",
    "Outcome",
    "OverBudget",
    "PerEpoch",
    "Plan",
    "Pondered",
    "QuantitySkew",
    "Smaller",
    "Step",
    "Weights",
    "__version__",
    "compress",
    "decay_groups",
    "distill",
    "federate",
    "fit",
    "load",
    "load_test",
    "plan",
    "ponder_job",
    "serve",
    "train",
    "verify",
    "warmup_cosine",
    "warmup_linear",
]


def test_the_exported_names_are_these() -> None:
    assert sorted(shoestring.__all__) == sorted(EXPORTED)


@pytest.mark.parametrize("name", [name for name in EXPORTED if name != "__version__"])
def test_an_exported_name_has_a_docstring_of_its_own(name: str) -> None:
    text = getattr(shoestring, name).__doc__
    assert text and not text.startswith(f"{name}("), "a dataclass without a docstring has its signature there"


def test_homes_are_what_type_checkers_import() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module.removeprefix("shoestring.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoestring.")
        for alias in node.names
    }
    assert imported == shoestring.HOMES == {name: shoestring.HOMES[name] for name in EXPORTED if name != "__version__"}


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
