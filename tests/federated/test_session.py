"""A federation that is killed goes on and ends with the same bits; what it has spent of epsilon is never counted too low.

A private one can't end with the same bits, because its noise follows from nothing: every round is released once, from its checkpoint, or
is counted once more. Its noise from a seed, for tests, it ends with the same bits.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import shoestring
from shoestring.commands.main import run as command
from shoestring.core.errors import Mistake
from shoestring.federated.events import RoundFinished
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.release import COPIED, NORM_OF_DEVICES, NOT_OURS, SHOWN_EXACTLY
from shoestring.privacy.account import epsilon_of, epsilon_spent
from shoestring.privacy.ledger import NAME, PrivacyLedger
from shoestring.runs.checkpoints.checkpoints import draft, newest_good, publish
from shoestring.runs.events.event import Event, Saved, Stepped, Warned
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.show.page import page
from tests.federated import toys

JOB = """
from torch import nn
from tests.federated.toys import CLASSES, WIDTH, toy_job
from shoestring import Job, Local

def job(devices: int = 12, rate: float = 0.1, norm: bool = False) -> Job:
    model = {"model": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))} if norm else {}
    return toy_job(devices, local=Local(epochs=1, batch=4, lr=rate, held_out=0.25), **model)
"""
ROUNDS = 4
PRIVATE = {"epsilon": 8.0, "delta": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "private, from a seed": PRIVATE | {"insecure_seed": 7},
    "state on devices": {"use": ["Scaffold()"]},
    "state on the server": {"use": ["FedAdam()"]},
    "asynchronous": {"use": ["FedBuff(buffer=3, concurrency=6)"]},
    "feedback": {"use": ["TopK(share=0.2)", "QuantizeUpdates()"]},
    "statistics on the server": {"norm": True, "statistics": "averaged"},
    "statistics on devices": {"norm": True, "statistics": "local"},
    "statistics beside state": {"norm": True, "statistics": "local", "use": ["Ditto()"]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def run(file: Path, folder: Path, tell: Callable[[Event], None] | None = None, **asked: Any) -> dict[str, Any]:
    words = {"rounds": ROUNDS, "per_round": 6, "processes": 1, "save_every": 1}
    return dict(shoestring.federate(file, run=folder, tell=tell, **words, **asked).report)


def killed(file: Path, folder: Path, at: Callable[[Event], bool], **asked: Any) -> int:
    """Run it in a process that is killed by SIGKILL when such an event is told; gives how it ended."""

    def tell(event: Event) -> None:
        if at(event):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run, args=(file, folder, tell), kwargs=asked)
    process.start()
    process.join()
    return process.exitcode or 0


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_same_bits(case: str, file: Path, tmp_path: Path) -> None:
    whole = run(file, tmp_path / "whole", **CASES[case])
    for number, kind in (
        (1, Stepped),
        (2, RoundFinished),
        (3, Saved),
    ):  # in three rounds, at three moments, one after the other

        def at(event: Event, number: int = number, kind: type[Event] = kind) -> bool:
            return isinstance(event, kind) and getattr(event, "step", 0) == number

        assert killed(file, tmp_path / "killed", at, **CASES[case]) == -signal.SIGKILL
    again = run(file, tmp_path / "killed", **CASES[case])
    for key in ("weights_sha256", "losses", "bytes_up", "bytes_down", "participants", "epsilon"):
        assert again[key] == whole[key], key


def ledger(folder: Path) -> PrivacyLedger:
    return PrivacyLedger(folder / NAME)


def test_what_is_spent_is_on_disk_before_anything_of_a_round_is_known_and_is_told_once(
    file: Path, tmp_path: Path
) -> None:
    """Killed at the first word of every round, the ledger has that round already, and the round is not played again."""
    folder = tmp_path / "run"
    for number in range(1, ROUNDS + 1):
        assert killed(
            file, folder, lambda event, number=number: isinstance(event, Stepped) and event.step == number, **PRIVATE
        )
        spending = ledger(folder)
        entry = spending.entries[0]
        assert [one.round for one in spending.entries] == list(range(number))
        assert spending.epsilon(exactly=True) == epsilon_of(entry.multiplier, entry.rate, number, PRIVATE["delta"])
    report = run(file, folder, **PRIVATE)
    assert report["rounds"] == ROUNDS and len(report["losses"]) == ROUNDS and report["epsilon"] <= PRIVATE["epsilon"]
    assert len(ledger(folder).entries) == ROUNDS


def test_a_round_that_was_killed_before_it_is_in_the_ledger_has_told_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr("shoestring.privacy.ledger.line_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert killed(file, folder, lambda event: False, **PRIVATE) == -signal.SIGKILL
    monkeypatch.undo()
    told = report_of(folder)
    assert (
        not told.of_kind(RoundFinished)
        and not told.curves.losses
        and not list(folder.glob("checkpoints/*"))
        and not ledger(folder).entries
    )


def test_the_same_command_on_other_records_is_another_release_or_none(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after round 1; one device's records change; the same command. Its round 1 stands in the checkpoint, and is not computed again.
    Without the checkpoint it is played again, with other noise, and counted again."""
    folder, number = tmp_path / "run", 5

    def killed_at_1(event: Event) -> bool:
        return isinstance(event, RoundFinished) and event.step == 1

    assert killed(file, folder, killed_at_1, **PRIVATE)
    first = ledger(folder).entries
    weights = folder / "checkpoints" / "step-00000001" / "weights.safetensors"
    released = weights.read_bytes()
    records = toys.records
    monkeypatch.setattr(toys, "records", lambda one, count=None: records(one + 100 * (one == number), count))
    assert killed(file, folder, lambda event: isinstance(event, RoundFinished) and event.step == 2, **PRIVATE)
    assert ledger(folder).entries[:1] == first and [one.round for one in ledger(folder).entries] == [0, 1]
    assert weights.read_bytes() == released
    shutil.rmtree(folder / "checkpoints")
    events: list[Event] = []
    report = run(file, folder, events.append, **PRIVATE)
    found = ledger(folder)
    assert [one.round for one in found.entries][:3] == [0, 1, 0] and len({one.release for one in found.entries}) == len(
        found.entries
    )
    assert any(isinstance(one, Warned) and "is spent again" in one.text for one in events)
    kind = first[0]
    assert report["ended"] == "epsilon is spent" and report["rounds"] == ROUNDS - 2, "two of four were spent twice"
    assert (
        found.epsilon(exactly=True)
        == epsilon_of(kind.multiplier, kind.rate, ROUNDS, PRIVATE["delta"])
        <= PRIVATE["epsilon"]
    )


