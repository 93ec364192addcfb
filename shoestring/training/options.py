"""Options of `shoestring plan`, `train` and `verify`, and arguments of the library's functions of the same names.

Imports nothing heavy, so that a wrong flag is reported at once.
"""

from __future__ import annotations

from shoestring.core.command_line.arguments import argument, dataclass, group
from shoestring.core.errors import Mistake
from shoestring.core.exactness import ASKED, Exactness, allowed_levels, rename_hint
from shoestring.jobfile import Course
from shoestring.runs.options import RunOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shoestring.processes.nodes import Team
    from shoestring.training.technique import TrainingTechnique

JOB = "a Python file with `def job(...) -> Job`, or the name of a built-in job"


def level_name(text: str) -> str:
    """The level typed after --exact; for an earlier name, the error gives its present name."""
    if hint := rename_hint(text):
        from argparse import ArgumentTypeError

        raise ArgumentTypeError(hint)
    return text


@dataclass(frozen=True)
class PlanOptions:
    """What a plan must comply with."""

    memory: str | int | None = argument(
        "MEMORY",
        "memory limit of the training process, such as 600MiB; data-loading processes are not counted (default: what is free)",
    )
    use: tuple[TrainingTechnique | str, ...] | None = argument(
        "TECHNIQUE",
        'exactly these techniques instead of planning, such as "Checkpoint(every=2)"; may be repeated',
        repeated=True,
    )
    plan: str | None = argument("FILE", "replay a plan that was saved", command_only=True)
    fresh_plan: bool = argument(
        "",
        "measure again, instead of using measurements of earlier plannings of this job (after its data changed, for example)",
        False,
    )
    exact: str | None = argument(
        "",
        "required level of equivalence with plain training: "
        + ", ".join(f"{name} ({level.word})" for name, level in ASKED.items())
        + f" (default: {Exactness.ROUNDING.word} if such a plan fits, else {Exactness.DISTRIBUTION.word})",
        choices=tuple(ASKED),
        read=level_name,
    )
    inexact: bool = argument(
        "",
        f"allow weights that are {Exactness.CHANGED.word}: techniques that compute other numbers, such as bf16",
        False,
    )

    @property
    def budget(self) -> int | None:
        """Bytes; None: what is free."""
        from shoestring.core.units import budget_bytes

        return None if self.memory is None else budget_bytes(self.memory)

    @property
    def use_texts(self) -> tuple[str, ...] | None:
        """The requested techniques, as text."""
        if self.use is None:
            return None
        return tuple(one if isinstance(one, str) else text_of(one) for one in self.use)

    def check(self) -> None:
        """Refuse what can be refused without importing torch."""
        import os

        allowed_levels(self.exact, self.inexact)
        _ = self.budget
        if self.plan and self.use:
            raise Mistake("--plan and --use say two different things: give one of them")
        for one in self.use or ():
            if isinstance(one, str):
                from shoestring.planning.names import check_written

                check_written(one, "shoestring.training")
        if self.plan and not os.path.exists(self.plan):
            raise Mistake(
                f"there is no plan file {self.plan}; save one with: shoestring plan JOB --memory 2GiB --save {self.plan}"
            )


def text_of(technique: TrainingTechnique) -> str:
    from shoestring.core.technique import text

    return text(technique)


@dataclass(frozen=True)
class WorkerOptions:
    """How many workers train together, and on which machines."""

    devices: int = argument("N", "workers on this machine that train together (default 1)", 1, read=int)
    nodes: str | None = argument(
        "HOST:PORT,RANK/OF",
        "train with other machines: all give the same command, with their own rank; HOST has rank 0",
        command_only=True,
    )
    patience: str = argument(
        "TIME", "replace a worker that shows no sign of life for this long (default 30s)", "30s", command_only=True
    )
    restarts: int = argument(
        "N", "how often to restart after a worker died (default 10)", 10, read=int, command_only=True
    )

    def team(self, environment: Mapping[str, str]) -> Team:
        """The workers that train together, from the user's options or from the environment of torchrun or SLURM."""
        from shoestring.processes.nodes import team_of

        return team_of(self.devices, self.nodes, self.patience, self.restarts, environment)


@dataclass(frozen=True)
class PlanCommand:
    job: str = argument("job", JOB, positional=True)
    course: Course = group(Course)
    plan: PlanOptions = group(PlanOptions)
    workers: WorkerOptions = group(WorkerOptions)
    hardware: str | Path | None = argument("FILE", "plan for the cluster described in this file")
    save: str | None = argument("FILE", "save the chosen plan", command_only=True)


@dataclass(frozen=True)
class TrainCommand:
    job: str = argument("job", JOB, positional=True)
    course: Course = group(Course)
    plan: PlanOptions = group(PlanOptions)
    workers: WorkerOptions = group(WorkerOptions)
    run: RunOptions = group(RunOptions)
    replan: bool = argument(
        "", "resume --run with the plan that was made after it ran out of memory", False, command_only=True
    )
    tensorboard: bool = argument("", "write event files for TensorBoard into the run", False, command_only=True)

    def check(self) -> None:
        """Refuse what can be refused without importing torch."""
        self.plan.check()
        self.run.check(self.replan)


@dataclass(frozen=True)
class VerifyCommand:
    job: str = argument("job", JOB, positional=True)
    course: Course = group(Course)
    plan: PlanOptions = group(PlanOptions)
    check_steps: int = argument("N", "steps to compare (default 5)", 5, read=int)

    def check(self) -> None:
        self.plan.check()
        if self.check_steps < 1:
            raise Mistake(f"--check-steps {self.check_steps}: compare at least one step")


@dataclass(frozen=True)
class DoctorCommand:
    """The command has no options."""
