"""The store through which the machines of a group talk: node 0 hosts it, or torchrun's agent does."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shoestring.core.errors import Mistake
from shoestring.core.units import seconds_text
from shoestring.processes.nodes import Nodes

PAUSE = 0.5  # seconds between two attempts to reach node 0


def host_store(nodes: Nodes) -> tuple[Store, int]:
    """The store that this machine hosts, and its port. If all processes are on one machine, other machines can't
    connect."""
    outside = nodes.of > 1 and not nodes.host.startswith("127.") and nodes.host != "localhost"
    try:
        listening = socket.create_server(
            ("" if outside else "127.0.0.1", 0 if nodes.torchrun else nodes.port), backlog=1024
        )
    except OSError as error:
        why = (
            "is in use here, by another run or program"
            if error.errno == errno.EADDRINUSE
            else f"can't be used ({error.strerror})"
        )
        raise Mistake(f"port {nodes.port} {why}: take another one, the same in --nodes on every machine") from error
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    ), port


def connect_store(host: str, port: int, nodes: Nodes, come: float) -> Store:
    """The store that node 0 hosts, as soon as it can be reached."""
    until = time.monotonic() + come
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        except socket.gaierror as error:
            raise Mistake(f"{host} is no machine that this one knows ({error.strerror}): check --nodes") from error
        except (OSError, RuntimeError) as error:
            if time.monotonic() > until:
                raise Mistake(
                    f"node 0 of {nodes.of} could not be reached at {host}:{port} within {seconds_text(come)} ({error}): "
                    f"give the same command there, with rank 0, and let port {port} through its firewall"
                ) from error
            time.sleep(PAUSE)


def give_up_after(seconds: float, port: int) -> None:
    """Let the kernel end connections to a port whose other side has not answered for so long. A store has no deadline
    of its own, and a cut cable sends nothing."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as one:
                    if (
                        one.type == socket.SOCK_STREAM
                        and one.family in (socket.AF_INET, socket.AF_INET6)
                        and one.getpeername()[1] == port
                    ):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def torchrun_store(nodes: Nodes, come: float) -> Store:
    """The store of torchrun's agent, through which its processes find each other."""
    return TCPStore(nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=come))


def torchrun_key(nodes: Nodes) -> str:
    """The key under which node 0 writes its own port there; a new one for each of torchrun's attempts."""
    return f"shoestring/{nodes.attempt}"


def interface(host: str, port: int) -> str:
    """The network interface that leads from this machine to another, for workers to use."""
    import fcntl
    import struct

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        own = asking.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""
