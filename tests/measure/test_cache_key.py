"""A cache that was not written by this user on this machine is measured again, however believable its numbers are."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from shoestring.core.files.seal import seal
from shoestring.measure import cache
from shoestring.measure.cache import KEY, cache_folder, read_cached, write_cached

VALUE = {"seconds": 4.0}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    file = cache_folder() / "plans" / "a.json"
    write_cached(file, VALUE)
    assert read_cached(file, dict) == VALUE
    return file


def test_a_believable_number_under_a_seal_that_anybody_can_make_is_not_believed(kept: Path) -> None:
    kept.write_bytes(seal({"seconds": 0.004}))
    assert read_cached(kept, dict) is None
    kept.write_text(kept.read_text().replace("0.004", "4.0"))
    assert read_cached(kept, dict) is None


def test_a_file_of_ours_is_not_believed_under_another_name(kept: Path) -> None:
    other = kept.with_name("b.json")
    shutil.copy2(kept, other)
    assert read_cached(other, dict) is None and read_cached(kept, dict) == VALUE


def test_the_cache_of_another_user_or_machine_is_not_believed_even_with_its_key(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tmp_path / "mine", tmp_path / "sent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    there = cache_folder() / "plans" / "a.json"
    write_cached(there, VALUE)
    shutil.copy2(kept, there)
    assert read_cached(there, dict) is None, "another user's key"
    monkeypatch.setattr(cache, "machine_id", lambda: "another one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "sent"))
    assert read_cached(cache_folder() / "plans" / "a.json", dict) is None, "another machine"


@pytest.mark.parametrize("how", ["missing", "short", "empty", "readable", "link", "pipe", "folder"])
def test_a_key_that_is_no_secret_is_made_anew(how: str, kept: Path, tmp_path: Path) -> None:
    place = cache_folder() / KEY
    before = place.read_bytes()
    if how == "readable":
        place.chmod(0o644)
    else:
        place.unlink()
    if how in ("short", "empty"):
        place.write_bytes(b"x" * 31 * (how == "short"))
        place.chmod(0o600)
    if how == "link":
        (tmp_path / "theirs").write_bytes(before)
        place.symlink_to(tmp_path / "theirs")
    if how == "pipe":
        os.mkfifo(place, 0o600)
    if how == "folder":
        place.mkdir(0o700)
    assert read_cached(kept, dict) is None
    write_cached(kept, VALUE)
    if how == "folder":  # the user's: it is not deleted, and nothing can be kept
        assert read_cached(kept, dict) is None and place.is_dir()
        return
    assert read_cached(kept, dict) == VALUE and place.read_bytes() != before
    assert stat.S_IMODE(os.lstat(place).st_mode) == 0o600 and stat.S_ISREG(os.lstat(place).st_mode)
    if how == "link":
        assert (tmp_path / "theirs").read_bytes() == before


def test_the_key_is_in_no_other_file(kept: Path) -> None:
    key = (cache_folder() / KEY).read_bytes()
    assert len(key) == 32 and key not in kept.read_bytes() and key.hex() not in kept.read_text()
    assert json.loads(kept.read_text())["seconds"] == 4.0
