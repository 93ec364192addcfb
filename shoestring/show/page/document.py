"""One HTML document around what stands inside <main>."""
from __future__ import annotations

from shoestring.show.page.style import STYLE


def document(title: str, content: str, body: str = "<body>", before: str = "", after: str = "", head: str = "") -> str:
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f"<title>{title}</title>\n{head}<style>{STYLE}</style>\n</head>\n{body}\n{before}<main>\n{content}</main>\n{after}</body>\n</html>\n")
