"""Machines that train together, as the user names them: where they meet, which one this is, and how many there are.

    --nodes 10.0.0.1:29400,0/2      on the first of two machines, which has that address
    --nodes 10.0.0.1:29400,1/2      on the second

Inside torchrun or SLURM every process counts as a machine with one worker; its place is read from the environment that
they set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoestring.core.errors import Mistake
from shoestring.core.units import parse_seconds

LEAST = 2  # smallest patience in seconds
WRITTEN = (
    "write host:port,rank/of: 10.0.0.1:29400,0/2 on the machine with that address and 10.0.0.1:29400,1/2 on the other"
)


@dataclass(frozen=True)
class Nodes:
    host: str = "127.0.0.1"  # address of node 0, where all meet
    port: int = 0  # 0: a free one
    rank: int = 0  # this machine's number
    of: int = 1  # number of machines
    torchrun: bool = False  # the port is that of torchrun's store, in which node 0 writes its own address
    attempt: str = "0"  # number of torchrun's attempt
    device: int | None = None  # the GPU of this process, if somebody else assigned it

    def __str__(self) -> str:
        return f"node {self.rank} of {self.of}"


@dataclass(frozen=True)
class Team:
    """The workers of a job: how many, where, and how failures are handled."""

    devices: int = 1  # workers on this machine
    nodes: Nodes | None = None  # None: only this machine
    patience: float = 30.0  # seconds without a sign of life after which a worker counts as hanging
    restarts: int = 10  # largest number of restarts

    @property
    def world(self) -> int:
        """Workers on all machines, if each has as many."""
        return self.devices * (self.nodes.of if self.nodes else 1)


def team_of(devices: int, nodes: str | None, patience: str, restarts: int, environment: Mapping[str, str]) -> Team:
    """The team that the user asked for, or that torchrun or SLURM started this process as a part of."""
    seconds = parse_seconds(patience)
    if devices < 1:
        raise Mistake(f"--devices {devices}: training needs at least one")
    if seconds < LEAST:
        raise Mistake(
            f"--patience {patience}: a worker gives a sign of life twice a second, and may be late: take {LEAST}s or more"
        )
    if restarts < 0:
        raise Mistake(f"--restarts {restarts}: take 0 to end at the first death, or how often to go on after one")
    place = parse_nodes(nodes) if nodes else surrounding_nodes(environment)
    if place is not None and place.of == 1:
        place = None
    if place is not None and not nodes and devices > 1:
        raise Mistake(
            f"--devices {devices} inside torchrun or SLURM, where every process is one worker already: leave --devices out, "
            f"or start one process a machine and give --nodes host:port,rank/of"
        )
    return Team(devices, place, seconds, restarts)


def parse_nodes(text: str) -> Nodes:
    """
    >>> parse_nodes("10.0.0.1:29400,1/2")
    Nodes(host='10.0.0.1', port=29400, rank=1, of=2, torchrun=False, attempt='0', device=None)
    """
    found = re.fullmatch(r"(\S+):(\d+),(\d+)/(\d+)", text.strip())
    if found is None:
        raise Mistake(f"--nodes {text}: {WRITTEN}")
    host, port, rank, of = found[1], int(found[2]), int(found[3]), int(found[4])
    if not 0 < port < 65536:
        raise Mistake(f"--nodes {text}: {port} is no port; take one between 1024 and 65535")
    if not rank < of:
        raise Mistake(
            f"--nodes {text}: there is no machine {rank} of {of}, they are counted from 0 to {max(of - 1, 0)}"
        )
    return Nodes(host, port, rank, of)


def surrounding_nodes(environment: Mapping[str, str]) -> Nodes | None:
    """This process's place if torchrun or SLURM started it, else None.

    >>> surrounding_nodes({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-09,11]", "SLURM_JOB_ID": "12"}).host
    'gpu07'
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        of, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
        return Nodes(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            rank,
            of,
            torchrun=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            device=whole(environment.get("LOCAL_RANK")),
        )
    of = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    if "SLURM_PROCID" in environment and of > 1:
        listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        return Nodes(
            first_host(listed),
            20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000,
            int(environment["SLURM_PROCID"]),
            of,
            device=whole(environment.get("SLURM_LOCALID")),
        )
    return None


def whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def first_host(listed: str) -> str:
    """The first host in SLURM's short form of a list: a[01-03,7],b -> a01."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?", listed)
    if found is None:
        raise Mistake(
            f"SLURM names no host to meet at (SLURM_JOB_NODELIST is {listed!r}): give --nodes host:port,rank/of"
        )
    return found[1] + (found[2] or "")
