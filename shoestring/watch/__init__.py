"""Watch runs in a browser, live.

    run folder  ->  follow (events read on, story, page)  ->  server (guard: who may look)  ->  browser

The page is drawn here and sent when it changed. Nothing is read or drawn unless somebody looks. No torch.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from shoestring.watch.follow import Watch
from shoestring.watch.server import Server


def serve(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0, ready: Callable[[str], object] = lambda url: None) -> None:
    """Serve the page of runs, or of folders of runs, until interrupted; ready(url) is called once it can be opened."""
    with Server(Watch(paths), host, port) as server, suppress(KeyboardInterrupt):
        ready(server.url)
        server.serve_forever()
