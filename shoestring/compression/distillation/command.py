"""shoestring distill: train a student towards a teacher. It is `shoestring train`, with the same flags, for a job whose
loss runs the teacher."""

from __future__ import annotations

import os

from shoestring.core.command_line.exit_codes import DONE
from shoestring.show.output import say, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.compression.distillation.options import DistillCommand
    from shoestring.core.command_line.command import Call

STUDENT = "--student-"  # prefix of a student's flag that one of this command hides


def run(asked: DistillCommand, call: Call) -> int:
    from shoestring.core.imports import WithoutGarbageCollection
    from shoestring.jobfile import flags_known, job_path, parse_flags, value_of
    from shoestring.training.commands.job_flags import AskedJob
    from shoestring.training.commands.train import train_in_folder

    asked.teaching.check()
    asked.training.check()
    student = job_path(asked.training.job)
    own = parse_flags(student, own_words(call, student), call.own_flags)
    known = {flag.name: flag for flag in flags_known(student)}
    course = {name: value_of(known[name], str(value)) for name, value in asked.training.course.values.items()}
    with WithoutGarbageCollection():
        from dataclasses import replace
        from pathlib import Path

        from shoestring.compression.distillation.job import FILE
        from shoestring.compression.distillation.library import one_peer
        from shoestring.runs.resume import new_folder
    flags = asked.teaching.flags(student, own) | course
    folder = asked.training.run.run or new_folder(f"{os.path.basename(student).removesuffix('.py')}-distilled")
    training = replace(asked.training, run=replace(asked.training.run, run=folder))
    code = train_in_folder(training, call, AskedJob(Path(FILE), flags))
    if code == DONE and asked.teaching.peers is not None:
        say(call, f"written: {one_peer(folder)}, the weights of the first peer")
    return code


def own_words(call: Call, student: str) -> list[str]:
    """The words that are flags of the student's job; a flag hidden by one of this command is written as --student-NAME."""
    from shoestring.compression.distillation.options import DistillOptions
    from shoestring.core.command_line.arguments import arguments_of
    from shoestring.jobfile import flags_of

    hidden = {flag.name.replace("_", "-") for flag in flags_of(student)} & set(arguments_of(DistillOptions))
    taken = [one for one in sorted(hidden) if f"--{one}" in call.given]
    warn(
        [
            f"--{one} is a flag of distill; that of {os.path.basename(student)} with the same name is {STUDENT}{one}"
            for one in taken
        ]
    )
    meant = {f"{STUDENT}{one}" for one in hidden}
    return [f"--{word.removeprefix(STUDENT)}" if word.partition("=")[0] in meant else word for word in call.words]
