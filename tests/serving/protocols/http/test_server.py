"""The whole server as a process: it drains, stops, dies, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from shoestring.serving.replicas.happenings import ModelSwapped, ServedFigures, ServerStarted, ServerStopped
from tests.serving.serving import serving
from tests.serving.tiny import GATED, spec
from tests.waiting import HUNG, Gates, until, until_gone

pytestmark = pytest.mark.usefixtures("warm_workers")

PROGRAM = """# warm
import sys
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.server import serve
from tests.serving.tiny import spec

def begun(server):
    pool = server.repository.pools["tiny"]
    print(server.port, pool.generation.handle.process.pid, *(line.pid for line in pool.lines), flush=True)

serve({"tiny": spec(gate=sys.argv[1], replicas=2)}, ServerConfig(port=0), lambda one: print(type(one).__name__, flush=True), begun)
"""


class ServerProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.lines = iter(process.stdout)
        self.until("ServerStarted")
        self.port, *self.pids = map(int, next(self.lines).split())

    def until(self, word: str) -> None:
        for line in self.lines:
            if line.strip() == word:
                return
        raise AssertionError(f"it ended and never said {word}")

    def total(self, *numbers: float) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HUNG)
        tensor = {"name": "x", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
        connection.request("POST", "/v2/models/tiny/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        found = json.loads(answer.read())
        return answer.status, found["outputs"][1]["data"] if answer.status == 200 else found["error"]


@contextmanager
def running(gate: Path) -> Iterator[ServerProcess]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(gate)], stdout=subprocess.PIPE, text=True)
    try:
        yield ServerProcess(process)
    finally:
        process.kill()
        process.communicate()


def test_a_signal_drains_and_what_was_accepted_is_answered(tmp_path: Path) -> None:
    with Gates(tmp_path, 0) as gates, running(tmp_path / "gate-0") as server, ThreadPoolExecutor() as threads:
        asked = threads.submit(server.total, GATED, 4.0)
        until(lambda: b"batch_tokens" in metrics(server) and waits_for_gate(tmp_path / "gate-0", server), "the batch")
        server.process.send_signal(signal.SIGTERM)
        server.until("ServerDraining")
        with pytest.raises(ConnectionRefusedError):
            server.total(1.0)
        gates.open(0)
        assert asked.result(HUNG) == (200, [2 * (GATED + 4.0)])
        assert server.process.wait(HUNG) == 0
        for pid in server.pids:
            until_gone(pid)


def test_a_second_signal_stops_at_once_and_the_client_is_told(tmp_path: Path) -> None:
    with Gates(tmp_path, 0), running(tmp_path / "gate-0") as server, ThreadPoolExecutor() as threads:
        asked = threads.submit(server.total, GATED, 4.0)
        until(lambda: waits_for_gate(tmp_path / "gate-0", server), "the batch")
        server.process.send_signal(signal.SIGTERM)
        server.until("ServerDraining")
        server.process.send_signal(signal.SIGINT)
        status, said = asked.result(HUNG)
        assert status == 503 and "is not served any more" in said
        assert server.process.wait(HUNG) == 0
        for pid in server.pids:
            until_gone(pid)


def test_children_end_with_a_front_that_is_killed_also_within_a_batch(tmp_path: Path) -> None:
    with Gates(tmp_path, 0), running(tmp_path / "gate-0") as server, ThreadPoolExecutor() as threads:
        asked = threads.submit(server.total, GATED, 4.0)
        until(lambda: waits_for_gate(tmp_path / "gate-0", server), "the batch")
        server.process.kill()
        for pid in server.pids:
            until_gone(pid)
        with pytest.raises(OSError):
            asked.result(HUNG)


def metrics(server: ServerProcess) -> bytes:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=HUNG)
    connection.request("GET", "/metrics")
    return connection.getresponse().read()


def waits_for_gate(gate: Path, server: ServerProcess) -> bool:
    """Whether a replica has opened the gate's file, whose lock we hold."""
    for pid in server.pids[1:]:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if file.readlink() == gate:
                    return True
            except OSError:
                continue
    return False


def test_a_swap_and_figures_are_told_and_requests_go_on() -> None:
    told: list[Any] = []
    with serving({"tiny": spec(2.0)}, told, figures_every=1e-3) as served:
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}

        def asked() -> float:
            return float(served.ask("/v2/models/tiny/infer", {"inputs": [tensor]}).json["outputs"][0]["data"][0])

        assert asked() == 2.0
        served.run(served.server.swap("tiny", spec(7.0)))
        assert asked() == 7.0
        until(lambda: sum(one.requests for one in told if isinstance(one, ServedFigures)) == 2)
    assert (
        isinstance(told[1], ServerStarted)
        and told[1].token == ""
        and any(isinstance(one, ModelSwapped) for one in told)
    )
    assert isinstance(told[-1], ServerStopped) and told[-1].unanswered == 0
