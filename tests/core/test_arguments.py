"""What a command can be asked for is one dataclass: its flags and the library's arguments can't differ."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

import shoestring
from shoestring.commands import compress, federate
from shoestring.commands.parser import Parser
from shoestring.compression.arguments import CompressArguments
from shoestring.core.arguments import add_flags, written_by
from shoestring.federated.options import FederateOptions

ASKED = [(CompressArguments, shoestring.compress, compress), (FederateOptions, shoestring.federate, federate)]


@pytest.mark.parametrize(("kind", "door", "command"), ASKED)
def test_every_field_is_a_flag_and_an_argument_with_the_same_default(
    kind: type[Any], door: Callable[..., Any], command: Any
) -> None:
    parser = Parser()
    command.flags(parser)
    flags = {action.dest: action for action in parser.known.values()}
    arguments = signature(door).parameters
    for one in fields(kind):
        assert arguments[one.name].default == one.default
        assert flags[one.name].default == (None if one.metadata["repeated"] else one.default)


def test_flags_are_read_back_as_fields() -> None:
    parser = ArgumentParser()
    add_flags(parser, CompressArguments)
    words = ["--size", "4KB", "--use", "Half()", "--use", "Decode()", "--newest"]
    asked = CompressArguments(**written_by(CompressArguments, parser.parse_args(words)))
    assert asked == CompressArguments(size="4KB", use=("Half()", "Decode()"), newest=True)
    assert asked.as_asked()["size"] == 4000 and asked.as_asked()["keep"] is False
