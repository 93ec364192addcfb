"""How far two releases are apart: the least devices that any combination of their numbers is about.

A release has a number for every one of its groups of devices, which are disjoint. Adding and subtracting numbers of two
releases cancels the devices that are counted alike in both; the others are what the combination is about. The groups
are the nodes of a graph, and an edge weighs as many devices as its two groups share; devices of one release alone are
shared with nobody's node. Which groups count alike cuts the graph in parts, and the devices on cut edges remain. So the
least is the graph's smallest cut above 0 (Stoer, Wagner 1997, A simple min-cut algorithm, Journal of the ACM 44), which
is looked for in every connected part.

    A = {1..30}, B = {31..60}    and later    C = {1..59}:    A + B - C is about 60 alone
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

Devices = frozenset[bytes]
Graph = dict[Hashable, dict[Hashable, int]]  # node -> neighbours, with the devices that both have


def least_remainder(one: Sequence[Devices], other: Sequence[Devices], bound: int) -> int:
    """The fewest devices that a combination of two releases' numbers is about, or `bound` if they are as many or more.
    Each release's groups are disjoint.

    >>> def devices(begin, end): return frozenset(bytes([one]) for one in range(begin, end))
    >>> least_remainder([devices(0, 30), devices(30, 60)], [devices(0, 59)], 10)
    1
    >>> least_remainder([devices(0, 30), devices(30, 60)], [devices(0, 60)], 10)
    10
    """
    graph = shared_devices(one, other)
    while heavy := next(
        ((node, end) for node in graph for end, shared in graph[node].items() if shared >= bound), None
    ):
        merge(graph, *heavy)  # a cut between these two would be too heavy anyway
    return min((smallest_cut(part) for part in connected_parts(graph) if len(part) > 1), default=bound)


def shared_devices(one: Sequence[Devices], other: Sequence[Devices]) -> Graph:
    """The graph of two releases. A device of one release alone connects its group with the node of nobody (None)."""
    places: list[dict[bytes, Hashable]] = [
        {device: (side, number) for number, group in enumerate(groups) for device in group}
        for side, groups in enumerate((one, other))
    ]
    graph: Graph = defaultdict(lambda: defaultdict(int))
    for device in places[0].keys() | places[1].keys():
        ends = places[0].get(device), places[1].get(device)
        graph[ends[0]][ends[1]] += 1
        graph[ends[1]][ends[0]] += 1
    return graph


def connected_parts(graph: Graph) -> Iterable[Graph]:
    """The parts of a graph that no edge connects."""
    left = set(graph)
    while left:
        found: set[Hashable] = set()
        new = {next(iter(left))}
        while new:
            found |= new
            new = {end for node in new for end in graph[node]} - found
        left -= found
        yield {node: dict(graph[node]) for node in found}


def smallest_cut(graph: Graph) -> int:
    """The weight of the lightest edges without which a connected graph of two nodes or more falls apart."""
    graph, least = {node: dict(ends) for node, ends in graph.items()}, 1 << 62
    while len(graph) > 1:
        weight = dict.fromkeys(graph, 0)
        order: list[Hashable] = []
        while weight:
            node = max(weight, key=weight.__getitem__)
            cut = weight.pop(node)
            order.append(node)
            for end, shared in graph[node].items():
                if end in weight:
                    weight[end] += shared
        least = min(least, cut)
        merge(graph, order[-2], order[-1])
    return least


def merge(graph: Graph, node: Hashable, gone: Hashable) -> None:
    """Make one node of two."""
    for end, shared in graph.pop(gone).items():
        graph[end].pop(gone)
        if end != node:
            graph[node][end] = graph[end][node] = graph[node].get(end, 0) + shared
