"""The manifest of a compressed model: in which format each weight is stored.

The text of the manifest and the header of the tensors' file follow from the plan alone, so the size of the folder is
known to the byte before anything is written.

    {"sha256": seal, "format": ..., "version": 1, "job": {...}, "edits": [...], "decoded": 0 or 1,
     "weights": {name: {"kind": "grid", "shape": [...], "dtype": "float32", "settings": {...}, "also": [other names]}},
     "buffers": [...], "tensors": SHA-256 of model.safetensors}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.compression.formats.format import FormatTensor
from shoestring.compression.formats.kinds import KINDS
from shoestring.core.files.seal import seal
from shoestring.runs.weights.tensors import NAMES, header_of

FORMAT, VERSION = "shoestring compressed model", 1
TENSORS, MANIFEST = "model.safetensors", "manifest.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
DIGITS = 2 * len(str(1 << 62))  # of two file offsets, at most


@dataclass(frozen=True)
class Stored:
    """How one weight is stored: its format, shape, dtype and settings."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    settings: Mapping[str, Any]

    def parts(self) -> dict[str, FormatTensor]:
        """Its tensors, by their names in the file."""
        return {
            f"{self.names[0]}:{name}": part
            for name, part in KINDS[self.kind].layout(self.shape, self.dtype, self.settings).items()
        }

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "settings": dict(self.settings),
        }
        return told | ({"also": list(self.names[1:])} if self.names[1:] else {})


def read_entry(name: str, entry: Mapping[str, Any]) -> Stored:
    """Parse the manifest's entry of one weight. Raises ValueError, KeyError or TypeError if it is invalid."""
    kind, shape, settings, also = entry["kind"], entry["shape"], entry["settings"], entry.get("also", [])
    if not isinstance(shape, list) or not all(type(one) is int and 0 <= one < 1 << 48 for one in shape):
        raise ValueError(f"a shape of {str(shape)[:80]}")
    if not isinstance(also, list) or not all(isinstance(one, str) for one in also):
        raise ValueError(f"other names {str(also)[:80]}")
    if kind not in KINDS or not isinstance(settings, dict):
        raise ValueError(f"the format {str(kind)[:40]} with {str(settings)[:80]}")
    check_settings(settings)
    return Stored((name, *also), kind, tuple(shape), DTYPES[entry["dtype"]], settings)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings other than booleans, strings, bounded integers and the nested settings of an inner format."""
    if "seed" in settings and not (
        type(settings["seed"]) is int and settings["seed"] >= 0 and type(settings.get("checksum")) is int
    ):
        raise ValueError(f"a mask of the seed {str(settings['seed'])[:40]} without its checksum")
    for name, value in settings.items():
        if name == "inner_settings" and isinstance(value, dict):
            check_settings(value)
        elif not isinstance(value, (bool, str)) and (type(value) is not int or not -1 << 62 < value < 1 << 62):
            raise ValueError(f"{name} is {str(value)[:60]}")


def manifest(
    about: Mapping[str, Any], weights: Mapping[str, Stored], buffers: Mapping[str, Any], digest: str = "0" * 64
) -> bytes:
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            **about,
            "weights": {name: one.as_json() for name, one in weights.items()},
            "buffers": list(buffers),
            "tensors": digest,
        }
    )


def tensor_layout(weights: Mapping[str, Stored], buffers: Mapping[str, Tensor]) -> dict[str, FormatTensor]:
    """Shapes and dtypes of all tensors in the file, in its order."""
    found = {name: part for one in weights.values() for name, part in one.parts().items()}
    return found | {f"{name}:buffer": FormatTensor(tuple(value.shape), value.dtype) for name, value in buffers.items()}


def folder_bytes(about: Mapping[str, Any], weights: Mapping[str, Stored], buffers: Mapping[str, Tensor]) -> int:
    """Bytes of a compressed model's files: tensors and manifest."""
    parts = tensor_layout(weights, buffers)
    header = header_of({name: (part.dtype, part.shape) for name, part in parts.items()})
    return len(header) + sum(part.bytes for part in parts.values()) + len(manifest(about, weights, buffers))


def fixed_bytes(about: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> int:
    """Bytes of a compressed model's files that do not depend on how weights are stored."""
    return folder_bytes(about, {}, buffers) + 16  # padding of the header to 8 bytes, and commas between entries


def numbers_bytes(one: Stored) -> int:
    """Bytes of one weight's tensors."""
    return sum(part.bytes for part in one.parts().values())


def stored_bytes(one: Stored) -> int:
    """Upper bound for the bytes that one weight adds to both files: its tensors and its entries."""
    said = json.dumps({one.names[0]: one.as_json()}, indent=2)
    lines = said.count("\n") + 1
    entries = sum(
        len(json.dumps(name))
        + len(
            json.dumps(
                {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [0, 0]}, separators=(",", ":")
            )
        )
        + DIGITS
        + 2
        for name, part in one.parts().items()
    )
    return numbers_bytes(one) + entries + len(said) + 2 * lines + 2
