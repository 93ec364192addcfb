"""A processor that advertises instructions it can't run kills nobody: oneDNN is capped, or the computation is refused. The processor's part
is played by a probe that says what would have happened, so that a machine without the fault tests it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.measure import instructions, probe
from shoestring.measure.instructions import (
    CAPS,
    VARIABLE,
    cap,
    cap_this_process,
    deadly,
    try_dtypes,
    try_in_fork,
    working_dtypes,
)
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.execution.verification import worker_environment
from shoestring.training.memory.precision import Precision
from shoestring.training.planning.planner import Planner
from tests.models import job, seeded

DIES = "the process died with SIGILL"
SICK = {
    "": {"fp32": "", "bf16": DIES, "fp16": "", "int8": DIES},
    CAPS[0]: dict.fromkeys(("fp32", "bf16", "fp16", "int8"), ""),
}
Forking = Callable[[str], str]


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A processor on which bf16 and int8 die unless oneDNN is capped; gives the caps under which it was tried, as they are tried."""
    caps: list[str] = []

    def tried_there(dtypes: tuple[str, ...], under: str) -> dict[str, str]:
        caps.append(under)
        return dict(SICK.get(under, SICK[""]))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back afterwards
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(instructions, "SET", {})
    monkeypatch.setattr(instructions, "doubtful", lambda: True)
    monkeypatch.setattr(probe, "doubtful", lambda: True)
    monkeypatch.setattr(instructions, "try_dtypes", tried_there)
    deadly.cache_clear()
    yield caps
    deadly.cache_clear()


@pytest.fixture
def in_time(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was multiplied yet: a fork lives if the cap is in its environment."""
    monkeypatch.setattr(instructions, "try_in_fork", lambda dtype: SICK[os.environ.get(VARIABLE, "")][dtype])


@pytest.fixture
def too_late(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices were multiplied before: a fork dies whatever is in its environment."""
    monkeypatch.setattr(instructions, "try_in_fork", lambda dtype: SICK[""][dtype])


# Finding out


def test_a_processor_that_gives_no_reason_for_doubt_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "flags", lambda: ("avx2", "avx512f", "avx512_bf16"))
    monkeypatch.setattr(instructions, "try_dtypes", lambda *given: pytest.fail("tried"))
    monkeypatch.setattr(instructions, "try_in_fork", lambda *given: pytest.fail("forked"))
    deadly.cache_clear()
    assert cap() == {} and deadly("bf16") == ""
    deadly.cache_clear()


def test_the_first_cap_under_which_everything_works_is_chosen_and_kept(probes: list[str]) -> None:
    outcome, needed = working_dtypes()
    assert needed == {VARIABLE: CAPS[0]} and not any(outcome.values())  # outcomes are those under the cap
    assert probes == ["", CAPS[0]]
    assert working_dtypes() == (outcome, needed) and probes == ["", CAPS[0]]


@pytest.mark.parametrize("damage", ["flipped", "empty", "a pipe", "another boot"])
def test_outcomes_that_can_not_be_believed_are_found_out_again(
    damage: str, probes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = working_dtypes()
    file = instructions.outcomes_file()
    if damage == "flipped":
        file.write_text(file.read_text().replace("SIGILL", "SIGIIL"))
    elif damage == "empty":
        file.write_text("")
    elif damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        monkeypatch.setattr(instructions, "machine_key", lambda: "another")
    assert working_dtypes() == before and probes == ["", CAPS[0]] * 2


def test_what_the_user_set_stays_where_it_works_and_is_replaced_where_it_does_not(
    probes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, CAPS[0])
    assert cap() == {} and probes == [CAPS[0]]
    monkeypatch.setenv(VARIABLE, "AVX512_CORE_AMX")
    assert cap() == {VARIABLE: CAPS[0]}


def test_a_child_that_dies_tells_what_it_died_of_and_the_rest_is_tried_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instructions, "IMPORT", "import os, signal")
    trials = {"one": "pass", "two": "os.kill(os.getpid(), signal.SIGILL)", "three": "1 / 0", "four": "pass"}
    monkeypatch.setattr(instructions, "TRIALS", trials)
    assert try_dtypes(tuple(trials), "") == {
        "one": "",
        "two": DIES,
        "three": "ZeroDivisionError: division by zero",
        "four": "",
    }


def test_a_fork_tells_how_this_process_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "multiply_in", lambda dtype: os.kill(os.getpid(), signal.SIGILL))
    assert try_in_fork("bf16") == DIES
    monkeypatch.setattr(
        instructions, "multiply_in", lambda dtype: torch.ones(2, 3) @ torch.ones(2, 3)
    )  # an error is no death
    assert try_in_fork("bf16") == ""
    monkeypatch.setattr(instructions, "multiply_in", lambda dtype: signal.pause())
    monkeypatch.setattr(instructions, "FORKED", 0.05)
    assert "nothing was done" in try_in_fork("bf16")


