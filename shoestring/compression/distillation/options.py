"""Options of a distillation: flags of `shoestring distill`, arguments of `shoestring.distill`, and flags of its job,
which its run stores. Imports nothing heavy.

    DistillOptions -> flags of distillation/job.py -> Request (stored, compared on resume) -> Job, in every process
"""

from __future__ import annotations

from shoestring.core.command_line.arguments import argument, dataclass, group
from shoestring.core.errors import Mistake
from shoestring.training.options import TrainCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FILES = ("unlabelled", "noise")  # may name a file, which is pinned


@dataclass(frozen=True)
class DistillOptions:
    """None: the default of the distillation job, which differs between peers and teachers."""

    teacher: tuple[str, ...] = argument(
        "RUN",
        "a run, or a job file with weights (big.py@weights.safetensors); several are an ensemble",
        (),
        repeated=True,
    )
    objective: str | None = argument(
        "OBJECTIVE",
        "the distillation loss: kl, reverse_kl, js, mse, cosine, hidden(MODULE=MODULE), or several: '0.5*kl + 0.5*mse' (default kl)",
    )
    temperature: float | None = argument("TEMPERATURE", "softmax temperature (default 2; 1 with --peers)")
    alpha: float | None = argument(
        "ALPHA",
        "weight of the distillation: loss = (1 - alpha) own + alpha distillation; 1: no labels are needed (default 0.1; 0.5 with --peers)",
    )
    axis: int | None = argument("AXIS", "class dimension of the outputs (default: the last)")
    passes: int | None = argument("PASSES", "a dropout ensemble: number of passes of every teacher with dropout on")
    peers: int | None = argument("PEERS", "no teacher: number of students that learn from each other")
    unlabelled: str | None = argument(
        "UNLABELLED", "a job file whose data are unlabelled batches for the student, of the same structure"
    )
    ratio: int | None = argument("RATIO", "unlabelled batches after each labelled one (default 1)")
    noise: str | None = argument(
        "NOISE", "noise on the student's batches only: a standard deviation, or a Python file with `def noise(batch)`"
    )
    layers: str | None = argument(
        "LAYERS", "the student keeps these blocks of the teacher's model, with their weights: every=2, or 0,2,5"
    )

    def check(self) -> None:
        if not self.teacher and self.peers is None:
            raise Mistake(
                "a distillation without a teacher: name a run with --teacher RUN, or let students learn from each other, --peers 2"
            )

    def flags(self, student: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of the distillation job for this student, whose own flags are `own`. Files and weights are pinned
        by their digests."""
        import shlex

        from shoestring.compression.distillation.job import FILE
        from shoestring.compression.distillation.sources import digest_of, flag_words, pin_file, pin_teacher
        from shoestring.jobfile import flags_of, value_of

        self.check()
        known = {flag.name: flag for flag in flags_of(FILE)}
        found: dict[str, Any] = {"student": shlex.join([f"{student}#{digest_of(student)}", *flag_words(own)])}
        if self.teacher:
            found["teacher"] = shlex.join(pin_teacher(one) for one in self.teacher)
        for name, value in vars(self).items():
            if value is not None and name != "teacher":
                found[name] = value_of(known[name], pin_file(str(value)) if name in FILES else str(value))
        return found


@dataclass(frozen=True)
class DistillCommand:
    training: TrainCommand = group(TrainCommand)
    teaching: DistillOptions = group(DistillOptions)
