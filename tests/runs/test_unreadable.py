"""A file of a checkpoint that can't be read is named itself."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.runs import checkpoints
from shoestring.runs.checkpoints import FILES, damage, draft, publish


@pytest.mark.parametrize("unreadable", [*FILES, "manifest.json"])
def test_the_file_that_can_not_be_read_is_the_one_that_is_blamed(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = publish(draft(tmp_path, 3, {"weight": torch.ones(4)}, {"step": 3}, {}))
    assert damage(checkpoint) == ""
    broken = OSError(errno.EIO, os.strerror(errno.EIO))  # as a disk tells it: without the name of the file
    true_digest, true_read = hashlib.file_digest, checkpoints.read_regular

    def digest(file: Any, kind: str) -> Any:
        if Path(file.name).name == unreadable:
            raise broken
        return true_digest(file, kind)

    def read(path: Path) -> bytes:
        if path.name == unreadable:
            raise broken
        return true_read(path)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    monkeypatch.setattr(checkpoints, "read_regular", read)
    assert damage(checkpoint) == f"{unreadable} can't be read (Input/output error)"
