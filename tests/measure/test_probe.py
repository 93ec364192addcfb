"""The disk is measured wherever a command is given: nothing is left behind, nothing raises, and it is measured once."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shoestring.measure import probe
from shoestring.measure.probe import direct_speed, hardware_file, known_hardware

SIZE = 1 << 20


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of our own."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that files were written in, as they are written."""
    places: list[str] = []
    true_write = os.pwrite

    def write(file: int, block: Any, start: int) -> int:
        places.append(os.path.dirname(os.readlink(f"/proc/self/fd/{file}")))
        return true_write(file, block, start)

    monkeypatch.setattr(os, "pwrite", write)
    return places


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs did for long."""
    true_open = os.open

    def opened(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return true_open(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", opened)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a clock is a second after the last, so that speeds are known: what is timed takes one second, and no core works."""
    seconds = itertools.count()
    monkeypatch.setattr(probe.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(probe.time, "process_time", lambda: 0.0)


def takes_direct_io(directory: Path) -> bool:
    """Whether the file system opens files past the page cache: what the speed must tell of."""
    try:
        os.close(os.open(directory / "tried", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        (directory / "tried").unlink(missing_ok=True)
    return True


def test_a_directory_is_measured_and_left_as_it_was(
    tmp_path: Path, temporary: Path, written: list[str], clock: None
) -> None:
    direct = takes_direct_io(tmp_path)
    speed, spent = direct_speed(str(tmp_path), SIZE)
    assert speed == (2 * SIZE if direct else 0.0)  # written and read back in the second that the clock gives it
    assert spent == 1 / SIZE  # a second for the checksum of what was moved
    assert set(written) == {str(tmp_path)}
    assert list(tmp_path.iterdir()) == [temporary] and not list(temporary.iterdir())


def test_without_direct_io_the_speed_is_none_and_the_price_of_moving_is_still_known(
    tmp_path: Path, temporary: Path, written: list[str], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    speed, spent = direct_speed(str(tmp_path), SIZE)
    assert speed == 0.0 and spent == 1 / SIZE and set(written) == {str(tmp_path)}
    assert list(tmp_path.iterdir()) == [temporary]


@pytest.mark.parametrize("place", ["/proc", "gone", "read-only"])  # in /proc not even root can write
def test_where_nothing_can_be_written_the_temporary_directory_is_measured(
    place: str, tmp_path: Path, temporary: Path, written: list[str], clock: None
) -> None:
    there = Path("/proc") if place == "/proc" else tmp_path / place
    if place == "read-only":
        there.mkdir(mode=0o500)
        if os.access(there, os.W_OK):
            pytest.skip("root may write anywhere")
    direct = takes_direct_io(temporary)
    speed, spent = direct_speed(str(there), SIZE)
    assert speed == (2 * SIZE if direct else 0.0) and spent == 1 / SIZE and set(written) == {str(temporary)}


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_is_not_measured_but_the_temporary_directory(
    short: bool, tmp_path: Path, temporary: Path, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = takes_direct_io(temporary)
    true_write = os.pwrite
    full = []

    def write(file: int, block: Any, start: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(temporary)):
            return true_write(file, block, start)
        full.append(file)
        if short:
            return len(block) // 2
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    speed, spent = direct_speed(str(tmp_path), SIZE)
    assert full and speed == (2 * SIZE if direct else 0.0) and spent == 1 / SIZE
    assert list(tmp_path.iterdir()) == [temporary] and not list(temporary.iterdir())


def test_where_every_disk_is_full_the_price_of_checking_is_known_all_the_same(
    tmp_path: Path, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    speed, spent = direct_speed(str(tmp_path), SIZE)
    assert speed == 0.0 and spent == 1 / SIZE and not list(tmp_path.iterdir())


def test_a_probe_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom shoestring.measure import probe\ntrue_write = os.pwrite\n"
        "def write(*given):\n    true_write(*given)\n    print('writing', flush=True)\n    signal.pause()\n"
        "os.pwrite = write\nprobe.direct_speed('.')"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not list(tmp_path.iterdir())


def test_a_machine_without_direct_io_is_measured_once(
    tmp_path: Path, temporary: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = known_hardware()
    assert (
        found.direct == 0.0 and found.moving > 0 and found.disk > 0 and found.flops > 0 and found.fault > 0 and written
    )
    assert found.tries >= probe.ROUNDS and 0 <= found.busy <= 1 and found.when > 0
    written.clear()
    assert known_hardware() == found and not written
    assert hardware_file().is_relative_to(tmp_path)