def test_a_fork_really_computes_here_and_under_a_rehearsal() -> None:
    assert try_in_fork("bf16") == try_in_fork("fp16") == ""
    assert rehearse(job("chain"), (Precision("bf16"),)).events  # asks in the middle of one, on the processor as it is


def test_the_cap_helps_before_the_first_product_and_not_after(tmp_path: Path) -> None:
    """What all this rests on, asked of oneDNN itself: under AVX2 it has no bf16, whatever the processor has."""
    asks = "torch.ops.mkldnn._is_mkldnn_bf16_supported()"
    code = textwrap.dedent(f"""
        import os, torch
        if os.fork():
            os.wait()
            torch.ones(64, 64) @ torch.ones(64, 64)
        os.environ[{VARIABLE!r}] = "AVX2"
        print(int({asks}), flush=True)
    """)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    before, after = child.stdout.split()
    if VARIABLE in os.environ or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bf16 for oneDNN to leave out, or it is capped for this session")
    assert (before, after) == ("0", "1")


# Training in the caller's own process


def test_training_in_ones_own_process_is_capped_while_that_helps(in_time: None) -> None:
    losses = [step.loss for step in shoestring.train(job("chain"), (Precision("bf16"),))]
    assert len(losses) == 3 and os.environ[VARIABLE] == CAPS[0]


def in_bf16() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 10)).to(torch.bfloat16)


def test_training_that_would_kill_its_process_is_refused_with_the_reason_and_both_ways_out(too_late: None) -> None:
    made = job("chain")
    model = seeded(made)
    before = [parameter.clone() for parameter in model.parameters()]
    batch = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    own = shoestring.Job(model=in_bf16, data=lambda: [batch] * 3, steps=2)
    for refused in (
        lambda: list(shoestring.train(made, (Precision("bf16"),), model)),
        lambda: shoestring.verify(made, (Precision("bf16"),), 1),
        lambda: list(shoestring.train(own)),
    ):
        with pytest.raises(Mistake) as told:
            refused()
        for said in (
            "SIGILL",
            "can't be computed in this process",
            f"{VARIABLE}={CAPS[0]}",
            "worker process",
            "shoestring train",
        ):
            assert said in str(told.value), said
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [step.number for step in shoestring.train(made, (Precision("fp16"),))] == [
        1,
        2,
        3,
    ]  # of which it would not die
    assert [step.number for step in shoestring.train(made)] == [1, 2, 3]


def test_where_no_cap_helps_it_is_said_and_none_is_advised(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "try_dtypes", lambda dtypes, under: dict(SICK[""]))
    with pytest.raises(Mistake, match="do not work on this machine, under no cap") as told:
        list(shoestring.train(job("chain"), (Precision("bf16"),)))
    assert VARIABLE not in str(told.value)


def test_a_precision_that_would_kill_the_planner_is_passed_over_with_the_reason(too_late: None) -> None:
    machine = Hardware(dtypes={"bf16": "", "fp16": ""})
    outcome = Planner(job("chain"), machine, inexact=True).outcome(8 << 30)
    ledger = Planner(job("chain"), machine, inexact=True).ledger()
    assert "Precision" not in str(outcome.chosen) and set(ledger.by_precision) == {"fp16 fp32"}
    assert "can't be computed in this process" in Precision("bf16").refusal(ledger) and not Precision("fp16").refusal(
        ledger
    )
    with pytest.raises(Mistake, match="can't be computed in this process"):
        Planner(job("chain"), machine, wanted=(Precision("bf16"),)).outcome(None, (Precision("bf16"),))


def test_workers_start_with_the_cap(in_time: None) -> None:
    probe.remember(Hardware(device=probe.device_here(), tries=3))
    probe.BELIEVED.add(probe.hardware_file())
    found = probe.known_hardware()
    assert found.environment == {VARIABLE: CAPS[0]} and not any(found.dtypes.values())
    assert worker_environment(())[VARIABLE] == os.environ[VARIABLE] == CAPS[0]
    cap_this_process()  # again: what we set ourselves is not taken for the user's
    assert probe.known_hardware().environment == {VARIABLE: CAPS[0]}


PLUGIN = f"""
import os, sys
from shoestring.measure import instructions

def tried(dtypes, cap):
    return dict.fromkeys(dtypes, "" if cap else {DIES!r})

instructions.doubtful, instructions.try_dtypes = (lambda: True), tried
assert "torch" not in sys.modules

def pytest_collection_finish():
    assert os.environ[{VARIABLE!r}] == {CAPS[0]!r}
"""


def test_a_session_of_tests_runs_under_the_cap(tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text(PLUGIN)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}",
    }
    words = [
        "--collect-only",
        "-p",
        "sick",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parents[1] / "training" / "memory" / "test_precision.py"),
    ]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
