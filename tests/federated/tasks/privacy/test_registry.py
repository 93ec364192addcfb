"""The registry: no two results differ by a few devices, whoever asks and whichever devices answer."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from binascii import crc32
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.compare import compare
from shoestring.federated.tasks.evaluate import evaluate
from shoestring.federated.tasks.gather import Cohort
from shoestring.federated.tasks.privacy.registry import Registry, TooClose
from shoestring.federated.tasks.settings import candidates_of
from shoestring.federated.tasks.tune import tune
from tests.federated.tasks.toy import Quadratic, cohort_of, names_of
from tests.waiting import HUNG

RATES = candidates_of([{"lr": 0.1}, {"lr": 0.3}])
TASKS = {
    "evaluate": lambda cohort, names: evaluate(RATES, cohort, names),
    "tune": lambda cohort, names: tune(RATES, cohort, names),
    "compare": lambda cohort, names: compare(*RATES, cohort, names),
}


@pytest.mark.parametrize("first", TASKS)
@pytest.mark.parametrize("second", TASKS)
def test_60_devices_and_then_59_of_them_are_refused(first: str, second: str, tmp_path: Path) -> None:
    names = names_of(60)
    TASKS[first](replace(cohort_of(), registry=Registry(tmp_path / "asked")), names)
    again = replace(cohort_of(), registry=Registry(tmp_path / "asked"))  # as another command would
    for other in (names[1:], [*names, "device 60"], names[:51]):
        with pytest.raises(TooClose, match=r"except for [19]: the difference of both would be about fewer than 10"):
            TASKS[second](again, other)
    TASKS[second](again, names)  # the same ones again
    TASKS[second](again, names[:50])  # ten fewer


def test_nobody_can_forget_the_registry() -> None:
    own = next(one for one in fields(Cohort) if one.name == "registry")
    assert own.default is own.default_factory, "it has no default"  # both are MISSING


def test_a_device_that_answers_once_only_is_not_given_away(tmp_path: Path) -> None:
    """The same are asked, and one of them fails the second time: the difference would be its result."""
    names, registry = names_of(40), Registry(tmp_path / "asked")
    evaluate(RATES, replace(cohort_of(), registry=registry), names)
    with pytest.raises(TooClose, match="was about these devices, except for 1"):
        evaluate(RATES, replace(cohort_of(Quadratic(breaks="device 7")), registry=registry), names)


def test_a_device_that_never_answers_is_no_reason_to_refuse_the_second_time(tmp_path: Path) -> None:
    cohort = replace(cohort_of(Quadratic(breaks="device 7")), registry=Registry(tmp_path / "asked"))
    assert evaluate(RATES, cohort, names_of(40)).measured == evaluate(RATES, cohort, names_of(40)).measured


def test_groups_that_are_drawn_otherwise_the_second_time_do_not_differ_by_a_few(tmp_path: Path) -> None:
    names, registry = names_of(60), Registry(tmp_path / "asked")
    evaluate(
        RATES, replace(cohort_of(group=lambda name: "even" if int(name[7:]) % 2 else "odd"), registry=registry), names
    )
    moved = cohort_of(group=lambda name: "even" if int(name[7:]) % 2 or name == "device 4" else "odd")
    with pytest.raises(TooClose, match="except for 1"):
        evaluate(RATES, replace(moved, registry=registry), names)
    evaluate(
        RATES,
        replace(cohort_of(group=lambda name: "first" if int(name[7:]) < 30 else "last"), registry=registry),
        names,
    )


def test_the_sum_of_two_groups_less_a_later_whole_is_not_one_device(tmp_path: Path) -> None:
    """Three groups, and then all of two of them but one: no two numbers are close, and the sum of two and the third are."""
    names = names_of(90)
    third = cohort_of(group=lambda name: f"group {int(name[7:]) % 3}")
    evaluate(RATES, replace(third, registry=Registry(tmp_path / "asked")), names)
    two = [name for name in names if int(name[7:]) % 3 < 2]
    again = replace(cohort_of(), registry=Registry(tmp_path / "asked"))
    for other in (two[1:], [*two, names[2]]):
        with pytest.raises(TooClose, match="except for 1: "):
            evaluate(RATES, again, other)
    evaluate(RATES, again, two)


def test_the_stricter_of_two_bounds_holds(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "asked")
    evaluate(RATES, replace(cohort_of(), registry=registry), names_of(60), least=20)
    with pytest.raises(TooClose, match="fewer than 20"):
        evaluate(RATES, replace(cohort_of(), registry=registry), names_of(45), least=5)


def attempt(path: Path, number: int) -> None:
    try:
        Registry(path).note(names_of(50 + number), [names_of(50 + number)], 10)
    except TooClose:
        sys.exit(3)


def test_of_several_at_once_one_is_told(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=attempt, args=(tmp_path / "asked", number)) for number in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert sorted(one.exitcode or 0 for one in workers) == [0, 3, 3, 3]


def test_a_damaged_registry_refuses_everything(tmp_path: Path) -> None:
    path = tmp_path / "asked"
    Registry(path).note(names_of(30), [names_of(30)], 10)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:40], whole.replace(b"A", b"B", 1), whole + b"x\n"):
        path.write_bytes(broken)
        with pytest.raises(Mistake, match="is damaged"):
            Registry(path).refuse_asking(names_of(60), 10)
    assert b"device" not in whole, "names are digests"


@pytest.mark.parametrize(
    "odd",
    [
        {"least": 10**400},
        {"least": True},
        {"least": float("inf")},
        {"least": -5},
        {"least": "10"},
        {"about": []},
        {"about": "AAAA"},
        {"about": [5]},
        {"asked": None},
        {"asked": ["\ud800"]},
        {"deep": "[" * 100_000},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_a_line_of_the_registry_with_a_good_checksum_and_nonsense_in_it_is_damage(
    odd: dict[str, object], tmp_path: Path
) -> None:
    Registry(tmp_path / "asked").note(names_of(30), [names_of(30)], 10)
    line = json.loads((tmp_path / "asked").read_text())
    line.pop("crc")
    head = json.dumps(line | odd)[:-1].replace('"[[', "[[").encode()
    (tmp_path / "asked").write_bytes(head + b',"crc":"%08x"}\n' % crc32(head))
    with pytest.raises(Mistake, match="is damaged"):
        Registry(tmp_path / "asked").refuse_asking(names_of(60), 10)


JOB = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from shoestring import Job
from tests.federated.toys import toy_job

def job() -> Job:
    return toy_job(60)
"""


@pytest.mark.usefixtures("warm_workers")
def test_commands_know_of_each_other(tmp_path: Path) -> None:
    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoestring", "federate", "toy.py", "--as-is", *words, "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HUNG,
        )

    (tmp_path / "toy.py").write_text(JOB)
    first = asked("--task", "evaluate", "--per-round", "60")
    assert first.returncode == 0 and json.loads(first.stdout)["telemetry"]["devices"] == 60, first.stderr
    second = asked("--task", "evaluate", "--per-round", "59")
    assert second.returncode == 2 and "except for 1" in second.stderr and not second.stdout
    other = asked("--task", "evaluate", "--per-round", "59", "--ledger", "others")
    assert other.returncode == 0 and (tmp_path / "others.asked").exists(), other.stderr
    assert asked("--task", "evaluate", "--per-round", "60", "--ledger", "others").returncode == 2
    noise = asked("--task", "evaluate", "--epsilon", "4", "--delta", "1e-3")
    assert noise.returncode == 2 and "has no noise" in noise.stderr
