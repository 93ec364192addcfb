"""shoestring watch: a live page of runs."""

from __future__ import annotations

from shoestring.core.command_line.arguments import argument, dataclass
from shoestring.core.command_line.exit_codes import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call


@dataclass(frozen=True)
class WatchCommand:
    run: tuple[str, ...] = argument(
        "run", "folders of runs, or a folder of such folders", (), positional=True, repeated=True
    )
    host: str = argument(
        "HOST", "address to listen on; any other than this machine's own requires a token", "127.0.0.1"
    )
    port: int = argument("PORT", "port to listen on (default: a free one)", 0, read=int)


def run(asked: WatchCommand, call: Call) -> int:
    from shoestring.show.watch.places import check

    for place in asked.run:
        check(place)
    import json
    from pathlib import Path

    from shoestring.show.watch import serve

    def ready(url: str) -> None:
        print(json.dumps({"url": url}) if call.json else f"watching at {url} (Ctrl-C ends)", flush=True)

    serve([Path(place) for place in asked.run], asked.host, asked.port, ready)
    return DONE
