"""A running federation: its events, and its report."""

from __future__ import annotations

import json
import warnings
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shoestring
from shoestring.core.clients.local import Local
from shoestring.federated.events import RoundFinished
from shoestring.federated.playing.play import play
from shoestring.federated.techniques.advance.momentum import FedAvgM
from shoestring.federated.techniques.behaviour.malicious import Malicious
from shoestring.runs.events.event import Event, Validated, Warned
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from tests.federated.test_session import JOB
from tests.federated.toys import records, toy, toy_job


def told(**asked: Any) -> tuple[shoestring.Federated, list[Event]]:
    events: list[Event] = []
    job = asked.pop("job", None) or toy_job()
    return shoestring.federate(job, processes=1, tell=events.append, **{"rounds": 4, "per_round": 6, **asked}), events


def test_the_model_that_comes_out_is_that_of_the_last_round_and_has_learnt() -> None:
    done, _ = told(rounds=30, per_round=12)
    inputs, targets = (torch.stack(one) for one in zip(*records(99, 200), strict=True))
    assert float((done.model(inputs).argmax(1) == targets).float().mean()) > 0.8
    assert done.losses[-1] < done.losses[0] / 2 and done.before[-1]["accuracy"] > done.before[0]["accuracy"]


def test_the_global_model_is_validated_where_the_job_holds_something_out() -> None:
    inputs, targets = (torch.stack(one) for one in zip(*records(99, 60), strict=True))
    done, events = told(job=toy_job(held_out=lambda: TensorDataset(inputs, targets), goal="max accuracy"), every=2)
    assert [one.step for one in events if isinstance(one, Validated)] == [2, 4] == [one["step"] for one in done.metrics]
    assert done.metrics[-1]["accuracy"] == pytest.approx(
        float((done.model(inputs).argmax(1) == targets).float().mean()), abs=1e-6
    )


def test_rounds_that_a_robust_rule_makes_nothing_of_are_told() -> None:
    _, events = told(use=["Krum(malicious=1)", "DropOut(rate=0.6)"])
    few = [one.step for one in events if isinstance(one, RoundFinished) and one.participants < 5]
    warned = [
        one.text
        for one in events
        if isinstance(one, Warned) and "moved no weights: too few devices answered for Krum" in one.text
    ]
    assert few and len(warned) == len(few)


def test_asynchronous_rounds_tell_their_simulated_time() -> None:
    _, events = told(use=["FedBuff(buffer=3, concurrency=6)"])
    times = [one.simulated for one in events if isinstance(one, RoundFinished)]
    assert all(one is not None and one > 0 for one in times)


def test_a_round_in_which_nobody_answers_moves_nothing_and_is_told() -> None:
    _, events = told(use=["DropOut(rate=0.99)"], rounds=2)
    rounds = [one for one in events if isinstance(one, RoundFinished)]
    empty = [one for one in rounds if not one.participants]
    assert empty and all(one.missing == 6 for one in empty)
    assert sum("nobody's update" in one.text for one in events if isinstance(one, Warned)) == len(empty)


def test_a_job_of_a_script_can_not_be_gone_on_with_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(shoestring.Mistake, match=r"run= .*put it into a file"):
        shoestring.federate(toy_job(), run=tmp_path / "run")


def test_what_fails_in_the_job_is_told_with_its_place() -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("no such table")

    with pytest.raises(shoestring.Mistake, match=r"the job failed in test_runner.py line \d+: KeyError"):
        shoestring.federate(toy_job(clients=broken), processes=1)


def test_a_show_that_fails_does_not_cost_the_report() -> None:
    def show(model: object) -> str:
        raise RuntimeError("probability tensor contains nan")

    done, events = told(job=toy_job(show=show), rounds=1, per_round=3)
    assert len(done.losses) == 1 and done.report["shown"] == ""
    assert any(isinstance(one, Warned) and "show` failed: RuntimeError: probability" in one.text for one in events)


class Bare(ValueError):
    """JSON has a number that is not finite."""


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise Bare(word)

    return json.loads(text, parse_constant=refuse)


