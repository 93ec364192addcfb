"""What ONNX needs beside torch; told before anything heavy is done."""
from __future__ import annotations

from importlib.util import find_spec

from shoestring.core.errors import Mistake

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise Mistake(f"ONNX is written and checked with packages that are not here ({', '.join(missing)}): pip install 'shoestring[onnx]'")
