"""shoestring compress, as a user gives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring
from shoestring.commands.main import run
from shoestring.compression.distillation import heal

JOB = """
import torch
from torch import nn
from sklearn.datasets import load_digits
from shoestring import Job

def data(begin, end):
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))[begin:end]
    return torch.utils.data.TensorDataset(torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order])

def job(width: int = 64, steps: int = 150) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
               data=lambda: data(0, 1200), held_out=lambda: data(1200, 1797), batch=32, steps=steps,
               optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
               metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()})
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_workers: None) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(JOB)
    for _ in shoestring.train(str(folder / "net.py"), (), run=folder / "run"):
        pass
    return folder


def run_of(trained: Path) -> list[str]:
    return [str(trained / "run"), "--job", str(trained / "net.py")]


def answer(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*words, "--json"]) == code, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def test_a_run_is_compressed_to_a_size_and_the_report_has_both(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answer(
        capsys, ["compress", *run_of(trained), "--size", "12KB", "--keep", "0.99", "--out", str(tmp_path / "small")]
    )
    size = told["size_bytes"]
    assert (
        size["predicted"]
        == size["measured"]
        == sum((tmp_path / "small" / name).stat().st_size for name in told["files"])
    )
    assert 0.9 * 12_000 <= size["measured"] <= 12_000
    assert set(told["latency_ms"]) == {"p50", "p99"} and set(told["latency_ms"]["p50"]) == {"predicted", "measured"}
    assert (
        told["fidelity"]["mean"]["measured"] >= 0.99
        and told["fidelity"]["worst"]["measured"] <= told["fidelity"]["mean"]["measured"]
    )
    accuracy = told["metric"]["accuracy"]
    assert (
        accuracy["n"] > 300
        and accuracy["standard_error"] > 0
        and abs(accuracy["measured"] - accuracy["predicted"]) < 0.03
    )
    assert {"name", "technique", "bits", "bytes", "damage"} <= set(told["layers"][0])
    sizes = [point["size_bytes"] for point in told["frontier"]]
    assert len(sizes) > 5 and sizes == sorted(sizes)
    page = (tmp_path / "small" / "report.html").read_text()
    assert "<svg" in page and json.loads((tmp_path / "small" / "report.json").read_text())["size_bytes"] == size
    model = shoestring.load(tmp_path / "small", job=trained / "net.py")
    assert model(torch.zeros(2, 64)).shape == (2, 10)


def test_a_budget_that_can_not_be_met_ends_with_3_and_tells_the_nearest_and_the_frontier(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answer(capsys, ["compress", *run_of(trained), "--size", "3KB", "--out", str(tmp_path / "small")], code=3)
    assert (
        "nothing fits" in told["error"]
        and told["nearest"]["size_bytes"] > 3000
        and len(told["nearest"]["details"]["frontier"]) > 3
    )
    assert not (tmp_path / "small").exists()
    told = answer(
        capsys, ["compress", *run_of(trained), "--metric", "accuracy>=0.9999", "--out", str(tmp_path / "small")], code=3
    )
    assert "accuracy" in told["error"] and not (tmp_path / "small").exists()


def test_the_smallest_that_is_good_enough(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = answer(capsys, ["compress", *run_of(trained), "--keep", "0.999", "--out", str(tmp_path / "a")])
    less = answer(capsys, ["compress", *run_of(trained), "--keep", "0.98", "--out", str(tmp_path / "b")])
    assert (
        less["size_bytes"]["measured"] < kept["size_bytes"]["measured"]
        and kept["fidelity"]["mean"]["measured"] > 0.9985
    )
    good = answer(capsys, ["compress", *run_of(trained), "--metric", "accuracy>=0.85", "--out", str(tmp_path / "c")])
    assert (
        good["metric"]["accuracy"]["measured"] >= 0.82
        and good["size_bytes"]["measured"] <= kept["size_bytes"]["measured"]
    )


def test_a_latency_is_kept_by_decoding_once(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(
        capsys, ["compress", *run_of(trained), "--size", "12KB", "--latency", "10s", "--out", str(tmp_path / "a")]
    )
    assert "Decode" not in [one["name"] for one in told["techniques"]], "ten seconds are enough to decode in every call"
    told = answer(
        capsys,
        ["compress", *run_of(trained), "--use", "Quantize(bits=4)", "--use", "Decode()", "--out", str(tmp_path / "b")],
    )
    assert told["memory_bytes"]["measured"] > 2 * told["size_bytes"]["measured"]
    assert (
        run(
            [
                "compress",
                *run_of(trained),
                "--use",
                "Sparsify(share=0.5)",
                "--latency",
                "10s",
                "--out",
                str(tmp_path / "c"),
            ]
        )
        == 2
    )
    assert "make nothing faster below 90%" in capsys.readouterr().err


STEPS = 200  # that a healing takes here, however fast the machine is
KILLED = f"""# warm
import os, signal, sys
from functools import partialmethod
from itertools import count
from shoestring.commands.main import run
from shoestring.compression.distillation import heal
from shoestring.runs.checkpoints.saver import Saver

finish, looks, saves = Saver.finish, count(), count(1)

def finish_and_die(self, *given):
    finish(self, *given)
    if next(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

heal.steps_in = lambda job, seconds, clock: {STEPS}
Saver.__init__ = partialmethod(Saver.__init__, clock=lambda: 0.01 * next(looks))   # it is due after some looks at the clock
Saver.finish = finish_and_die
run(sys.argv[1:])
"""


def test_healing_mends_what_two_bits_broke_and_goes_on_after_a_kill(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(name: str) -> list[str]:
        return [
            "compress",
            *run_of(trained),
            "--use",
            "Quantize(bits=2)",
            "--heal",
            "2s",
            "--out",
            str(tmp_path / name),
        ]

    process = subprocess.run(
        [sys.executable, "-c", KILLED, *words("small")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    monkeypatch.setattr(heal, "steps_in", lambda job, seconds, clock: STEPS)
    run_folder = tmp_path / "small-healing" / "run"
    assert not (tmp_path / "small" / "model.safetensors").exists()
    told = answer(capsys, words("small"))
    begun = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines() if '"begun"' in line]
    assert len(begun) == 2 and 0 < begun[1]["step"] < begun[1]["steps"], "it went on where it was"
    healed = told["healed"]
    assert healed["after"] > healed["before"] and 1 - healed["after"] < 0.5 * (1 - healed["before"])
    assert (
        told["size_bytes"]["predicted"] == told["size_bytes"]["measured"]
        and told["fidelity"]["mean"]["predicted"] is None
    )
    shutil.copytree(tmp_path / "small-healing", tmp_path / "other-healing", ignore=shutil.ignore_patterns("run"))
    answer(capsys, words("other"))
    small, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "other"))
    assert small == other, "a healing that was never killed ends with the same bits"
    shutil.rmtree(tmp_path / "small")
    assert run([*words("small"), "--use", "Half()"]) == 2 and "healing of another plan" in capsys.readouterr().err


def test_help_with_a_job_shows_its_own_flags(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["compress", str(trained / "net.py"), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--width" in said and "--keep" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "12"], "12"),
        (["--size", "big"], "is not a size"),
        (["--keep", "1.2"], "from 0 to 1"),
        (["--latency", "5"], "is not a time"),
        ([], "no limit was given"),
        (["--metric", "accuracy"], "--metric accuracy"),
        (["--metric", "f1>=0.5"], "the job measures"),
        (["--use", "Quantise()"], "Quantize"),
        (["--use", "Quantize(bit=4)"], "bit"),
        (["--use", "Quantize(bits=9)"], "give 2 to 8"),
        (["--use", "Half()", "--use", "Half()"], "twice"),
        (["--use", "Prune(heads=0.5)"], "heads"),
        (["--size", "9KB", "--width", "8"], "give the job and the flags"),
        (["--size", "9KB", "--wide", "8"], "--width"),
        (["--size", "9KB", "--samples", "0"], "--samples"),
        (["--size", "9KB", "--heal", "soon"], "is not a time"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    trained: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["compress", *run_of(trained), *words, "--out", str(tmp_path / "small")])
    error = capsys.readouterr().err
    assert code in (2, 3) and said in error and "Traceback" not in error
    assert not (tmp_path / "small").exists()


def test_what_is_neither_a_run_nor_a_job_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compress", str(tmp_path), "--size", "1MB"]) == 2
    assert "not a run" in capsys.readouterr().err
    assert run(["compress", "digitz", "--size", "1MB"]) == 2
    assert "digits" in capsys.readouterr().err