def test_two_runs_of_the_same_command_share_no_noise(file: Path, tmp_path: Path) -> None:
    """Nor does --fresh, which keeps in mind what was spent before it."""
    first, second = (run(file, tmp_path / name, **PRIVATE) for name in ("one", "two"))
    events: list[Event] = []
    third = run(file, tmp_path / "two", events.append, fresh=True, **PRIVATE)
    assert len({one["weights_sha256"] for one in (first, second, third)}) == 3
    assert third["epsilon"] == second["epsilon"] < third["epsilon_in_all"], "the same people, twice"
    assert any(isinstance(one, Warned) and "1 other run" in one.text for one in events)


def test_two_folders_on_the_same_people_add_up(file: Path, tmp_path: Path) -> None:
    shared = {**PRIVATE, "ledger": tmp_path / "people.jsonl"}
    first = run(file, tmp_path / "one", **shared)
    second = run(file, tmp_path / "two", **shared)
    assert "epsilon_in_all" not in first or first["epsilon_in_all"] is None
    found = PrivacyLedger(tmp_path / "people.jsonl")
    assert found.runs == 2 and len(found.entries) == 2 * ROUNDS and not (tmp_path / "one" / NAME).exists()
    assert second["epsilon_in_all"] == found.epsilon(exactly=True) > second["epsilon"] == first["epsilon"]


