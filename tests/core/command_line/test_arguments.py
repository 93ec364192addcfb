"""What a command can be asked for is one dataclass: its flags and the library's arguments can't differ."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from inspect import Parameter, signature
from typing import Any

import pytest

import shoestring
from shoestring.commands.main import own_commands, parser
from shoestring.compression.arguments import CompressArguments
from shoestring.compression.distillation.options import DistillCommand, DistillOptions
from shoestring.core.command_line.arguments import add_flags, argument, dataclass, flat_arguments, group, options_of
from shoestring.core.command_line.command import named_object
from shoestring.core.errors import Mistake
from shoestring.runs.options import RunOptions
from shoestring.training.options import PlanOptions, TrainCommand

JOB = {"job"}  # what is trained, planned, ...: the first argument, which is positional on the command line, too
# Library functions -> what they take beside the options of their commands: objects that no flag can name, and flags of the job
BESIDE = {
    "plan": {"model", "here", "tell", "flags"},
    "train": {"plan", "model", "flags"},
    "verify": {"plan", "flags"},
    "distill": {"flags"},
    "federate": {"tell", "flags"},
    "compress": {"source", "out", "job", "model", "flags"},
    "serve": {"tell", "flags"},
    "load": set(),
}
NAMED = {"load": "load_test"}  # commands whose library function is called otherwise: `load` loads a model
COMMANDS_ONLY = {"doctor", "watch", "export"}
PLANNED = {name for name, _ in flat_arguments(PlanOptions)}  # given to `plan`, whose plan these functions take
ELSEWHERE = {"train": PLANNED, "verify": PLANNED, "compress": JOB}


def options_class(command: str) -> type[Any]:
    found: type[Any] = named_object(own_commands()[command].options)
    return found


@pytest.mark.parametrize("command", BESIDE)
def test_command_and_library_take_the_same_with_the_same_defaults(command: str) -> None:
    arguments = signature(library_function(command)).parameters
    asked = {
        name: one
        for name, one in flat_arguments(options_class(command))
        if not one.command_only and name not in ELSEWHERE.get(command, ())
    }
    assert set(arguments) - BESIDE[command] == set(asked)
    for name, one in asked.items():
        if not one.positional:
            assert arguments[name].default == (Parameter.empty if one.required else one.default), name


def test_fit_takes_what_plan_and_train_take() -> None:
    arguments = signature(shoestring.fit).parameters
    asked = {**dict(flat_arguments(PlanOptions)), **dict(flat_arguments(RunOptions))}
    for name, one in asked.items():
        assert one.command_only or arguments[name].default == one.default, name
    assert arguments["devices"].default == signature(shoestring.train).parameters["devices"].default


@pytest.mark.parametrize("command", list(own_commands()))
def test_every_field_is_a_flag_with_its_default_and_help(command: str) -> None:
    kind = options_class(command)
    flags = {action.dest: action for action in parser(own_commands(), command).below[command]._actions}
    for name, one in flat_arguments(kind):
        action = flags[name]
        assert one.help and action.help == one.help
        assert one.positional or action.default == (None if one.repeated else one.default), name


def test_every_command_is_a_library_function_or_needs_none() -> None:
    assert set(own_commands()) == {*BESIDE, *COMMANDS_ONLY}
    assert {NAMED.get(name, name) for name in BESIDE} <= set(shoestring.__all__)
    assert not COMMANDS_ONLY & set(shoestring.__all__)


def test_flags_are_read_back_as_fields() -> None:
    made = ArgumentParser()
    add_flags(made, CompressArguments)
    words = ["--size", "4KB", "--use", "Half()", "--use", "Decode()", "--newest"]
    asked = options_of(CompressArguments, vars(made.parse_args(words)))
    assert asked == CompressArguments(size="4KB", use=("Half()", "Decode()"), newest=True)
    assert asked.as_asked()["size"] == 4000 and asked.as_asked()["keep"] is False


def test_options_in_groups_are_flat_on_the_command_line() -> None:
    made = ArgumentParser()
    add_flags(made, DistillCommand)
    asked = options_of(
        DistillCommand, vars(made.parse_args(["net.py", "--teacher", "a", "--run", "r", "--steps", "3"]))
    )
    assert asked.training == TrainCommand(
        "net.py",
        course=replace(TrainCommand().course, steps="3"),
        run=RunOptions(run="r"),  # type: ignore[arg-type]
    )
    assert asked.teaching == DistillOptions(teacher=("a",))


def test_options_are_frozen_dataclasses_from_the_first_value_on() -> None:
    @dataclass(frozen=True)
    class Inner:
        depth: int = argument("N", "how deep", 2)

    @dataclass(frozen=True)
    class Outer:
        name: str | None = argument("NAME", "what it is called")
        inner: Inner = group(Inner)

    made = Outer("a", inner=Inner(depth=3))
    assert [one.name for one in fields(made)] == ["name", "inner"] and made != Outer("a") and Outer().inner == Inner(2)
    with pytest.raises(FrozenInstanceError):
        made.name = "b"  # type: ignore[misc]


def test_a_class_of_options_imports_no_dataclasses_before_its_first_value() -> None:
    code = (
        "import sys\nfrom shoestring.training.options import TrainCommand\nassert 'dataclasses' not in sys.modules\n"
        "made = TrainCommand('net.py')\nassert made.run.keep == 3 and 'dataclasses' not in sys.modules\n"
        "import dataclasses\nassert made == TrainCommand('net.py')\nassert dataclasses.replace(made, job='b').job == 'b'\n"
        "assert dataclasses.is_dataclass(made.run)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_run_is_asked_for_twice_is_refused() -> None:
    with pytest.raises(Mistake, match="name it with"):
        RunOptions(fresh=True).check()
    with pytest.raises(Mistake, match="give one of them"):
        RunOptions(run="r", fresh=True, adopt=True).check()
    with pytest.raises(Mistake, match="replan"):
        RunOptions().check(replan=True)


def test_signatures_name_every_argument() -> None:
    for command in BESIDE:
        kinds = [one.kind for one in signature(library_function(command)).parameters.values()]
        assert Parameter.VAR_POSITIONAL not in kinds


def library_function(command: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(shoestring, NAMED.get(command, command))
    return found
