"""Which values that cross a cut get a gradient back, read off autograd's graph of one forward and loss.

That a value asks for a gradient does not say that one comes: the model may detach it later, or use it without gradients. A stage must know
before it waits, and a weight that no gradient reaches has none (not zeros, which weight decay and momentum would move).

    cut c       nodes that were made after it, reached from the loss, belong to later stages
    a value     gets a gradient over the cut if one of these nodes hands it one
"""
from __future__ import annotations

import weakref
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shoestring.core.private import made_at, next_node_number, unseen_functions

K = TypeVar("K")
Edge = tuple[Node, int]   # a node, and which of its outputs


class GradientFlow(Generic[K]):
    """The graph of one forward, as it is at every cut. Values have keys."""

    def __init__(self) -> None:
        self.alive: dict[K, weakref.ref[Tensor]] = {}
        self.cuts: list[tuple[int, dict[K, Edge]]] = []   # the number of the next node, and where gradients of values would arrive

    def note(self, key: K, value: Tensor) -> None:
        self.alive[key] = weakref.ref(value)

    def note_cut(self) -> None:
        values = [(key, value) for key, kept in self.alive.items() if (value := kept()) is not None]
        self.alive = {key: self.alive[key] for key, _ in values}
        found = {key: edge_of(value) for key, value in values if value.requires_grad}   # a view that was written to gets a new node here
        self.cuts.append((next_node_number(), found))

    def reached(self, loss: object, weights: Mapping[str, Tensor]) -> tuple[list[set[K]], frozenset[str]]:
        """Of every cut, the values that get a gradient over it; and the names of weights that get one at all."""
        edges: set[Edge] = set()
        waiting: list[tuple[int, int, Node]] = []
        seen: set[Node] = set()

        def hand_to(node: Node, output: int) -> None:
            edges.add((node, output))
            if node not in seen:
                seen.add(node)
                heappush(waiting, (-made_at(node), len(seen), node))

        if isinstance(loss, Tensor) and loss.requires_grad:
            hand_to(*edge_of(loss))
        found: list[set[K]] = []
        for begin, values in [*reversed(self.cuts), (0, {})]:   # nodes are visited from the last that was made to the first
            while waiting and -waiting[0][0] >= begin:
                for node, output in heappop(waiting)[2].next_functions:
                    if node is not None:
                        hand_to(node, output)
            found.append({key for key, edge in values.items() if edge in edges})
        return found[-2::-1], frozenset(name for name, one in weights.items() if one.requires_grad and edge_of(one) in edges)


def edge_of(value: Tensor) -> Edge:
    with unseen_functions():   # to look at a value is not to use it
        edge: GradientEdge = get_gradient_edge(value)
    return edge.node, edge.output_nr
