"""A file of a checkpoint that can't be read is named itself."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.runs.checkpoints import checkpoints
from shoestring.runs.checkpoints.checkpoints import FILES, damage, draft, publish
from shoestring.runs.events.event import Warned
from shoestring.runs.events.event_log import NAME, note
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder

HOLE = 1 << 40  # bytes of a file that takes no place on the disk, and more than any memory


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


def test_a_file_that_is_nothing_but_a_hole_is_refused_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    os.truncate(tmp_path / "plan.json", HOLE)
    with pytest.raises(Mistake, match=f"plan.json is damaged .*its {HOLE:,} bytes are more than any file of ours"):
        Folder(tmp_path).read("plan.json")


def test_events_are_read_up_to_a_hole(tmp_path: Path) -> None:
    note(tmp_path, Warned("before"))
    os.truncate(tmp_path / NAME, HOLE)
    found = History().read(tmp_path)
    assert [one.text for one in found.others if isinstance(one, Warned)] == ["before"]
    assert found.wrong == "events.jsonl has a line longer than any of ours"
