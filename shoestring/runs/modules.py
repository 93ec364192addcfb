"""The local modules that a run uses: their digests are stored in its folder, so that a run is never resumed with
changed code unnoticed.

A module is local if this process has imported it and it belongs to no library: it is in the job's folder, in another
folder on `sys.path`, or an editable install. They are searched after the import, in `sys.modules` and among the globals
of modules found, which covers packages, relative imports, and modules loaded by name or path. A module that a function
imports is noted after the function ran: after the model is made, and after the step that needs it.

modules.json has {"modules": {"layers/attention.py": SHA-256}}. File names are relative to their entry of `sys.path`, so
that a run can be moved; names that lead elsewhere are ignored. Files named there are hashed, never imported.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import file_sha256
from shoestring.planning.answers import loaded_modules, own_file
from shoestring.runs.folder import Folder

NAME = "modules.json"
LARGEST = 64 << 20  # bytes; a larger file is no module of ours
# Modules covered otherwise: the job file by its own digest, a script by the properties of its job
KNOWN = ("__main__", "__mp_main__", "shoestring_script")
JOB_FILE = "shoestring_job_"

Modules = Mapping[str, str]  # file name -> SHA-256


def imported_modules(among: Collection[str] | None = None, files: Collection[str] | None = None) -> dict[str, str]:
    """The local modules that this process has imported by now, restricted to the modules `among` or to `files` if given.
    Only their files are read."""
    found = {}
    for name, module in loaded_modules().items():
        wanted = (among is None or name in among) and name not in KNOWN and not name.startswith(JOB_FILE)
        if not wanted or not (file := own_file(module)):
            continue
        called = file_name(name, file)
        if (files is None or called in files) and (digest := digest_of(file)):
            found[called] = digest
    return found


def modules_of_file(file: Path) -> frozenset[str]:
    """Names of the modules that a Python file imports, itself or through the user's modules that it imports. Imports are
    read from the source, inside functions too, and only modules that this process has imported by now count."""
    loaded, found, todo = loaded_modules(), set(), [("", str(file))]
    while todo:
        name, path = todo.pop()
        for one in imports_in(Path(path).read_bytes(), name, path.endswith("/__init__.py")):
            module = loaded.get(one)
            if module is not None and one not in found and (own := own_file(module)):
                found.add(one)
                todo.append((one, own))
    return frozenset(found)


def imports_in(source: bytes, module: str = "", is_package: bool = False) -> set[str]:
    """Names that may be modules in the import statements of a source; `module` is its own name, for relative imports.

    >>> sorted(imports_in(b"import a.b, c"))
    ['a', 'a.b', 'c']
    >>> sorted(imports_in(b"def f():\\n    from ..x import y", "p.q.r"))
    ['p', 'p.x', 'p.x.y']
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if node.level else []
            base = parts[: len(parts) + is_package - node.level] + ([node.module] if node.module else [])
            found |= {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
    return {".".join(one.split(".")[:count]) for one in found for count in range(1, len(one.split(".")) + 1)} - {""}


def file_name(module: str, file: str) -> str:
    """The file of a module, relative to the entry of `sys.path` that it was found in.

    >>> file_name("layers.attention", "/home/me/layers/attention.py"), file_name("layers", "/home/me/layers/__init__.py")
    ('layers/attention.py', 'layers/__init__.py')
    >>> file_name("found by its path", "/home/me/odd.py")
    'odd.py'
    """
    path = PurePosixPath(*module.split("."))
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if file.endswith(f"/{name}"):
            return name
    return os.path.basename(file)


def digest_of(file: str | Path) -> str:
    """SHA-256 of a file; empty if it can't be a module."""
    try:
        return file_sha256(file) if os.path.getsize(file) <= LARGEST else ""
    except (OSError, ValueError):
        return ""


def modules_on_path(names: Iterable[str], folder: str | Path) -> dict[str, str]:
    """Those of these files that Python would find now for a job in this folder, with their digests. Nothing is
    imported."""
    found: dict[str, str] = {}
    for name in names:
        inside = PurePosixPath(name)
        if inside.suffix == ".py" and not inside.is_absolute() and ".." not in inside.parts:
            digest = next(filter(None, (digest_of(Path(place, inside)) for place in (folder, *sys.path))), "")
            found |= {name: digest} if digest else {}
    return found


@dataclass(frozen=True)
class ModuleChanges:
    """Differences between a run's local modules now and when it was started."""

    changed: tuple[str, ...] = ()  # content changed
    new: tuple[str, ...] = ()  # imported now but not then
    gone: tuple[str, ...] = ()  # imported then but not found now

    @property
    def remarks(self) -> list[str]:
        """Remarks about changes that may or may not matter."""
        return [f"the job imports {', '.join(self.new)} now, which it did not when the run was begun"] * bool(
            self.new
        ) + [f"{', '.join(self.gone)}, which the run was begun with, can't be found now"] * bool(self.gone)


def changes(before: Modules, now: Modules, folder: str | Path) -> ModuleChanges:
    """Compare the modules imported now (or to be imported) with the recorded ones."""
    there = modules_on_path(set(before) - set(now), folder) | dict(now)
    return ModuleChanges(
        tuple(name for name, digest in sorted(before.items()) if there.get(name, digest) != digest),
        tuple(sorted(set(now) - set(before))),
        tuple(sorted(set(before) - set(there))),
    )


def changed_text(name: str) -> str:
    return f"the module {name}, which the job imports, is not as it was when the run was begun"


def refusal(folder: Folder, found: Iterable[str]) -> Mistake:
    """The error for a run whose code changed; `found` says how."""
    adopt = "--adopt goes on from its last checkpoint with what is asked for now, " * (folder.place == "--run")
    return Mistake(
        f"{folder.path} holds a run that differs from what is asked for now: {'; '.join(found)}. {adopt}--fresh begins anew (and "
        f"keeps the old run aside)"
    )


def kept_modules(folder: Folder) -> dict[str, str] | None:
    """The modules recorded for a run; None if none were recorded."""
    found = folder.read(NAME).get("modules")
    return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else None


def keep_modules(folder: Folder, modules: Modules) -> None:
    folder.write(NAME, {"modules": dict(modules)})


def note_modules(
    folder: Folder, beside: str | Path, refuse: bool, tell: Callable[[str], None], begins: bool = False
) -> None:
    """Record what this process has imported by now. A module that changed since the run was started is refused, or only
    reported; with `begins`, before the first step of a process, new and missing modules are reported too. `beside`: the
    job's folder."""
    before, now = kept_modules(folder), imported_modules()
    found = changes(before or {}, now, beside)
    if found.changed and refuse:
        raise refusal(folder, map(changed_text, found.changed))
    for name in found.changed:
        tell(f"{changed_text(name)}: the run goes on with it as it is now")
    for remark in found.remarks if begins and refuse and before is not None else ():
        tell(remark)
    if {**(before or {}), **now} != before:
        keep_modules(folder, {**(before or {}), **now})
