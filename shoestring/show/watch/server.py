"""The server of a live page: five addresses, all read-only.

/           the run, or the overview if there are several
/run/NAME   one run
/events     the inside of the page, sent each time it changes (?run=NAME for one run)
/curves     the lines of a run as JSON (?run=NAME)
/healthz    ok, as on every server of ours
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from urllib.parse import quote, unquote

from shoestring.show.page.live import SCRIPT, live
from shoestring.show.page.room_page import style_of_rooms
from shoestring.show.page.style import STYLE
from shoestring.show.watch.follow import LOOK, Watch
from shoestring.web import server as web
from shoestring.web.guard import headers

BEAT = 10.0  # seconds of silence after which a sign of life is sent


class WatchServer(web.GuardedServer):
    def __init__(self, watch: Watch, host: str = "127.0.0.1", port: int = 0) -> None:
        self.watch = watch
        super().__init__(WatchHandler, headers(STYLE + style_of_rooms(), SCRIPT), host, port)


class WatchHandler(web.GuardedHandler):
    server: WatchServer
    command_name = "watch"
    home = "The runs are at /\n"

    def get(self, asked: web.HttpRequest) -> None:
        if asked.path == "/events":
            return self.stream(asked.query.get("run"), self.headers.get("Last-Event-ID") or asked.query.get("seen", ""))
        if asked.path == "/curves":
            return self.curves(asked.query.get("run", ""))
        if asked.path == "/" or asked.path.startswith("/run/"):
            return self.page(unquote(asked.path[len("/run/") :]) if asked.path != "/" else None, asked.headers)
        return self.answer(404, "There is nothing here. " + self.home)

    def page(self, name: str | None, secret: Mapping[str, str]) -> None:
        view = self.server.watch.view(name)
        if view is None:
            return self.answer(404, "There is no such run here. " + self.home)
        events = f"/events?seen={view.mark}" + (f"&run={quote(name, safe='')}" if name else "")
        among = name if name and len(self.server.watch.runs) > 1 else ""
        return self.answer(200, live(view.title, view.content, events, among), "text/html; charset=utf-8", **secret)

    def curves(self, name: str) -> None:
        found = self.server.watch.curves(name)
        if found is None:
            return self.answer(404, "There is no such run here. " + self.home)
        return self.answer(200, found, "application/json")

    def stream(self, name: str | None, seen: str) -> None:
        """Send the page each time it changed, until the browser or this server ends."""
        if self.server.watch.view(name) is None:
            return self.answer(404, "There is no such run here. " + self.home)
        self.begin(200, "text/event-stream; charset=utf-8")
        self.wfile.write(b"retry: 1000\n\n")
        told = time.monotonic()
        while view := self.server.watch.view(name):
            if view.mark != seen:
                seen, told = view.mark, time.monotonic()
                data = "".join(f"data: {line}\n" for line in re.split("\r\n|\r|\n", str(view.content)))
                self.wfile.write(f"id: {seen}\n{data}\n".encode())
            elif time.monotonic() - told > BEAT:
                told = time.monotonic()
                self.wfile.write(b": still here\n\n")
            if self.server.closing.wait(LOOK):
                return None
        return None
