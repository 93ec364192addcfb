"""The server: models, doors and a socket. It sleeps until a socket, a timer of a request or a signal wakes it.

    serve({"tiny": ModelSpec(...)}, ServerConfig(port=8000), on_happening)     runs until it is asked to stop

The first signal drains: no new connections, what was accepted is answered, then it ends. The second one stops at once.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping

from uvicorn.server import ServerState

from shoestring.core.errors import Mistake
from shoestring.core.running.signals import STOP, is_ignored, restore_handlers
from shoestring.serving.protocols.front import Front
from shoestring.serving.protocols.http.app import application
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.connection import LimitedConnection, protocol_config
from shoestring.serving.protocols.http.guard import HttpGuard
from shoestring.serving.protocols.metrics import ServedCounts
from shoestring.serving.protocols.page import HEADERS
from shoestring.serving.replicas.happenings import (
    BatchComputed,
    Happening,
    ServerDraining,
    ServerStarted,
    ServerStopped,
)
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.replicas.repository import ModelRepository
from shoestring.web.guard import WILDCARDS, is_loopback
from shoestring.web.server import own_address

BACKLOG = 1024
OTHER_FILES = 256  # open files that are no connections
Told = Callable[[Happening], None]


class Server:
    def __init__(self, models: Mapping[str, ModelSpec], config: ServerConfig, tell: Told) -> None:
        if not models:
            raise Mistake("no model is to be served: give one or more")
        self.config, self.tell = config, tell
        self.counts = ServedCounts()
        self.repository = ModelRepository(models, config.memory, self.on_happening)
        self.token = (
            config.token
            if config.token is not None
            else ("" if is_loopback(config.host) else secrets.token_urlsafe(24))
        )
        self.state = ServerState()
        self.front: Front | None = None
        self.listener: asyncio.Server | None = None
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()

    def on_happening(self, one: Happening) -> None:
        self.counts.note(one)
        if not isinstance(one, BatchComputed):  # thousands a second: they are in the figures
            self.tell(one)

    async def start(self) -> None:
        """Listen, load the models that fit, then answer. A port in use is told before anything is loaded."""
        line = bound_socket(self.config)
        try:
            context = tls_context(self.config)
            raise_file_limit(self.config.most_connections + OTHER_FILES)
            self.front = Front(self.repository, self.config, self.counts, self.tell)
            guarded = HttpGuard(application(self.front), self.config, self.token, HEADERS)
            uvicorn = protocol_config(guarded, self.config)
            await self.load_models()
            loop = asyncio.get_running_loop()
            self.listener = await loop.create_server(
                lambda: LimitedConnection(uvicorn, self.state, self.config), sock=line, ssl=context, backlog=BACKLOG,
                ssl_handshake_timeout=self.config.request_seconds if context else None,
            )  # fmt: skip
        except BaseException:
            line.close()
            await self.repository.close()
            raise
        self.tell(ServerStarted("", self.url, self.token))

    async def load_models(self) -> None:
        """Those that are pinned and the first one; the others while they fit, the last ones with their first request."""
        names = list(self.repository.specs)
        pinned = [name for name in names if self.repository.specs[name].pinned]
        for name in dict.fromkeys([names[0], *pinned, *(names if self.config.memory is None else [])]):
            await self.repository.load(name)

    @property
    def port(self) -> int:
        assert self.listener is not None, "it listens"
        return int(self.listener.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        host = own_address() if self.config.host in WILDCARDS else self.config.host
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' * bool(self.config.certificate)}://{host}:{self.port}/" + (
            f"?token={self.token}" if self.token else ""
        )

    async def swap(self, name: str, spec: ModelSpec) -> None:
        """Answer with another model under this name from now on, without a failed request."""
        await self.repository.swap(name, spec)

    async def until_stopped(self) -> None:
        await self.stop.wait()
        drained = asyncio.ensure_future(self.drain())
        at_once = asyncio.ensure_future(self.stop_now.wait())
        await asyncio.wait([drained, at_once], timeout=self.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in (drained, at_once):
            one.cancel()
        await asyncio.gather(drained, at_once, return_exceptions=True)
        await self.close()

    async def drain(self) -> None:
        """Take no new connections, and answer what was accepted."""
        assert self.front is not None and self.listener is not None, "it was started"
        self.front.stop()
        self.listener.close()
        await asyncio.sleep(0)  # uvloop closes the socket at the end of a round of its loop
        self.tell(ServerDraining("", sum(one.is_answering for one in self.connections)))
        for one in self.connections:
            one.shutdown()
        while self.state.tasks:
            await asyncio.wait(set(self.state.tasks))
        await self.repository.drain()

    @property
    def connections(self) -> list[LimitedConnection]:
        return [one for one in list(self.state.connections) if isinstance(one, LimitedConnection)]

    async def close(self) -> None:
        unanswered = sum(one.is_answering for one in self.connections)
        if self.listener is not None:
            self.listener.close()
        await self.repository.close()
        if self.state.tasks:  # they say so to their clients
            await asyncio.wait(set(self.state.tasks), timeout=self.config.write_seconds)
        for one in self.connections:
            one.transport.close() if one.flow.write_paused is False else one.transport.abort()
        if self.front is not None:
            self.front.stop()
            self.front.close()
        self.tell(ServerStopped("", unanswered))

    def on_signal(self) -> None:
        (self.stop_now if self.stop.is_set() else self.stop).set()


def bound_socket(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    line = socket.socket(family)
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind((config.host, config.port))
        line.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        line.close()
        raise Mistake(
            f"can't listen on {config.host or 'all addresses'}, port {config.port} ({error}): give another --port, or 0 to have "
            f"a free one picked, and a --host of this machine"
        ) from error
    return line


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if not config.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.certificate, config.key)
    except (OSError, ValueError) as error:
        raise Mistake(
            f"{config.certificate} and {config.key} are no certificate and its key ({error}): give two PEM files"
        ) from error
    return context


def raise_file_limit(wanted: int) -> None:
    """Allow as many open files as connections need, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def serve_until_stopped(
    models: Mapping[str, ModelSpec], config: ServerConfig, tell: Told, begun: Callable[[Server], None]
) -> None:
    server = Server(models, config, tell)
    loop = asyncio.get_running_loop()
    in_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in STOP if in_main and not is_ignored(number)]
    for number in handled:
        loop.add_signal_handler(number, server.on_signal)
    try:
        starting = asyncio.ensure_future(server.start())
        stopped = asyncio.ensure_future(server.stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # asked to stop while models were loaded
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        stopped.cancel()
        starting.result()
        begun(server)
        await server.until_stopped()
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def serve(
    models: Mapping[str, ModelSpec],
    config: ServerConfig = ServerConfig(),
    tell: Told = lambda happened: None,
    begun: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve models until a signal asks to stop. `tell` hears what happens; `begun` gets the server, in its event loop."""
    with restore_handlers(), asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve_until_stopped(models, config, tell, begun))


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
