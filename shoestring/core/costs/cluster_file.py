"""The file of `--hardware`: a cluster described in JSON. One table lists every key, its permitted values and its
meaning.

An unknown key is refused, never ignored: a misspelt one would silently be a default. docs/hardware.md has the same
table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.files.regular import read_regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.core.units import parse_bytes

EXAMPLE = """{"name": "8 x A100", "device": "cuda", "memory": "80GiB", "flops": 1.2e14, "bandwidth": "1.5TB", "devices": 8,
 "link": "250GB", "latency": 1e-5, "network": "25GB", "network_latency": 3e-5, "base": "1GiB"}"""
DEVICES = ("cpu", "cuda")
LARGEST = 1e30  # no figure of a cluster is as large,
MOST = 10**9  # and nothing that is counted
PRECISIONS = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}  # bytes of a number in a matrix product


@dataclass(frozen=True)
class Description:
    """A described cluster of machines with `devices` equal devices each. Speeds are for one direction."""

    memory: float  # bytes of a device
    flops: float  # float32 operations per second that a device reaches
    bandwidth: float  # bytes per second of a device's memory
    devices: int  # of a machine
    link: float  # bytes per second between two devices of a machine
    latency: float  # seconds until a message between them begins to arrive
    network: float  # bytes per second from a machine to the others, shared by all its devices
    network_latency: float  # seconds until a message between machines begins to arrive
    name: str = ""
    device: str = "cuda"
    base: float = 2.0**30  # bytes of a process besides its tensors
    disk: float = (
        0.0  # bytes per second that a device writes to and reads from disk; 0: not known, so nothing is put there
    )
    peak: Mapping[str, float] = field(default_factory=dict)  # precision -> operations per second, by the data sheet
    efficiency: Mapping[str, float] = field(
        default_factory=dict
    )  # precision -> fraction of that inside a large product
    attention: float = 0.33  # fraction of the 16-bit peak that fused attention reaches
    processors: int = 108  # multiprocessors that a product's tiles are spread over
    sending: int = 24  # multiprocessors that a running collective occupies


class InvalidValue(Exception):
    """An impossible value; the text says what it must be."""


def number(value: Any, least: float = 0.0, most: float = LARGEST, strictly: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidValue("a number")
    if not (value > least if strictly else value >= least) or not value <= most:
        limit = f" and at most {most:g}" if most < LARGEST or value > most else ""
        raise InvalidValue(f"a number {'more than' if strictly else 'of at least'} {least:g}{limit}")
    return float(value)


def seconds(value: Any) -> float:
    return number(value, strictly=False)


def share(value: Any) -> float:
    return number(value, most=1.0)


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise InvalidValue(f"a whole number of at least 1 and at most {MOST:,}")
    return value


def size(value: Any, least: float = 1 << 20) -> float:
    try:
        return number(parse_bytes(value) if isinstance(value, str) else value, least, strictly=False)
    except (Mistake, InvalidValue):
        raise InvalidValue(
            'bytes with their unit, as "80GiB" or "25GB", at least 1 MiB'
        ) from None  # less is a forgotten unit


def size_or_nothing(value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else size(value)


def rate(value: Any) -> float:
    try:
        return size(value.removesuffix("/s") if isinstance(value, str) else value, 1e4)
    except InvalidValue:
        raise InvalidValue('bytes per second with their unit, as "250GB", at least 10 KB') from None


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidValue("text of one line")
    return value


def kind_of_device(value: Any) -> str:
    if value not in DEVICES:
        raise InvalidValue(" or ".join(f'"{one}"' for one in DEVICES))
    return str(value)


def by_precision(of: Callable[[Any], float]) -> Callable[[Any], dict[str, float]]:
    """A reader for an object with a value for each of several precisions."""

    def read(value: Any) -> dict[str, float]:
        if not isinstance(value, dict) or (unknown := value.keys() - PRECISIONS.keys()):
            known = f"the precisions {', '.join(PRECISIONS)}"
            raise InvalidValue(
                f'an object by precision, as {{"bf16": 0.7}}; known are {known}'
                if not isinstance(value, dict)
                else f"by {known}, and there is no {sorted(unknown)[0]}{did_you_mean(sorted(unknown)[0], PRECISIONS)}"
            )
        return {name: of(one) for name, one in value.items()}

    return read


KEYS: dict[str, Callable[[Any], Any]] = {
    "name": text,
    "device": kind_of_device,
    "memory": size,
    "flops": number,
    "bandwidth": rate,
    "devices": whole,
    "link": rate,
    "latency": seconds,
    "network": rate,
    "network_latency": seconds,
    "base": size_or_nothing,
    "disk": rate,
    "peak": by_precision(number),
    "efficiency": by_precision(share),
    "attention": share,
    "processors": whole,
    "sending": whole,
}
NEEDED = ("memory", "flops", "bandwidth", "devices", "link", "latency", "network", "network_latency")


def read_cluster(path: Path) -> Description:
    """The description in a file; errors say what a value must be."""
    try:
        told = parse_json(read_regular(path), object_pairs_hook=once, parse_constant=float)
    except FileNotFoundError:
        raise Mistake(f"there is no {path}: describe the cluster in a file such as {EXAMPLE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Mistake(f"{path} does not describe a cluster ({error}): write a file such as {EXAMPLE}") from error
    if not isinstance(told, dict):
        raise Mistake(f"{path} does not describe a cluster: write a file such as {EXAMPLE}")
    if unknown := sorted(told.keys() - KEYS.keys()):
        meant = did_you_mean(unknown[0], KEYS) or "."
        raise Mistake(
            f"{path} describes {', '.join(unknown)}, which is nothing of a cluster{meant} The keys are {', '.join(KEYS)}"
        )
    if missing := [name for name in NEEDED if name not in told]:
        raise Mistake(f"{path} does not say {', '.join(missing)} of the cluster; a whole description is {EXAMPLE}")
    found = {}
    for name, value in told.items():
        try:
            found[name] = KEYS[name](value)
        except InvalidValue as error:
            raise Mistake(f"{path} says {name} {json.dumps(value)[:80]}: it must be {error}") from None
    described = Description(**found)
    if described.sending > described.processors:
        raise Mistake(
            f"{path} says sending {described.sending} of {described.processors} processors: it must be a part of them"
        )
    return described


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a duplicate key is refused, because one of its values would be ignored."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"it says {twice[0]} twice")
    return dict(pairs)
