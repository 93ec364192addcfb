"""Options of every command that keeps a run in a folder. Imports nothing heavy."""

from __future__ import annotations

from os.path import isdir, join

from shoestring.core.command_line.arguments import argument, dataclass
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from shoestring.runs.checkpoints.cadence import Cadence


@dataclass(frozen=True)
class RunOptions:
    run: str | Path | None = argument("DIR", "folder of the run; an existing run is resumed (default: runs/JOB-TIME)")
    fresh: bool = argument("", "start over in --run; what is there is renamed, not deleted", False)
    adopt: bool = argument("", "resume the run in --run although the job, the plan or the options changed", False)
    save_every: int | str = argument(
        "N",
        "save every so many steps or rounds (50) or so often (90s, 5m, 1h) (default 1m, and at most 3 %% of the time)",
        "1m",
    )
    keep: int = argument("K", "checkpoints to keep, beside the best one (default 3)", 3, read=int)
    report: str | None = argument("FILE", "also write the report page to this file", command_only=True)

    def check(self, replan: bool | None = None) -> None:
        """Refuse contradicting options; `replan`: whether a new plan was requested, for commands that allow that."""
        going_on = "--adopt" if replan is None else "--adopt and --replan"
        if (self.fresh or self.adopt or replan) and not self.run:
            about = "--fresh and --adopt" if replan is None else "--fresh, --adopt and --replan"
            raise Mistake(f"{about} are about a run that is there: name it with --run")
        if self.fresh and (self.adopt or replan):
            verb = "goes" if replan is None else "go"
            raise Mistake(f"--fresh begins anew, {going_on} {verb} on: give one of them")
        if self.report and isdir(self.report):
            raise Mistake(
                f"--report {self.report} is a folder: give the name of a file, such as {join(self.report, 'report.html')}"
            )

    @property
    def cadence(self) -> Cadence:
        from shoestring.runs.checkpoints.cadence import cadence_of

        return cadence_of(self.save_every, self.keep)
