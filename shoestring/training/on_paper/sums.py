"""Seconds of collectives between workers of a described cluster, as rings (Patarasuk and Yuan 2009; NCCL's default for
large messages).

`inside` is how many of a group's members are in one machine. A ring leaves and enters every machine once for each of
its members there, because every device has its own network port: a group with eight members per machine has eight times
the network of a group with one.
"""

from __future__ import annotations

from shoestring.training.on_paper.machines import Machines


def ring(machines: Machines, members: int, inside: int) -> tuple[float, float]:
    """(bytes per second through each member, latency of each of the ring's members - 1 rounds)."""
    if members <= inside:
        return machines.link, machines.latency
    between = members // max(inside, 1)  # machines: their rounds use the network, the others the link
    turn = (between * machines.network_latency + (members - between) * machines.latency) / members
    return min(machines.link, inside * machines.network), turn


def all_gather_seconds(machines: Machines, members: int, inside: int, whole: float) -> float:
    """Seconds to all-gather `whole` bytes, or to reduce-scatter them."""
    if members < 2:
        return 0.0
    speed, turn = ring(machines, members, inside)
    return (members - 1) * (whole / members / speed + turn)


def all_reduce_seconds(machines: Machines, members: int, inside: int, whole: float) -> float:
    """Seconds to all-reduce `whole` bytes."""
    return 2 * all_gather_seconds(machines, members, inside, whole)


def send_seconds(machines: Machines, size: float, same_machine: bool) -> float:
    """Seconds to send `size` bytes from one device to another."""
    return (
        size / machines.link + machines.latency if same_machine else size / machines.network + machines.network_latency
    )
