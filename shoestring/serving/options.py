"""What can be asked of a server: the flags of `shoestring serve` and the arguments of `shoestring.serve`. Nothing heavy is imported."""

from __future__ import annotations

import re
from typing import Any

from shoestring.core.budget import Budget
from shoestring.core.command_line.arguments import argument, dataclass, group
from shoestring.core.errors import Mistake

PERCENTILE = 0.99  # of --p99


@dataclass(frozen=True)
class ServeOptions:
    p99: str | float | None = argument("TIME", "most time for an answer, 99 of 100 times, such as 50ms")
    latency: str | None = argument("TIME@SHARE", "the same at another percentile, such as 20ms@50%%")
    memory: str | int | None = argument("BYTES", "most memory of all processes together, such as 2GiB")
    throughput: str | float | None = argument("N", "least requests that are answered a second")
    size: str | int | None = argument("BYTES", "most bytes of the model on disk")
    keep: str | float | None = argument(
        "SHARE", "least fidelity to the model's own answers; without it, answers differ by rounding at most"
    )
    use: tuple[str, ...] | None = argument(
        "TECHNIQUE",
        'exactly these techniques instead of choosing, such as "PackedBatching(tokens=512)"; may be repeated',
        repeated=True,
    )
    newest: bool = argument("", "of a run: the newest weights, not those that were best in validation", False)
    price: str | float | None = argument(
        "N", "what an hour of this machine costs: tells what a million requests do", command_only=True
    )

    def budget(self) -> Budget:
        if self.p99 is not None and self.latency is not None:
            raise Mistake("--p99 and --latency both say how fast answers must be: give one of them")
        time, share = (self.p99, PERCENTILE) if self.latency is None else parsed_latency(self.latency)
        found = {
            "latency": time,
            "memory": self.memory,
            "throughput": self.throughput,
            "size": self.size,
            "quality": self.keep,
        }
        return Budget.parse(percentile=share, **found)

    @property
    def hourly_price(self) -> float | None:
        try:
            found = None if self.price is None else float(self.price)
        except ValueError:
            raise Mistake(f"--price {self.price}: give a number, such as 0.40") from None
        if found is not None and not 0 <= found < 1e9:
            raise Mistake(f"--price {self.price}: give a number of zero or more")
        return found

    def as_asked(self) -> dict[str, Any]:
        """What a run keeps of it, and compares when it goes on; False: it is not asked for, which counts as much."""
        limits = {limit.name: limit.value for limit in self.budget().limits()}
        return {name: limits.get(name, False) for name in ("latency", "memory", "throughput", "size", "quality")} | {
            "percentile": self.budget().percentile,
            "newest": self.newest,
        }


def parsed_latency(written: str) -> tuple[str, float]:
    """
    >>> parsed_latency("20ms@50%"), parsed_latency("20ms@0.999")
    (('20ms', 0.5), ('20ms', 0.999))
    """
    found = re.fullmatch(r"\s*([^@\s]+)\s*@\s*([0-9.]+)\s*(%?)\s*", written)
    try:
        share = float(found[2]) / (100 if found[3] else 1) if found else 0.0
    except ValueError:
        share = 0.0
    if found is None or not 0 < share < 1:
        raise Mistake(f"--latency {written}: give a time and a percentile, such as 20ms@95% (or --p99 20ms)")
    return found[1], share


@dataclass(frozen=True)
class ListenOptions:
    """How the server is reached."""

    host: str = argument(
        "NAME", "address to listen on (default 127.0.0.1); others than this machine need the token", "127.0.0.1"
    )
    port: int | str = argument("N", "port to listen on (default 8000; 0: a free one)", 8000, read=int)
    name: str | None = argument("TEXT", "of the model, in addresses (default: as its folder or file)")
    token: str | None = argument(
        "TEXT", "that clients must send (default: one is made where others can reach the server)"
    )
    certificate: str | None = argument("FILE", "TLS: the certificate chain, in PEM")
    key: str | None = argument("FILE", "TLS: its key")


@dataclass(frozen=True)
class ServeCommand:
    model: str = argument(
        "RUN|FOLDER|JOB",
        "folder of a run, folder of `shoestring compress`, or a job with weights of its own",
        positional=True,
    )
    job: str | None = argument(
        "FILE",
        "of a run or a compressed model: the job that makes the model, a file or a built-in one; no file that a folder names is "
        "ever run",
        flag="--job",
    )
    asked: ServeOptions = group(ServeOptions)
    listen: ListenOptions = group(ListenOptions)
    run: str | None = argument(
        "DIR", "folder that keeps the plan, what happened and the page (default: runs/NAME-serving)"
    )
    fresh: bool = argument("", "measure and choose anew; what is in --run is kept aside", False)
    plan_only: bool = argument("", "choose and explain, and end", False, command_only=True)
