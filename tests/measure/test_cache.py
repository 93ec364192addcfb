"""A cache is a shortcut and nothing else: whatever is in one, under a seal that fits, is used or is as if it were not there."""

from __future__ import annotations

import json
import os
import stat
import zlib
from base64 import b85encode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoestring.core.costs.hardware import Hardware, for_group
from shoestring.core.files.seal import seal
from shoestring.measure import instructions, probe
from shoestring.measure.cache import cache_folder, key_of, new_secret, read_cached, read_secret, value_of, write_cached
from shoestring.measure.tracker import Log, Moment, StorageEvent
from shoestring.planning import answers as kept
from shoestring.training.evidence import duration, earlier
from shoestring.training.evidence.tasks import TrialResult
from tests.mutations import JSON, changed

RATES = [[1e-9, 1e-6, 1024], [2e-9, 1e-6, 0]]
WHOLE: dict[str, dict[str, Any]] = {
    "hardware": {
        "device": probe.device_here(),
        "name": "box",
        "cores": 2,
        "memory": 1 << 33,
        "torch": "2",
        "flops": 1e11,
        "disk": 1e9,
        "direct": 1e9,
        "moving": 1e-10,
        "fault": 1e-10,
        "huge_fault": 1e-10,
        "bandwidth": 5e9,
        "base": 5e8,
        "links": {"2 near": [1e-9, 1e-6, 1e6]},
        "sums": {"2 near": {"ring": RATES, "library": RATES}},
        "when": 1e9,
        "tries": 3,
        "busy": 0.1,
    },
    "dtypes": {"machine": "this", "outcomes": {cap: dict.fromkeys(instructions.TRIALS, "x") for cap in ("", "AVX2")}},
    "seconds": {"seconds": {"a": 3.0, "b": 4}},
    "choice": {"techniques": [{"name": "Checkpoint", "knobs": {"every": 2}}, {"name": "FusedOptimizer", "knobs": {}}]},
    "evidence": {"version": kept.VERSION, "when": 1e9, "speed": 1e11, "files": {__file__: "0" * 64}, "answers": ""},
}
LOG = json.loads(
    json.dumps(
        Log(
            events=[StorageEvent(1, 64), StorageEvent(1, -64)],
            marks=[(0, Moment("forward", "0"))],
            roles={1: "parameters"},
            outputs={"0": [1]},
            workspaces={1},
            flops=Counter({Moment("forward", "0"): 9}),
            moved=[1],
            sent=[2],
            blocks=["0"],
            traits={"complex weights"},
        ).as_json()
    )
)


def use_hardware(place: Path) -> None:
    found = probe.cached_hardware()
    if found is not None:
        probe.doubt(found, 1e11, 0.0, 2e9)
        probe.combine_measurements(found, Hardware(busy=0.9))
        for name in found.sums:
            for_group(found, name, 2, 2)


def use_dtypes(place: Path) -> None:
    for dtype in instructions.TRIALS:
        assert isinstance(instructions.working_dtypes()[0][dtype], str)


def use_seconds(place: Path) -> None:
    found = duration.expected_seconds(Path("a.json"))
    assert found is None or found == float(found)
    duration.remember_seconds(Path("a.json"), 5.0)
    assert duration.expected_seconds(Path("a.json")) == 5.0


def use_choice(place: Path) -> None:
    earlier.chosen_earlier(place)


def use_evidence(place: Path) -> None:
    found = kept.open_answers({"job": 1}, 1e11)
    assert found.answer({"log": 1}, Log, lambda: Log(events=[StorageEvent(1, 2)])) is not None
    found.save()


USES: dict[str, tuple[Callable[[], Path], Callable[[Path], None]]] = {
    "hardware": (probe.hardware_file, use_hardware),
    "dtypes": (instructions.outcomes_file, use_dtypes),
    "seconds": (duration.seconds_file, use_seconds),
    "choice": (lambda: cache_folder() / "plans" / "a.json", use_choice),
    "evidence": (lambda: kept.open_answers({"job": 1}, 1e11).place, use_evidence),
}


def keyed(file: Path, data: dict[str, Any]) -> bytes:
    """A file as ours, with anything in it."""
    return seal(data, key_of(read_secret() or new_secret(), file))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(instructions, "try_dtypes", lambda dtypes, cap: dict.fromkeys(dtypes, ""))
    monkeypatch.setattr(instructions, "machine_key", lambda: "this")
    yield tmp_path


