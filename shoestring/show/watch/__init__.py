"""Watch runs in a browser, live.

    run folder  ->  follow (reads events, draws the page)  ->  server (web/: access control)  ->  browser

The page is drawn here and sent whenever it changed. Nothing is read or drawn while nobody is looking. Does not import
torch.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any


def serve(
    paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0, ready: Callable[[str], object] = lambda url: None
) -> None:
    """Serve the page of runs, or of folders of runs, until asked to stop; ready(url) is called once it can be opened."""
    import threading

    from shoestring.core.running.signals import listening
    from shoestring.show.watch.follow import Watch
    from shoestring.show.watch.server import WatchServer

    with WatchServer(Watch(paths), host, port) as server:

        def end(number: int, frame: Any) -> None:
            threading.Thread(target=server.shutdown).start()  # it waits for the loop below, so it needs another thread

        with listening(end):
            ready(server.url)
            server.serve_forever(poll_interval=0.2)
