"""Options of a federation: flags of `shoestring federate`, arguments of `shoestring.federate`, and the part of its
run's request.

Imports nothing heavy, so that a wrong flag is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf, nan
from typing import Any

from shoestring.core.budget import Budget
from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.command_line.arguments import argument, dataclass, group
from shoestring.core.command_line.extras import require
from shoestring.core.errors import Mistake
from shoestring.runs.options import RunOptions

WHOLE = ("clients", "per_round", "rounds", "processes", "every")  # integers, 1 or more
PRIVATE = ("ledger", "ledger_epsilon", "insecure_seed")  # only with epsilon; a task has a ledger without it


@dataclass(frozen=True)
class FederateOptions:
    """None: not given, use the default."""

    clients: int | None = argument("N", "number of devices (default: the job's; for a partition rule, 100)")
    per_round: int | None = argument("N", "devices per round (default 10)")
    rounds: int | None = argument("N", "rounds (default 20)")
    upload: int | None = argument("BYTES", "most bytes that a device may upload per round, such as 200KB")
    download: int | None = argument("BYTES", "most bytes that a device may download per round")
    time: float | None = argument("TIME", "time limit for all rounds, such as 10m")
    epsilon: float | None = argument("E", "privacy budget of all rounds together; noise is calibrated to it")
    delta: float | None = argument("D", "probability that the privacy loss exceeds epsilon, such as 1e-6")
    statistics: str | None = argument(
        "RULE",
        "running statistics of norm layers: averaged, local or frozen (default: as the job's Local says, else averaged, with "
        "--epsilon frozen)",
        choices=tuple(map(str, StatisticsRule)),
    )
    ledger: str | None = argument(
        "FILE", "privacy ledger of these people, shared by all runs on their records (default: one in the run's folder)"
    )
    ledger_epsilon: float | None = argument(
        "E", "privacy budget of all runs on the ledger together; it is stored there"
    )
    insecure_seed: int | None = argument("N", "for tests: derive the noise from this number, so NOTHING IS PRIVATE")
    every: int | None = argument("N", "evaluate the model every so many rounds (default: ten times in all)")
    processes: int | None = argument(
        "N", "processes that simulate devices (default: one a core); the result is the same"
    )

    @classmethod
    def parsed(cls, written: Mapping[str, Any]) -> FederateOptions:
        """Parse the user's values, by field name; impossible ones are refused."""
        budget = parsed_budget(written)
        if written["statistics"] not in (None, *StatisticsRule):
            raise Mistake(f"--statistics {written['statistics']}: give one of {', '.join(StatisticsRule)}")
        if budget.epsilon is not None:
            require("private")
        return cls(
            **{name: whole(f"--{name.replace('_', '-')}", written[name], 1) for name in WHOLE},
            upload=budget.up,
            download=budget.down,
            time=budget.seconds,
            epsilon=budget.epsilon,
            delta=budget.delta,
            statistics=written["statistics"],
            ledger=written["ledger"] and os.path.realpath(written["ledger"]),
            ledger_epsilon=above_zero("--ledger-epsilon", written["ledger_epsilon"]),
            insecure_seed=whole("--insecure-seed", written["insecure_seed"], 0),
        )

    @property
    def budget(self) -> Budget:
        return Budget(up=self.upload, down=self.download, seconds=self.time, epsilon=self.epsilon, delta=self.delta)

    def check_private(self) -> None:
        """For training: refuse privacy options without an epsilon."""
        for name in PRIVATE:
            if (value := getattr(self, name)) is not None and self.epsilon is None:
                raise Mistake(
                    f"--{name.replace('_', '-')} {value} goes with --epsilon: without it nothing is private, and no ledger is "
                    f"kept"
                )


def parsed_budget(written: Mapping[str, Any]) -> Budget:
    budget = Budget.parse(
        up=written["upload"],
        down=written["download"],
        seconds=written["time"],
        epsilon=written["epsilon"],
        delta=written["delta"],
    )
    if budget.epsilon is not None and budget.delta is None:
        raise Mistake(
            f"--epsilon {written['epsilon']} is a privacy loss at a chance of a greater one: give --delta too, below one in the "
            f"number of clients, such as --delta 1e-6"
        )
    if budget.epsilon is None and budget.delta is not None:
        raise Mistake(f"--delta {written['delta']} goes with --epsilon: give both")
    if budget.delta is not None and not 0 < budget.delta < 1:
        raise Mistake(f"--delta {written['delta']}: give a chance above 0 and below 1, such as 1e-6")
    if budget.epsilon is not None and not budget.epsilon > 0:
        raise Mistake(f"--epsilon {written['epsilon']}: give a number above 0")
    return budget


def whole(flag: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).isdecimal() or not least <= int(value) < 1 << 63:
        raise Mistake(f"{flag} {value}: give a whole number, {least} or more")
    return int(value)


def above_zero(flag: str, value: Any) -> float | None:
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = nan
    if number is not None and not 0 < number < inf:
        raise Mistake(f"{flag} {value}: give a number above 0")
    return number


@dataclass(frozen=True)
class TaskOptions:
    """Options of tasks other than training; scripts call the functions of federated/tasks."""

    task: str = argument(
        "",
        "what devices do: train (default), evaluate models on records that they hold out, tune settings of their own "
        "training, or compare two models (A/B); --per-round says how many are asked (default: all)",
        "train",
        choices=("train", "evaluate", "tune", "compare"),
        command_only=True,
    )
    model: tuple[str, ...] | None = argument(
        "RUN",
        "a run whose last weights are evaluated, tuned or compared; may be repeated (default: the job's initial weights)",
        repeated=True,
        command_only=True,
    )
    settings: str | None = argument(
        "GRID", 'settings of devices\' own training to try, such as "lr=0.01,0.1 epochs=1,2"', command_only=True
    )
    as_is: bool = argument("", "evaluate the models as they are, without training on devices", False, command_only=True)
    halving: bool = argument(
        "", "tune by halves: all settings on few devices, the better half on more", False, command_only=True
    )
    apart: bool = argument(
        "", "compare on two halves of the devices, instead of both models on all of them", False, command_only=True
    )
    least: int | None = argument(
        "N", "release no result about fewer devices than this (default 10)", read=int, command_only=True
    )


@dataclass(frozen=True)
class FederateCommand:
    job: str = argument(
        "job", "a Python file with `def job(...) -> Job(clients=...)`, or the name of a built-in job", positional=True
    )
    asked: FederateOptions = group(FederateOptions)
    seed: int | None = argument("N", "seed of all random numbers, instead of the job's")
    use: tuple[str, ...] | None = argument(
        "TECHNIQUE",
        'exactly these techniques instead of choosing, such as "FedAdam(lr=0.01)"; may be repeated',
        repeated=True,
    )
    plan_only: bool = argument("", "show the plan and stop", False, command_only=True)
    verify: bool = argument(
        "", "compare a few rounds with the plain sequential loop: are the weights the same?", False, command_only=True
    )
    run: RunOptions = group(RunOptions)
    tasks: TaskOptions = group(TaskOptions)
