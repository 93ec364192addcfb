"""Checkpoints: whole or not at all, checked to the bit, and read without running code."""

from __future__ import annotations

import errno
import json
import pickle
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from safetensors.torch import load_file
from torch import nn

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.data.feed import Feed
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import (
    FILES,
    RunCheckpoint,
    damage,
    draft,
    list_checkpoints,
    newest_good,
    prune,
    publish,
)
from shoestring.runs.checkpoints.packing import pack, unpack
from shoestring.runs.checkpoints.saver import Saver, Snapshot
from shoestring.runs.events.event import Event, Saved, Warned
from shoestring.runs.weights.tensors import TensorFile, UnreadableTensors, write_tensors
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.execution.recorder import Recorder, RecordingSettings
from shoestring.training.execution.snapshot import restore, snapshot_of
from shoestring.training.loop import steps


def made(folder: Path, *numbers: int) -> list[RunCheckpoint]:
    return [
        publish(
            draft(folder, number, {"w": torch.full((40,), float(number))}, {"step": number, "x": torch.arange(3)}, {})
        )[0]
        for number in numbers
    ]


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.empty(0, 4), "number": torch.tensor(3.5)}
    write_tensors(tmp_path / "a.safetensors", tensors | {"turned": torch.randn(4, 6).t()}, {"format": "pt"})
    theirs, ours = load_file(tmp_path / "a.safetensors"), TensorFile(tmp_path / "a.safetensors")
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs) and set(theirs) == set(ours)
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())


plain = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False)
    | strategies.text()
)
nested = strategies.recursive(
    plain,
    lambda inner: (
        strategies.lists(inner)
        | strategies.tuples(inner, inner)
        | strategies.dictionaries(strategies.integers() | strategies.text(), inner)
    ),
    max_leaves=20,
)


