"""Bytes that somebody else sends to the port of a group: the group goes on, and the terminal shows nothing of torch's insides."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import HUNG

CODE = f"""
import socket, struct
from shoestring.commands.main import main
try:
    main(["--version"])
except SystemExit:
    pass
from shoestring.processes.group.store import host_store
from shoestring.processes.nodes import Nodes

store, port = host_store(Nodes())
greeting = struct.pack("<BI", 0, 0x3C85F7CE)   # as a worker begins
too_long = bytes([1]) + struct.pack("<Q", 1 << 60)   # a key of 2**60 bytes
for data in (b"GET / HTTP/1.1\\r\\n\\r\\n", bytes([255]) * 64, greeting + bytes([255]) * 50, greeting + too_long):
    with socket.create_connection(("127.0.0.1", port), timeout={HUNG}) as line:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        try:
            line.recv(1)   # until torch hangs up
        except ConnectionResetError:
            pass
store.set("key", "value")
print(store.get("key"))
"""


@pytest.mark.slow  # a cold interpreter: torch reads how much it logs when it is imported
def test_garbage_on_the_port_of_a_group_is_not_shown_and_the_group_goes_on() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, encoding="utf-8", env=variables, timeout=HUNG
    )
    assert done.returncode == 0 and done.stdout.endswith("b'value'\n") and done.stderr == "", done.stderr
