"""How far apart two releases are: the fewest devices that any combination of their numbers is about.

A release has a number for each of its groups of devices, which are disjoint. Adding and subtracting numbers of two
releases cancels devices that are counted equally in both; the combination is about the others. Consider a graph with
the groups as nodes, where an edge weighs as many devices as its two groups share; devices in only one of the releases
connect their group to an extra node. Choosing which groups count equally cuts the graph, and the devices on cut edges
remain. So the answer is the smallest nonzero cut of the graph (Stoer, Wagner 1997, A simple min-cut algorithm, Journal
of the ACM 44), computed in every connected part.

    A = {1..30}, B = {31..60}    and later    C = {1..59}:    A + B - C is about device 60 alone
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

Devices = frozenset[bytes]
Graph = dict[Hashable, dict[Hashable, int]]  # node -> its neighbours, with the number of shared devices


def least_remainder(one: Sequence[Devices], other: Sequence[Devices], bound: int) -> int:
    """The fewest devices that any combination of two releases' numbers is about; at most `bound`. Each release's groups
    are disjoint.

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
        merge(graph, *heavy)  # a cut between these two is too heavy anyway
    return min((smallest_cut(part) for part in connected_parts(graph) if len(part) > 1), default=bound)


def shared_devices(one: Sequence[Devices], other: Sequence[Devices]) -> Graph:
    """The graph of two releases. Devices in only one release connect their group to the extra node (None)."""
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
    """The connected components of a graph."""
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
    """The weight of the lightest set of edges that disconnects a connected graph of two or more nodes."""
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
    """Merge two nodes into one."""
    for end, shared in graph.pop(gone).items():
        graph[end].pop(gone)
        if end != node:
            graph[node][end] = graph[end][node] = graph[node].get(end, 0) + shared
