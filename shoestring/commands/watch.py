"""shoestring watch: a live page of runs."""

from __future__ import annotations

from shoestring.commands import DONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

name = "watch"
help = "a live page of runs: plan, memory, loss, events; says when a run died and where it stands"


def flags(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", help="folders of runs, or a folder of such folders")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; another than this machine's own asks for a token"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")


def run(options: Namespace) -> int:
    from shoestring.show.watch.places import check

    for place in options.run:
        check(place)
    import json
    from pathlib import Path

    from shoestring.show.watch import serve

    def ready(url: str) -> None:
        print(json.dumps({"url": url}) if options.json else f"watching at {url} (Ctrl-C ends)", flush=True)

    serve([Path(place) for place in options.run], options.host, options.port, ready)
    return DONE
