"""Hooks of mkdocs: what the documentation site has beside docs/*.md, and links that work on it. `make docs` builds it.

Pages are made of the techniques' docstrings, of the exported names and of the texts in the repository's root. Links are written for
the repository; on the site they lead to the page that was made of their target, and where there is none, they name the file.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from technique_pages import ROOMS, technique_pages

import shoestring

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.shoestring")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="https?:|<link(?![^>]*rel="canonical")[^>]*\shref="https?:')
ROOT_TEXTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
TEXTS = {name: f"project/{name.replace('/', '-').lower()}" for name in ROOT_TEXTS} | {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix() for path in (ROOT / "decisions").glob("*.md")
}
PICTURES = ("benchmarks/compress/exits.png",)
ON_SITE = (
    TEXTS
    | {name: name for name in PICTURES}
    | {f"docs/{path.name}": path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".png")}
    | {"README.md": "index.md"}
)


def on_config(config: Any) -> Any:
    """Add the pages that are made here to the navigation."""
    rooms = [
        {room.name.capitalize(): [f"techniques/{room.name}/{kind.__name__}.md" for kind in room.catalogue]}
        for room in ROOMS
    ]
    decisions = sorted(name for name in TEXTS if name.startswith("decisions/"))
    project = [*(TEXTS[name] for name in ROOT_TEXTS), {"Decisions": decisions}]
    config.nav = [*config.nav, {"Techniques": ["techniques.md", *rooms]}, {"API": "api.md"}, {"Project": project}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here, and the pictures that they show."""
    made = {f"techniques/{path}": text for path, text in technique_pages().items()} | {"api.md": api_page()}
    made |= {place: (ROOT / name).read_text(encoding="utf-8") for name, place in TEXTS.items()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for name in PICTURES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def api_page() -> str:
    """The exported names, whose docstrings mkdocstrings fills in."""
    names = [
        f"::: shoestring.{shoestring.HOMES[name]}.{name}" for name in shoestring.__all__ if name in shoestring.HOMES
    ]
    return "# API\n\nWhat `import shoestring` gives.\n\n" + "\n\n".join(names) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they work on the site."""
    source = next((name for name, place in ON_SITE.items() if place == page.file.src_uri and name != "README.md"), "")
    return LINK.sub(lambda found: site_link(found, source, page.file.src_uri), markdown) if source else markdown


def site_link(found: re.Match[str], source: str, here: str) -> str:
    """A link of a file of the repository, for the page that is made of that file."""
    picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if "://" in target:
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists():
        LOG.warning("%s links to %s, which is not there", source, target)
    if path in ON_SITE:
        return f"{picture}[{text}]({posixpath.relpath(ON_SITE[path], posixpath.dirname(here) or '.')}{anchor})"
    return f"`{path}`" if path in text else f"{text} (`{path}`)"


def on_post_build(config: Any) -> None:
    """Refuse pages that load anything from elsewhere: the site is read offline."""
    for path in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(path.read_text(encoding="utf-8")):
            raise SystemExit(f"{path} loads something from elsewhere: {found[0]}")
