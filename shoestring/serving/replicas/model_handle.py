"""The front's end of a model process: starts it, asks it for replicas, hears how it and they end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from shoestring.core.errors import Mistake
from shoestring.processes.launch import ending_text, error_stream
from shoestring.serving.replicas.facts import EngineFacts
from shoestring.serving.replicas.model_process import MOST_MESSAGE
from shoestring.serving.replicas.model_spec import ModelSpec

END = 5.0  # seconds in which a model process ends by itself


class ModelHandle:
    def __init__(self, spec: ModelSpec, alive: int, on_end: Callable[[str], None]) -> None:
        """`alive`: the reading end of a pipe that ends with this process. `on_end`: called once, if it ends unasked after loading."""
        self.spec, self.alive, self.on_end = spec, alive, on_end
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[EngineFacts] = self.loop.create_future()
        self.control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.forked = 0

    async def load(self) -> EngineFacts:
        """Start it and wait until it has loaded; a mistake if it can't."""
        self.start()
        timer = self.loop.call_later(
            self.spec.load_seconds, self.fail, f"it was not loaded within {self.spec.load_seconds:.0f} s"
        )
        try:
            return await self.loaded
        except BaseException:
            await self.close()
            raise
        finally:
            timer.cancel()

    def start(self) -> None:
        message = self.spec.load_message
        if len(message) > MOST_MESSAGE:
            raise Mistake(f"the arguments of a served model are {len(message):,} bytes: give at most {MOST_MESSAGE:,}")
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shoestring.serving.replicas.model_process"),
                    *(str(other.fileno()), str(os.getpid()), str(self.alive)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=error_stream(),
                env=os.environ | dict(self.spec.environment),
                pass_fds=(other.fileno(), self.alive),
                start_new_session=True,
            )
        self.control.setblocking(False)
        self.loop.add_reader(self.control, self.hear)
        with suppress(OSError):  # it died at once, which is heard
            self.control.send(message)

    def hear(self) -> None:
        assert self.control is not None, "it is heard while it is open"
        try:
            data = self.control.recv(MOST_MESSAGE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return self.on_closed()
        message = json.loads(data)
        if "loaded" in message and not self.loaded.done():
            self.loaded.set_result(EngineFacts.from_json(message["loaded"]))
        elif "failed" in message:
            self.fail(message["failed"])
        return None

    def fail(self, why: str) -> None:
        if not self.loaded.done():
            self.loaded.set_exception(Mistake(why))

    def on_closed(self) -> None:
        was_loaded = self.loaded.done() and not self.loaded.cancelled() and self.loaded.exception() is None
        self.forget_control()
        self.loop.create_task(self.reap(was_loaded))

    async def reap(self, was_loaded: bool) -> None:
        assert self.process is not None, "it was started"
        code = await self.loop.run_in_executor(None, self.process.wait)
        self.fail(ending_text(code))
        if was_loaded:
            self.on_end(ending_text(code))

    def forget_control(self) -> None:
        if self.control is not None:
            self.loop.remove_reader(self.control)
            self.control.close()
            self.control = None

    @property
    def is_open(self) -> bool:
        return self.control is not None

    def fork(self) -> socket.socket:
        """The line of a new replica. If the model process is gone, it ends at once."""
        line, other = socket.socketpair()
        self.forked += 1
        with other, suppress(OSError):
            if self.control is not None:
                socket.send_fds(self.control, [json.dumps({"fork": self.forked}).encode()], [other.fileno()])
        line.setblocking(False)
        return line

    async def close(self) -> None:
        """End it; its replicas end when their lines are closed."""
        self.forget_control()
        if self.process is None:
            return
        timer = self.loop.call_later(END if self.loaded.done() else 0, self.process.kill)
        await self.loop.run_in_executor(None, self.process.wait)
        timer.cancel()