@pytest.mark.parametrize("name", USES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cache_of_any_shape_is_used_or_as_if_absent(name: str, data: st.DataObject) -> None:
    place, use = USES[name]
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    found = changed(data.draw, WHOLE[name])
    file.write_bytes(
        keyed(
            file,
            {key: one for key, one in found.items() if key != "sha256"} if isinstance(found, dict) else {"x": found},
        )
    )
    use(file)


@pytest.mark.parametrize("name", USES)
def test_one_as_it_was_written_is_used(name: str) -> None:
    place, use = USES[name]
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(keyed(file, WHOLE[name]))
    use(file)
    if name == "hardware":
        assert probe.cached_hardware() is not None
    if name == "choice":
        assert earlier.chosen_earlier(file) is not None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), answer=JSON, odd=st.booleans())
def test_an_answer_of_any_shape_is_used_or_found_out_again(data: st.DataObject, answer: Any, odd: bool) -> None:
    question = {"log": 1}
    answers: Any = answer if odd else {kept.digest(question): changed(data.draw, LOG)}
    packed = b85encode(zlib.compress(json.dumps(answers).encode())).decode()
    place = kept.open_answers({"job": 2}, 1e11).place
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(keyed(place, WHOLE["evidence"] | {"files": {}, "answers": packed}))
    found = kept.open_answers({"job": 2}, 1e11).answer(question, Log, lambda: Log(events=[StorageEvent(1, 2)]))
    assert Log.from_json(found.as_json()) == found and all(type(size) is int for _, size in found.events)
    trial = kept.open_answers({"job": 2}, 1e11).answer(question, TrialResult, lambda: TrialResult(1, 1.0, 4))
    assert trial.process_bytes + trial.step_seconds > -1e300


def test_files_that_a_cache_names_are_not_opened_unless_they_are_files(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    assert kept.digests(["/dev/zero", str(tmp_path / "pipe"), "a\0b", str(tmp_path)]) == {}


@pytest.mark.parametrize(
    ("told", "where"),
    [("{}/own", "{}/own/shoestring"), ("", "{}/.cache/shoestring"), ("relative/place", "{}/.cache/shoestring")],
)
def test_caches_are_where_the_user_has_caches(
    told: str, where: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", told.format(home))
    assert str(cache_folder()) == where.format(home)
    duration.remember_seconds(Path("a.json"), 5.0)
    assert duration.seconds_file().is_file() and duration.seconds_file().is_relative_to(where.format(home))


@pytest.mark.parametrize("where", ["/proc/none", "/dev/null"])
def test_a_cache_that_can_not_be_written_troubles_nobody(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    duration.remember_seconds(Path("a.json"), 5.0)
    assert duration.expected_seconds(Path("a.json")) is None


def test_a_user_without_a_home_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    duration.remember_seconds(Path("a.json"), 5.0)
    assert not list(tmp_path.iterdir())


@given(JSON)
def test_a_value_is_of_its_kind_or_none(data: Any) -> None:
    for kind in (Hardware, kept.KeptFile, instructions.Outcomes, earlier.KeptChoice):
        assert isinstance(value_of(kind, data), (kind, type(None)))


@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
@pytest.mark.parametrize("what", ["file", "folder", "caches"])
def test_a_cache_that_others_could_have_written_is_not_believed(
    what: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache_folder() / "plans" / "a.json"
    write_cached(file, {"a": 1})
    assert read_cached(file, dict) == {"a": 1}
    place = {"file": file, "folder": file.parent, "caches": cache_folder()}[what]
    if whose == "everybody's":
        place.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(place, 4711, 4711)
    else:
        monkeypatch.setattr("os.getuid", lambda uid=os.getuid(): uid + 1)
    assert read_cached(file, dict) is None
    write_cached(file, {"a": 2})
    assert read_cached(file, dict) == (
        {"a": 2} if whose == "everybody's" or (what == "file" and os.getuid() == 0) else None
    )


def test_what_is_kept_can_be_read_and_written_by_its_user_only() -> None:
    before = os.umask(0o002)  # as some systems set it
    try:
        file = cache_folder() / "plans" / "a.json"
        write_cached(file, {"a": 1})
    finally:
        os.umask(before)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (file, file.parent, cache_folder())] == [0o600, 0o700, 0o700]
    assert read_cached(file, dict) == {"a": 1}