def test_a_round_that_nobody_took_part_in_has_no_loss_and_no_bare_nan(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    done = shoestring.federate(
        tmp_path / "job.py", rounds=2, per_round=2, processes=1, use=["DropOut(rate=0.99)"], run=tmp_path / "run"
    )
    assert done.report["losses"] == [None, None] and all(isnan(loss) for loss in done.losses)
    written = {file: (tmp_path / "run" / file).read_text() for file in ("events.jsonl", "report.json", "plan.json")}
    for text in (*written.pop("events.jsonl").splitlines(), *written.values()):
        strict(text)
    strict(json.dumps(report_json(report_of(tmp_path / "run"))))


def test_a_federation_whose_updates_are_not_finite_ends_with_a_mistake() -> None:
    with pytest.raises(shoestring.Mistake, match="not finite"):
        told(job=toy_job(local=Local(lr=1e30, epochs=3)), rounds=5)


def test_a_federation_whose_loss_does_not_fall_says_so_at_its_end_with_what_may_be_the_cause(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    private = {
        "epsilon": 0.5,
        "delta": 1e-4,
        "rounds": 6,
        "per_round": 3,
        "insecure_seed": 2,
        "ledger": tmp_path / "ledger.jsonl",
    }
    done, events = told(**private)
    said = [one.text for one in events if isinstance(one, Warned) and one.text.startswith("the loss did not fall")]
    assert len(said) == 1 and "times what devices find" in said[0] and said[0] in done.report["warnings"]
    learned, events = told(rounds=12)
    assert not any(isinstance(one, Warned) for one in events) and learned.report["warnings"] == []


def test_a_run_that_will_drown_in_noise_is_told_before_its_first_round(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    private = {"epsilon": 0.05, "delta": 1e-3, "rounds": 2, "insecure_seed": 2, "ledger": tmp_path / "ledger.jsonl"}
    with pytest.warns(UserWarning, match="times what devices find.*more devices a round"):
        done, events = told(**private)
    kinds = [type(one).__name__ for one in events]
    doubts = [place for place, one in enumerate(events) if isinstance(one, Warned) and "times what" in one.text]
    assert len(doubts) == 1 and doubts[0] < kinds.index("RoundFinished")
    assert any("times what devices find" in one for one in done.report["warnings"])


def test_a_script_is_told_that_its_ledger_is_kept_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    private = {"epsilon": 8.0, "delta": 1e-2, "rounds": 1}
    with pytest.warns(UserWarning, match="kept nowhere.*ledger="):
        told(**private)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "what this federation spends")
        told(**private, ledger=tmp_path / "ledger.jsonl")
        told(rounds=1)


def test_weights_that_overflow_when_they_are_combined_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(shoestring.Mistake, match="after round 1 are not finite"):
        told(use=[FedAvgM(lr=3e38), Malicious(share=1.0, attack="sign-flip", strength=1e20)], rounds=3)


def test_clients_that_fail_are_named_and_counted_and_the_federation_goes_on_round_by_round() -> None:
    """Also where a round has one device only, and that one fails."""
    odd = [(torch.zeros(2), torch.tensor(0))] * 6
    job = toy_job(clients=lambda: {"odd": odd, **{f"d{number}": records(number) for number in range(3)}})
    done, events = told(job=job, rounds=8, per_round=1)
    rounds = [one for one in events if isinstance(one, RoundFinished)]
    failed = [one for one in rounds if one.rejected]
    assert 0 < len(failed) < 8 and {name for one in failed for name, _ in one.rejected} == {"odd"}
    assert done.report["rejected"] == [int(bool(one.rejected)) for one in rounds]


def test_a_job_that_fails_on_every_client_says_so_with_the_first_cause() -> None:
    odd = [(torch.zeros(2), torch.tensor(0))] * 6
    with pytest.raises(shoestring.Mistake, match="RuntimeError"):
        told(job=toy_job(clients=lambda: {"a": odd, "b": odd}), per_round=2)


def test_json_has_no_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Of rounds in which nobody takes part, and of a metric that is no number."""

    def strictly(text: str) -> Any:
        return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))

    (tmp_path / "job.py").write_text(NOT_FINITE)
    events: list[Event] = []
    done = shoestring.federate(
        tmp_path / "job.py",
        rounds=2,
        per_round=6,
        processes=1,
        every=1,
        run=tmp_path / "run",
        tell=events.append,
        use=["DropOut(rate=0.99)"],
    )
    assert any(isnan(loss) for loss in done.losses) and None in done.report["losses"]
    other = shoestring.federate(
        tmp_path / "job.py", rounds=1, per_round=6, processes=1, every=1, run=tmp_path / "other"
    )
    assert other.report["after"][0]["odd"] is None and not isnan(other.losses[0])
    for folder in ("run", "other"):
        strictly((tmp_path / folder / "report.json").read_text())
        lines = (tmp_path / folder / "events.jsonl").read_text().splitlines()
        assert [strictly(line) for line in lines]
        told = report_of(tmp_path / folder)
        assert not told.damage and len(told.of_kind(RoundFinished)) == len(told.curves.losses), (
            "what is null is read again"
        )
    assert isnan(report_of(tmp_path / "run").curves.losses[0]) or isnan(report_of(tmp_path / "run").curves.losses[1])


NOT_FINITE = """
from tests.federated.toys import toy_job
from shoestring import Job

def job() -> Job:
    return toy_job(metrics=lambda output, batch: {"odd": output.sum() * float("nan")})
"""


@pytest.mark.parametrize(
    ("delta", "clients", "said"),
    [(0.9, 12, "so it protects nobody"), (0.51, 2, "so it protects nobody"), (0.11, 100, "records of 11 devices")],
)
def test_a_delta_that_promises_nothing_is_refused(delta: float, clients: int, said: str) -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(shoestring.Mistake, match=said):
        shoestring.federate(toy_job(clients), rounds=1, per_round=2, processes=1, epsilon=8.0, delta=delta)


def test_a_delta_of_one_in_the_number_of_clients_is_told() -> None:
    pytest.importorskip("dp_accounting")
    for delta, warned in ((1 / 12, True), (0.05, False)):
        _, events = told(epsilon=8.0, delta=delta, rounds=1)
        assert any(isinstance(one, Warned) and "less than 1 / clients is usual" in one.text for one in events) is warned


def test_a_round_tells_how_many_devices_are_done_while_it_is_played() -> None:
    given, heard = toy(per_round=6), []
    parts = given.plain
    devices = given.devices(parts)
    play(parts, given.server(parts), devices, given.population, on_answer=lambda done, of: heard.append((done, of)))
    assert heard[0] == (0, 6) and [done for done, _ in heard] == sorted(done for done, _ in heard) and heard[-1][0] >= 5