def test_a_run_that_the_population_has_no_room_for_is_refused_before_anything_is_trained(
    file: Path, tmp_path: Path
) -> None:
    shared = {**PRIVATE, "ledger": tmp_path / "people.jsonl", "ledger_epsilon": 9.0}
    run(file, tmp_path / "one", **shared)
    before = (tmp_path / "people.jsonl").read_bytes()
    with pytest.raises(
        shoestring.OverBudget, match=r"1 runs have spent epsilon 7\.\d+ of the 9 that .*people\.jsonl allows"
    ):
        run(file, tmp_path / "two", **{**shared, "ledger_epsilon": None})  # the promise stands in the ledger
    assert (tmp_path / "people.jsonl").read_bytes() == before and not list((tmp_path / "two").glob("checkpoints/*"))
    with pytest.raises(shoestring.Mistake, match="1 run spent epsilon"):
        run(file, tmp_path / "two", **{**shared, "ledger_epsilon": 7.0})


def test_noise_from_a_seed_is_called_what_it_is_everywhere(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    report = run(file, tmp_path / "run", events.append, insecure_seed=7, **PRIVATE)
    assert report["private"] is False and any(isinstance(one, Warned) and "NOT PRIVATE" in one.text for one in events)
    assert all(one.seeded for one in ledger(tmp_path / "run").entries) and ledger(tmp_path / "run").entries
    assert "NOT PRIVATE" in page(report_of(tmp_path / "run"))
    assert (
        run(file, tmp_path / "other", **PRIVATE)["private"] is True and run(file, tmp_path / "plain")["private"] is None
    )
    for to in ("safetensors", "csv", "json"):
        capsys.readouterr()
        assert command(["export", str(tmp_path / "run"), "--to", to, "--out", str(tmp_path / to)]) == 0
        assert "NOT PRIVATE" in capsys.readouterr().err
    assert command(["export", str(tmp_path / "other"), "--to", "csv", "--out", str(tmp_path / "2")]) == 0
    assert "NOT PRIVATE" not in capsys.readouterr().err
    with pytest.raises(shoestring.Mistake, match="insecure_seed= changed"):
        run(file, tmp_path / "other", insecure_seed=7, **PRIVATE)


def test_a_clipping_norm_that_was_chosen_by_real_updates_is_told_of(file: Path, tmp_path: Path) -> None:
    warnings = run(file, tmp_path / "chosen", **PRIVATE)["warnings"]
    assert NORM_OF_DEVICES in warnings and SHOWN_EXACTLY in warnings
    assert "clipping norm was chosen" in page(report_of(tmp_path / "chosen"))
    given = ["Clip(norm=0.5)", "GaussianNoise(multiplier=3.0)"]
    assert NORM_OF_DEVICES not in run(file, tmp_path / "given", use=given, **PRIVATE)["warnings"]


class Unknown(FederatedTechnique):
    why: ClassVar[str] = "it may do anything"
    seam: ClassVar[str] = "combine"

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    def apply(self, subject: Round, /) -> Round:
        return subject


def test_what_a_technique_of_the_users_own_does_to_a_private_round_is_called_unknown(
    file: Path, tmp_path: Path
) -> None:
    use = ["Clip(norm=0.5)", "GaussianNoise(multiplier=3.0)", Unknown()]
    assert NOT_OURS.format("Unknown") in run(file, tmp_path / "run", use=use, **PRIVATE)["warnings"]


def test_noise_that_can_not_keep_the_budget_is_refused_before_the_first_round(file: Path, tmp_path: Path) -> None:
    enough = epsilon_of(1.0, 0.5, 2, 1e-2)  # for two of four rounds
    with pytest.raises(shoestring.OverBudget, match="epsilon"):
        run(file, tmp_path / "run", epsilon=enough, delta=1e-2, use=["Clip(norm=0.5)", "GaussianNoise(multiplier=1.0)"])
    assert not (tmp_path / "run" / "privacy.jsonl").exists()


def test_a_run_ends_before_its_budget_is_exceeded(file: Path, tmp_path: Path) -> None:
    """A ledger that holds two more rounds than this run has leaves room for two of the four."""
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Stepped) and event.step == 1, **PRIVATE)
    mine = ledger(folder).entries[0]
    for number in (1000, 1001):
        assert ledger(folder).spend(replace(mine, round=number))
    report = run(file, folder, **PRIVATE)
    assert report["ended"] == "epsilon is spent" and report["rounds"] == 2 and report["epsilon"] <= PRIVATE["epsilon"]
    assert report_of(folder).state == "finished"


