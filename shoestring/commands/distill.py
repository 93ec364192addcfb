"""shoestring distill: a student learns from a teacher. It is `shoestring train`, with its flags, of a job whose loss knows the teacher."""

from __future__ import annotations

import os

from shoestring.commands import DONE, train
from shoestring.commands.output import say, warn
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

name = "distill"
help = "train a student to say what its teachers say"

# Flags of the distillation's own job -> what they do
FLAGS = {
    "objective": "what is compared: kl, reverse_kl, js, mse, cosine, hidden(MODULE=MODULE), or several: '0.5*kl + 0.5*mse' (default kl)",
    "temperature": "outputs are divided by it before they become probabilities (default 2; 1 with --peers)",
    "alpha": "share of the teacher: loss = (1 - alpha) own + alpha distillation; 1: no labels are needed (default 0.1; 0.5 with --peers)",
    "axis": "dimension of the outputs in which classes lie (default the last)",
    "passes": "a dropout ensemble: so many passes of every teacher with dropout on",
    "peers": "no teacher: so many students that learn from each other",
    "unlabelled": "a job file whose data are unlabelled batches for the student, of the same structure",
    "ratio": "unlabelled batches after each labelled one (default 1)",
    "noise": "what the student alone sees: a standard deviation, or a Python file with `def noise(batch)`",
    "layers": "the student keeps these blocks of the teacher's model, with their weights: every=2, or 0,2,5",
}
FILES = ("unlabelled", "noise")  # flags that may name a file, which is pinned
STUDENT = "--student-"  # before a flag of the student that a flag of this command hides


def flags(parser: ArgumentParser) -> None:
    train.flags(parser)
    parser.add_argument(
        "--teacher",
        action="append",
        metavar="RUN",
        help="a run, or a job file with weights (big.py@weights.safetensors); several are an ensemble",
    )
    for flag, what in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=flag.upper(), help=what)


def run(options: Namespace) -> int:
    from argparse import Namespace

    from shoestring.core.imports import WithoutGarbageCollection
    from shoestring.jobfile import job_path, parsed_flags

    if not options.teacher and options.peers is None:
        raise Mistake(
            "a distillation without a teacher: name a run with --teacher RUN, or let students learn from each other, --peers 2"
        )
    student = job_path(options.job)
    own = parsed_flags(student, own_words(options, student), options.own_flags)
    with WithoutGarbageCollection():
        import json

        from shoestring.compression.distillation import job as distillation
        from shoestring.compression.distillation.sources import digest_of, pin_teacher
        from shoestring.runs.resume import new_folder
    words = [f"--student={student}#{digest_of(student)}", f"--student-flags={json.dumps(own)}"]
    if options.teacher:
        words.append(f"--teacher={json.dumps([pin_teacher(one) for one in options.teacher])}")
    for flag in FLAGS:
        value = vars(options)[flag]
        if value is not None:
            words.append(f"--{flag}={with_digest(value, digest_of) if flag in FILES else value}")
    stem = os.path.basename(student).removesuffix(".py")
    given = vars(options) | {
        "job": str(distillation.__file__),
        "job_words": words,
        "given": set(),
        "command": "train",
        "run": options.run or str(new_folder(f"{stem}-distilled")),
    }
    code = train.run(Namespace(**given))
    if code == DONE and options.peers is not None:
        say(options, f"written: {one_peer(given['run'])}, the weights of the first peer")
    return code


def own_words(options: Namespace, student: str) -> list[str]:
    """The words that are flags of the student's job; a flag that a flag of this command hides is given as --student-NAME."""
    from shoestring.jobfile import flags_of

    hidden = {flag.name.replace("_", "-") for flag in flags_of(student)} & {"teacher", *FLAGS}
    taken = [one for one in sorted(hidden) if f"--{one}" in options.given]
    warn(
        [
            f"--{one} is a flag of distill; that of {os.path.basename(student)} with the same name is {STUDENT}{one}"
            for one in taken
        ]
    )
    meant = {f"{STUDENT}{one}" for one in hidden}
    return [
        f"--{word.removeprefix(STUDENT)}" if word.partition("=")[0] in meant else word for word in options.job_words
    ]


def with_digest(value: str, digest_of: object) -> str:
    """A file with what it is known by; anything else as it is."""
    from shoestring.jobfile import BUILT_IN, job_path

    assert callable(digest_of), "a function of a path"
    path = job_path(value) if value in BUILT_IN else os.path.realpath(value)
    return f"{path}#{digest_of(path)}" if os.path.isfile(path) else value


def one_peer(run: str) -> str:
    """Write the weights of one peer beside the run, under the names that the student alone has."""
    from pathlib import Path

    from shoestring.compression.distillation.peers import first_peer
    from shoestring.core.files import draft_file
    from shoestring.runs.checkpoints import BEST, saved
    from shoestring.runs.export import best_weights, checkpoint_of, named_weights
    from shoestring.runs.folder import Folder
    from shoestring.runs.tensors import write_tensors

    folder = Folder(Path(run))
    checkpoint = best_weights(folder) if saved(folder.checkpoints, BEST) else checkpoint_of(folder, None)
    target = folder.path / "peer.safetensors"
    with draft_file(target) as draft:
        write_tensors(draft, first_peer(named_weights(checkpoint)), {"format": "pt"})
    return str(target)
