"""What the machine has and can do: measured once, kept in a file."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    device: str = "cpu"
    name: str = ""                  # of the processor or GPU
    cores: int = 1
    memory: int = 0                 # bytes of the device
    torch: str = ""                 # build
    flops: float = 5e10             # operations per second of a float32 matrix product, all cores
    disk: float = 5e8               # bytes per second, write then read back
    direct: float = 0.0             # the same without the page cache; 0: there is no direct I/O
    moving: float = 0.0             # seconds of a core per byte of that, with its checksum; 0: not measured yet
    fault: float = 6e-11            # seconds per byte of fresh memory in ordinary pages
    huge_fault: float = 2e-11       # the same in huge pages
    dtypes: Mapping[str, str] = field(default_factory=dict)       # name -> "" if it works, else what happened
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that workers need for kernels to work

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Hardware | None:
        """What was measured before; None if nothing was, or by another version."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
