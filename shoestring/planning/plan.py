"""A plan: an ordered tuple of techniques and what they lead to. Saves as JSON and replays."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.technique import Technique, built, described, in_order, text
from shoestring.planning.catalogue import CATALOGUE


@dataclass(frozen=True)
class Plan:
    techniques: tuple[Technique, ...] = ()
    peak_bytes: int = 0            # of tensors, the highest of the first two steps
    process_bytes: int = 0         # of the whole process
    step_seconds: float = 0.0
    exact: bool = True
    flops: float = 0.0             # operations of a step
    traffic: float = 0.0           # bytes to and from disk per step
    sent: float = 0.0              # bytes that a worker sends to others per step
    world: int = 1                 # workers that train together; the figures are those of the largest
    where: str = ""                # the moment of the peak
    parts: tuple[tuple[str, int], ...] = ()   # what the peak is made of
    sure: str = ""                 # how these figures were found
    stored: int = 0                # bytes of state that stay on the disk
    disk_speed: float = 0.0        # bytes per second, measured, at which the traffic passes; 0: there is none
    blocks: tuple[tuple[str, int], ...] = field(default=(), compare=False)   # highest bytes while each block runs

    def __str__(self) -> str:
        return " + ".join(map(text, self.techniques)) or "plain"

    def as_json(self) -> dict[str, Any]:
        return {
            "techniques": [described(technique) for technique in self.techniques], "peak_bytes": self.peak_bytes,
            "process_bytes": self.process_bytes, "step_seconds": self.step_seconds, "exact": self.exact, "flops": self.flops,
            "traffic_bytes": self.traffic, "disk_bytes_per_second": self.disk_speed, "stored_bytes": self.stored, "sent_bytes": self.sent,
            "world": self.world,
            "where": self.where, "parts": dict(self.parts), "sure": self.sure,
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"shoestring": 1, "chosen": self.as_json()}, indent=1))


def techniques_in(data: Any) -> tuple[Technique, ...]:
    """Techniques from their JSON."""
    return in_order(built(one["name"], one["knobs"], CATALOGUE) for one in data)


def load_plan(path: Path) -> Plan:
    try:
        data = json.loads(path.read_text())
        chosen = data.get("chosen", data)
        return Plan(
            techniques_in(chosen["techniques"]), chosen["peak_bytes"], chosen["process_bytes"], chosen["step_seconds"],
            chosen["exact"], flops=chosen.get("flops", 0.0), traffic=chosen.get("traffic_bytes", 0.0), where=chosen.get("where", ""),
            parts=tuple(chosen.get("parts", {}).items()), sure=chosen.get("sure", ""), sent=chosen.get("sent_bytes", 0.0),
            disk_speed=chosen.get("disk_bytes_per_second", 0.0), world=chosen.get("world", 1), stored=chosen.get("stored_bytes", 0),
        )
    except Mistake:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Mistake(f"{path} is not a plan that can be read ({type(error).__name__}: {error}); "
                      f"save one with: shoestring plan JOB --memory 2GiB --save {path}") from error
