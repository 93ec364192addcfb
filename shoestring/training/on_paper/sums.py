"""What workers of a described cluster take to add up or gather numbers, in rings (Patarasuk and Yuan 2009; NCCL's default for large ones).

`inside` is how many of a group's members stand in one machine. A ring leaves and enters every machine, once for each of its members there,
because every device has its own way out: so a group with eight members a machine has eight times the network of a group with one.
"""

from __future__ import annotations

from shoestring.training.on_paper.machines import Machines


def ring(machines: Machines, members: int, inside: int) -> tuple[float, float]:
    """(bytes per second through each member, seconds for each of a ring's members - 1 turns)."""
    if members <= inside:
        return machines.link, machines.latency
    between = members // max(inside, 1)  # machines: their turns wait for the network, the others for the link
    turn = (between * machines.network_latency + (members - between) * machines.latency) / members
    return min(machines.link, inside * machines.network), turn


def gathered(machines: Machines, members: int, inside: int, whole: float) -> float:
    """Seconds until all have the `whole` bytes of which each had a part; as many to add up and keep a part (reduce-scatter)."""
    if members < 2:
        return 0.0
    speed, turn = ring(machines, members, inside)
    return (members - 1) * (whole / members / speed + turn)


def summed(machines: Machines, members: int, inside: int, whole: float) -> float:
    """Seconds until all have the sum of `whole` bytes."""
    return 2 * gathered(machines, members, inside, whole)


def sent(machines: Machines, size: float, same_machine: bool) -> float:
    """Seconds of `size` bytes from one device to another."""
    return (
        size / machines.link + machines.latency if same_machine else size / machines.network + machines.network_latency
    )