@hypothesis.given(nested)
def test_what_is_packed_comes_out_the_same(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert unpack(json.loads(json.dumps(pack(value, tensors, "x"))), tensors) == value


def test_tensors_keep_their_strides_and_arrays_stay_arrays() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {
        "a": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "b": np.arange(4, dtype=np.uint32),
        "c": np.float64(0.1),
    }
    back = unpack(json.loads(json.dumps(pack(value, tensors, "x"))), tensors)
    assert back["a"].stride() == value["a"].stride() and torch.equal(back["a"], value["a"])
    assert back["b"].dtype == np.uint32 and (back["b"] == value["b"]).all() and back["c"] == 0.1


def test_what_only_code_could_bring_back_is_refused() -> None:
    with pytest.raises(Mistake, match="holds a Linear"):
        pack({"model": nn.Linear(1, 1)}, {}, "state")


# Damage


def every_file(checkpoint: RunCheckpoint) -> Iterator[Path]:
    return (checkpoint.path / name for name in (*FILES, "manifest.json"))


def test_one_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    (checkpoint,) = made(tmp_path, 1)
    for path in every_file(checkpoint):
        whole = path.read_bytes()
        bits = (
            range(8 * len(whole)) if len(whole) < 400 else sorted(random.Random(0).sample(range(8 * len(whole)), 400))
        )
        for bit in bits:
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert damage(checkpoint), f"bit {bit} of {path.name}"
        path.write_bytes(whole)
    assert damage(checkpoint) == ""


@pytest.mark.parametrize("harm", ["truncate", "empty", "delete", "longer"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_and_nothing_is_overwritten(harm: str, name: str, tmp_path: Path) -> None:
    first, second = made(tmp_path, 1, 2)
    path = second.path / name
    whole = path.read_bytes()
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes({"truncate": whole[:-1], "empty": b"", "longer": whole + b" "}[harm])
    good, bad = newest_good(tmp_path)
    assert good == first and [one for one, _ in bad] == [second] and bad[0][1]
    publish(draft(tmp_path, 2, {"w": torch.ones(1)}, {"step": 2}, {}))
    assert newest_good(tmp_path)[0] == second
    aside = tmp_path / "step-00000002.damaged-0"
    assert aside.is_dir() and (harm == "delete" or (aside / name).read_bytes() != whole)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code was run",))


def test_a_pickle_in_place_of_weights_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = made(tmp_path, 1)
    crafted = pickle.dumps(Malicious())
    for name in FILES:
        whole = (checkpoint.path / name).read_bytes()
        for evil in (crafted, (8).to_bytes(8, "little") + crafted):
            (checkpoint.path / name).write_bytes(evil)
            assert damage(checkpoint)
            with pytest.raises(UnreadableTensors):  # also where somebody made the manifest fit
                checkpoint.weights() if name.startswith("weights") else checkpoint.state()
        (checkpoint.path / name).write_bytes(whole)
    torch.save({"w": Malicious()}, tmp_path / "evil.pt")
    (checkpoint.path / "weights.safetensors").write_bytes((tmp_path / "evil.pt").read_bytes())
    with pytest.raises(UnreadableTensors):
        checkpoint.weights()
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"w": {"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 8]}},
        {"w": {"dtype": "code", "shape": [], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
        {"w": 3},
        [1],
    ],
)
def test_a_header_that_lies_is_refused(header: Any, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(UnreadableTensors):
        TensorFile(tmp_path / "x")


# Keeping


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, 2, best=2)
    assert [one.step for one in list_checkpoints(tmp_path)] == [2, 4, 5]


def test_a_full_disk_costs_a_warning_and_saving_recovers(tmp_path: Path) -> None:
    told: list[Event] = []
    saver = Saver(tmp_path, Cadence(steps=1), told.append)

    def save(number: int) -> None:
        saver.save(lambda: Snapshot(number, {"w": torch.full((50_000,), float(number))}, {}, {"step": number}))
        saver.wait()

    save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        save(2)
        save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(map(type, told)) == [Saved, Warned, Warned] and "training goes on" in str(told[1])
    assert newest_good(tmp_path)[0] == list_checkpoints(tmp_path)[0] and not list(tmp_path.glob("*.tmp-*"))
    save(4)
    assert isinstance(told[-1], Saved) and [one.step for one in list_checkpoints(tmp_path)] == [1, 4]


def test_state_that_cannot_be_saved_costs_a_warning_and_not_the_run(tmp_path: Path) -> None:
    told: list[str] = []
    saver = Saver(tmp_path, Cadence(steps=1), lambda event: told.append(str(event)))
    saver.save(lambda: Snapshot(1, {"w": torch.ones(1)}, {}, {"data": object()}))
    saver.save(lambda: Snapshot(1, {"w": torch.ones(1, dtype=torch.complex128)}, {}, {}))
    assert "holds a object" in told[0] and "complex128" in told[1] and not list(tmp_path.iterdir())


def test_a_full_disk_gives_up_the_oldest_checkpoint_for_the_next(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Cadence(steps=1, keep=3), lambda event: None)
    made(tmp_path, 1, 2, 3)
    saver.note_failure(OSError(errno.ENOSPC, "No space left on device"))
    assert [one.step for one in list_checkpoints(tmp_path)] == [2, 3]
    for _ in range(5):
        saver.note_failure(OSError(errno.ENOSPC, "No space left on device"))
    assert [one.step for one in list_checkpoints(tmp_path)] == [3], "the newest is what it can go on from"


def test_saving_by_time_takes_no_more_than_its_share(tmp_path: Path) -> None:
    now = 100.0
    saver = Saver(tmp_path, Cadence(seconds=10.0), lambda event: None, lambda: now)
    saver.pause = 1.0
    now = 130.0
    assert not saver.due(5)  # one second in thirty is more than 3 %
    now = 134.0
    assert saver.due(5)


class Tied(nn.Module):
    """Tied weights, batch norm, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.out.weight = self.into.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(self.norm(self.into(x)))


def tied_job(optimizer: Any) -> Job:
    return Job(
        model=Tied, data=lambda: ((torch.randn(4, 8), torch.randint(8, (4,))) for _ in range(20)), optimizer=optimizer
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        torch.optim.Adafactor,
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
    ],
)
def test_a_run_put_back_goes_on_with_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    job = tied_job(optimizer)

    def begun() -> tuple[Run, Any]:
        random_state.seed(0)
        return build_run(job, (), job.model()), Feed(job)

    def some(run: Run, feed: Any, count: int) -> None:
        for _, _ in zip(range(count), steps(run, feed), strict=False):
            pass

    run, feed = begun()
    training = steps(run, feed)
    for _ in range(5):
        next(training)
    shot = snapshot_of(run, feed, 5, None)
    checkpoint, _ = publish(draft(tmp_path, 5, shot.weights, shot.state, shot.aliases))
    assert set(shot.aliases) == {"out.weight"}
    for _ in range(5):
        next(training)
    random_state.seed(123)
    other, other_feed = begun()
    restore(checkpoint, other, other_feed)
    again = steps(other, other_feed)
    for _ in range(5):
        next(again)
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    )
    assert other.model.seen == run.model.seen == 10 and other.model.out.weight is other.model.into.weight


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    job = tied_job(lambda p: torch.optim.SGD(p, lr=0.1))
    run = build_run(job, (), job.model())
    shot = snapshot_of(run, Feed(job), 0, None)
    checkpoint, _ = publish(draft(tmp_path, 1, shot.weights, shot.state, shot.aliases))
    other = Job(model=lambda: nn.Linear(8, 8), data=job.data)
    with pytest.raises(Mistake, match="not the one it was made of"):
        restore(checkpoint, build_run(other, (), other.model()), Feed(other))


def test_a_damaged_newest_checkpoint_is_told_of_and_kept_aside(tmp_path: Path) -> None:
    job = tied_job(lambda p: torch.optim.SGD(p, lr=0.1))
    told: list[Event] = []
    for number in (1, 2):
        run, feed = build_run(job, (), job.model()), Feed(job)
        shot = snapshot_of(run, feed, number, None)
        publish(draft(tmp_path / "checkpoints", number, shot.weights, shot.state, shot.aliases))
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_bytes(b"")
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        recorder = Recorder(RecordingSettings(str(tmp_path)), 9, told.append)
        assert recorder.look() and recorder.resume(run, feed) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert isinstance(told[0], Warned) and "step 2 is damaged (state.json has 0 bytes" in told[0].text
    assert (tmp_path / "checkpoints" / "step-00000002.damaged-0").exists()
