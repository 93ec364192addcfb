"""The arguments of the command line: its commands and their flags. Nothing heavy is imported, so that help and a wrong flag are quick."""
from __future__ import annotations

import argparse
import os

from shoestring.core.errors import Mistake
from shoestring.core.exactness import ASKED, Exactness

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Formatter(argparse.HelpFormatter):
    """argparse's own imports a dozen modules to learn how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width())


def terminal_width() -> int:
    """Characters of a line of help."""
    try:
        return os.get_terminal_size().columns - 2
    except OSError:
        return 78


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=Formatter)

    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    top = Parser(prog="shoestring", description="Deep learning on a budget: your PyTorch model and your memory, "
                                                "the plan that meets it, and the proof.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (("plan", "what would it take: every technique costed, the best plan chosen and explained"),
                       ("train", "run that plan and show predicted beside measured"),
                       ("verify", "plain training and the plan side by side, from the same seed: the same weights?")):
        command = commands.add_parser(name, help=text, description=text, epilog="The job's own arguments are flags too; "
                                      "built-in jobs: gpt (a byte-level transformer on Python's own source), digits (a conv net)")
        command.add_argument("job", help="a Python file with `def job(...) -> Job`, or the name of a built-in job")
        command.add_argument("--memory", help="most bytes of the process, such as 600MiB (default: what is free)")
        command.add_argument("--use", action="append", metavar="TECHNIQUE",
                             help='exactly these techniques instead of planning, such as "Checkpoint(every=2)"; may be repeated')
        command.add_argument("--plan", metavar="FILE", help="replay a plan that was saved")
        command.add_argument("--exact", choices=list(ASKED), help="the least that the weights must be of those of plain training: "
                             + ", ".join(f"{name} ({level.word})" for name, level in ASKED.items())
                             + f" (default: {Exactness.ROUNDING.word} if such a plan fits, else {Exactness.DRAWS.word})")
        command.add_argument("--inexact", action="store_true",
                             help=f"allow weights that are {Exactness.CHANGED.word}: techniques that compute other numbers, such as bf16")
        if name in ("plan", "train"):
            command.add_argument("--devices", type=int, default=1, metavar="N",
                                 help="workers on this machine that train together (default 1)")
            command.add_argument("--nodes", metavar="HOST:PORT,RANK/OF",
                                 help="train with other machines: all give the same command, with their own rank; HOST has rank 0")
            command.add_argument("--patience", default="30s", metavar="TIME",
                                 help="without a sign of life for so long, a worker is replaced (default 30s)")
            command.add_argument("--restarts", type=int, default=10, metavar="N",
                                 help="how often to go on after a worker's death (default 10)")
        if name == "plan":
            command.add_argument("--hardware", metavar="FILE", help="plan for a cluster that this file describes and that need not be here")
            command.add_argument("--save", metavar="FILE", help="save the chosen plan")
        if name == "train":
            command.add_argument("--run", metavar="DIR", help="folder of the run; one that is there is resumed (default: runs/JOB-TIME)")
            command.add_argument("--fresh", action="store_true", help="begin anew in --run; what is there is kept aside")
            command.add_argument("--adopt", action="store_true", help="go on with what is in --run although the job or plan changed")
            command.add_argument("--replan", action="store_true", help="go on in --run with a plan made from what was measured there")
            command.add_argument("--save-every", metavar="N", default="1m",
                                 help="save every so many steps (50) or so often (90s, 5m, 1h) (default 1m, and at most 3 %% of the time)")
            command.add_argument("--keep", type=int, default=3, metavar="K", help="checkpoints to keep, beside the best one (default 3)")
            command.add_argument("--tensorboard", action="store_true", help="write event files for TensorBoard into the run")
            command.add_argument("--report", metavar="FILE", help="where to write the report page as well")
        if name == "verify":
            command.add_argument("--check-steps", type=int, default=5, metavar="N", help="steps to compare (default 5)")
        common(command)
    text = "a live page of runs: plan, memory, loss, events; says when a run died and where it stands"
    command = commands.add_parser("watch", help=text, description=text)
    command.add_argument("run", nargs="+", help="folders of runs, or a folder of such folders")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; another than this machine's own asks for a token")
    command.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    common(command)
    text = "the weights or the course of a run in other people's formats"
    command = commands.add_parser("export", help=text, description=text)
    command.add_argument("run", help="folder of a run")
    command.add_argument("--to", required=True, choices=["safetensors", "hf", "csv", "json"],
                         help="safetensors: the weights; hf: a folder for from_pretrained; csv: steps; json: all that happened")
    command.add_argument("--out", metavar="PATH", help="where to (default: RUN/export.KIND)")
    command.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest good one)")
    common(command)
    command = commands.add_parser("doctor", help="devices, memory, which dtypes really work, disk speed, what is missing",
                                  description="Looks at this machine and measures it anew.")
    common(command)
    return top


def common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    command.add_argument("--traceback", action="store_true", help="show where an error came from")