def test_a_run_that_goes_on_with_other_settings_adds_up_what_each_round_spent(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Stepped) and event.step == 1, rate=0.1, **PRIVATE)
    report = run(file, folder, adopt=True, epsilon=9.0, delta=PRIVATE["delta"])
    kinds = [one.kind for one in ledger(folder).entries]
    assert len(kinds) == ROUNDS and kinds[0] != kinds[1] == kinds[2] == kinds[3], "less noise from the second round on"
    assert report["epsilon"] == epsilon_spent([(kinds[0], 1), (kinds[1], 3)], PRIVATE["delta"]) <= 9.0


def test_a_ledger_that_was_deleted_does_not_make_it_forget(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Saved) and event.step == 2, **PRIVATE)
    whole = ledger(folder).epsilon()
    lines = (folder / "privacy.jsonl").read_bytes()
    (folder / "privacy.jsonl").write_bytes(lines[: len(lines) // 2])
    assert PrivacyLedger(folder / NAME, ledger(folder).entries[0].run, done=2).epsilon() == whole
    (folder / "privacy.jsonl").unlink()
    report = run(file, folder, **PRIVATE)
    assert report["rounds"] == 2 and report["ended"] == "epsilon is spent", (
        "of what kind the lost rounds were, nobody knows"
    )


def test_a_copied_run_is_told_that_its_ledger_does_not_know_of_the_original(file: Path, tmp_path: Path) -> None:
    assert killed(file, tmp_path / "run", lambda event: isinstance(event, Stepped) and event.step == 1, **PRIVATE)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert COPIED in run(file, tmp_path / "copy", **PRIVATE)["warnings"]
    assert COPIED not in run(file, tmp_path / "moved", **PRIVATE)["warnings"]


def test_a_pipe_in_place_of_the_ledger_ends_the_run_before_the_next_round(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Saved) and event.step == 1, **PRIVATE)
    before = report_of(folder).of_kind(RoundFinished)  # what is saved is told later
    (folder / "privacy.jsonl").unlink()
    os.mkfifo(folder / "privacy.jsonl")
    with pytest.raises(OSError, match=r"privacy\.jsonl"):
        run(file, folder, **PRIVATE)
    assert report_of(folder).of_kind(RoundFinished) == before


def test_a_damaged_token_of_a_ledger_is_told_and_not_withheld(file: Path, tmp_path: Path) -> None:
    assert killed(file, tmp_path / "run", lambda event: isinstance(event, Saved) and event.step == 1, **PRIVATE)
    (tmp_path / "run" / "privacy.json").write_text('{"run":')
    with pytest.raises(Mistake, match=r"privacy.json is damaged .it is not JSON.*fresh"):
        run(file, tmp_path / "run", **PRIVATE)


def test_a_resealed_report_of_a_finished_run_is_told_to_a_script(file: Path, tmp_path: Path) -> None:
    report, folder = run(file, tmp_path / "run", use=[]), Folder(tmp_path / "run")
    odd: list[dict[str, Any]] = [{"losses": None}, {"losses": "abc"}, {"metrics": 5}, {"after": "x"}]
    for said in odd:
        folder.write("report.json", report | said)
        with pytest.raises(Mistake, match=r"report.json has impossible content"):
            run(file, tmp_path / "run", use=[])


NOISE = ["Clip(norm=0.1)", "GaussianNoise(multiplier=1.0)"]


@pytest.mark.parametrize(
    ("use", "techniques", "how", "said"),
    [
        (None, [], {}, "it has no noise, and an epsilon is asked for"),
        (None, [0], {}, "it has no noise, and an epsilon is asked for"),
        (None, [1], {}, "GaussianNoise is of no use without Clip or AdaptiveClip"),
        (NOISE, [0, 0, 1], {}, "its techniques are"),
        (NOISE, [0, 1], {"chunk": -1}, "-1 at once"),
        (NOISE, [0, 1], {"chunk": 10**9}, "1000000000 at once"),
        (NOISE, [0, 1], {"kind": "fast"}, "devices can't work fast"),
    ],
)
def test_a_resealed_plan_that_could_not_be_of_what_is_asked_for_is_refused(
    use: list[str] | None, techniques: list[int], how: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    asked = PRIVATE | {"use": use, "epsilon": 500.0}
    assert killed(file, tmp_path / "run", lambda event: isinstance(event, Saved) and event.step == 1, **asked)
    folder = Folder(tmp_path / "run")
    plan = folder.read("plan.json")
    chosen = plan["chosen"]
    chosen["techniques"] = [chosen["techniques"][place] for place in techniques]
    chosen["details"]["how"] |= how
    folder.write("plan.json", plan)
    with pytest.raises(Mistake, match=rf"plan.json is damaged .*{said}.*adopt"):
        run(file, tmp_path / "run", **asked)


@pytest.mark.parametrize("resealed", [torch.ones(3), torch.ones((), dtype=torch.long), None])
def test_state_that_the_techniques_can_not_have_kept_is_refused(
    resealed: torch.Tensor | None, file: Path, tmp_path: Path
) -> None:
    killed(file, tmp_path / "run", lambda event: isinstance(event, Saved) and event.step == 1, use=["FedAdam()"])
    folder = tmp_path / "run" / "checkpoints"
    newest, _ = newest_good(folder)
    assert newest is not None
    state, weights = newest.state(), {name: one.clone() for name, one in newest.weights().items()}
    aliases = newest.aliases()
    del state["server"]["FedAdam.m"]
    state["server"] |= {} if resealed is None else {"FedAdam.m": resealed}
    aliases = newest.aliases()
    shutil.rmtree(newest.path)
    publish(draft(folder, newest.step, weights, state, aliases))
    with pytest.raises(Mistake, match=r"FedAdam.m is not what the run's techniques keep.*fresh=True"):
        run(file, tmp_path / "run", use=["FedAdam()"])


def test_a_run_that_was_asked_for_something_else_is_refused(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run")
    with pytest.raises(shoestring.Mistake, match="epsilon= changed: not given before, now 4"):
        run(file, tmp_path / "run", epsilon=4.0, delta=1e-2)


def test_the_report_has_what_the_events_say(file: Path, tmp_path: Path) -> None:
    report = run(file, tmp_path / "run", use=["DropOut(rate=0.4)"])
    told = report_of(tmp_path / "run")
    assert told.state == "finished" and [one.step for one in told.of_kind(RoundFinished)] == [1, 2, 3, 4]
    assert [one.participants + one.missing for one in told.of_kind(RoundFinished)] == [6] * 4 and sum(
        report["missing"]
    ) > 0
    assert (
        report["bytes_up"] == sum(one.up for one in told.of_kind(RoundFinished))
        and report["measured"]["up_bytes"] == report["predicted"]["up_bytes"]
    )
    assert report["rounds"] == 4 and len(report["losses"]) == 4 and report["epsilon"] is None
