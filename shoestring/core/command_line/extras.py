"""Optional packages: which extra of shoestring installs each, and what it is needed for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from traceback import walk_tb

from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Extra:
    name: str  # as in pip install "shoestring[name]"
    modules: tuple[str, ...]  # its packages, by import name
    purpose: str  # what works only with them

    @property
    def absent(self) -> tuple[str, ...]:
        """Its packages that are not installed."""
        return tuple(module for module in self.modules if find_spec(module) is None)

    @property
    def command(self) -> str:
        """How to install it.

        >>> EXTRAS["private"].command
        'pip install "shoestring[private]"'
        """
        return f'pip install "shoestring[{self.name}]"'

    @property
    def repair(self) -> str:
        """How to install it again, with what it needs."""
        return self.command.replace("pip install", "pip install --force-reinstall")

    @property
    def refusal(self) -> str:
        """Why its purpose is unavailable here, and what to do; empty if all its packages are installed."""
        return (
            f"{self.purpose}: this needs {', '.join(self.absent)}, which is not installed; run: {self.command}"
            if self.absent
            else ""
        )


EXTRAS = {
    extra.name: extra
    for extra in (
        Extra("private", ("dp_accounting",), "epsilon: federate --epsilon and techniques that add noise"),
        Extra("onnx", ("onnx", "onnxscript", "onnxruntime"), "compress --to onnx and export --to onnx"),
        Extra("tensorboard", ("tensorboard",), "train --tensorboard"),
        Extra("sklearn", ("sklearn",), "the built-in job `digits`"),
        Extra("transformers", ("transformers",), "jobs with Hugging Face models, such as examples/fine_tune.py"),
        Extra("peft", ("peft",), "loading what export --to peft writes"),
        Extra(
            "serve",
            ("starlette", "uvicorn", "httptools", "aiohttp"),
            "serve and load: answers over HTTP, and a load test",
        ),
    )
}


class MissingExtra(Mistake):
    """Something was requested that needs a package which is not installed."""


def install_hint(error: BaseException) -> str:
    """How to install what a failed import asked for, or to repair the package that failed in it, as the end of a
    sentence; empty if no extra of ours brings it.

    >>> install_hint(ModuleNotFoundError("No module named 'peft.utils'", name="peft.utils"))
    '; run: pip install "shoestring[peft]"'
    >>> install_hint(ModuleNotFoundError("No module named 'helper'", name="helper")), install_hint(ValueError("odd"))
    ('', '')
    """
    if not isinstance(error, ImportError):
        return ""
    broken = failed_imports(error)
    for extra in EXTRAS.values():
        if there := next((module for module in extra.modules if module in broken), ""):
            return f"; {there} is installed and can't be imported: reinstall it with what it needs: {extra.repair}"
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((f"; run: {extra.command}" for extra in EXTRAS.values() if name in extra.modules), "")


def failed_imports(error: BaseException) -> frozenset[str]:
    """Packages whose own modules were being imported when an error was raised."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    return frozenset(str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames)


def require(name: str) -> None:
    if refusal := EXTRAS[name].refusal:
        raise MissingExtra(refusal)
