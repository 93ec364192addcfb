"""Find which values that cross a cut get a gradient back, from autograd's graph of one forward and loss.

A value that requires a gradient need not get one: the model may detach it later, or use it without gradients. A stage
must know that before it waits, and a weight must not get zeros in place of a missing gradient, because weight decay and
momentum would then move it.

    cut c       nodes that were made after it, and that the loss reaches, belong to later stages
    a value     gets a gradient over the cut if one of these nodes passes it one

A function with its own backward (a checkpoint with use_reentrant=True) computes without gradients and gives its result
one when it ends. Its node was made when it began, but belongs where it ended: the blocks that it called, and cuts
before them, lie in between.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shoestring.core.private import next_node_number, sequence_number, unseen_functions

K = TypeVar("K")
Edge = tuple[Node, int]  # a node, and the index of one of its outputs


class GradientFlow(Generic[K]):
    """The autograd graph of one forward, as it is at every cut. Values are identified by keys."""

    def __init__(self) -> None:
        self.alive: dict[K, weakref.ref[Tensor]] = {}
        self.cuts: list[
            tuple[int, dict[K, Edge]]
        ] = []  # per cut: the number of the next node, and the edges at which gradients of values would arrive
        self.without: dict[K, int] = {}  # values made without a gradient -> number of cuts before them
        self.ended: dict[Node, int] = {}  # nodes of functions that later gave such values one -> cuts before they ended
        self.within: set[int] = set()  # cuts inside such functions that gradients reach, found on the way

    def note(self, key: K, value: Tensor) -> None:
        self.alive[key] = weakref.ref(value)
        if not value.requires_grad:
            self.without[key] = len(self.cuts)

    def note_use(self, key: K, value: Tensor) -> None:
        if value.requires_grad and key in self.without:
            node, _ = edge_of(value)
            self.ended[node] = max(self.without[key], self.ended.get(node, 0))

    def note_cut(self) -> None:
        values = [(key, value) for key, kept in self.alive.items() if (value := kept()) is not None]
        self.alive = {key: self.alive[key] for key, _ in values}
        found = {
            key: edge_of(value) for key, value in values if value.requires_grad
        }  # a view that was written to gets a new node here
        self.cuts.append((next_node_number(), found))

    def values_with_gradient(self, loss: object) -> list[set[K]]:
        """For every cut, the values that get a gradient over it."""
        edges: set[Edge] = set()
        seen: set[Node] = set()
        begins = [begin for begin, _ in self.cuts]
        waiting: list[list[Node]] = [[] for _ in range(len(begins) + 1)]  # nodes by the number of cuts before them

        def hand_to(node: Node, output: int, last: int) -> None:
            edges.add((node, output))
            if node not in seen:
                seen.add(node)
                began = bisect_right(begins, sequence_number(node))
                ended = max(began, self.ended.get(node, 0))
                self.within.update(range(began, ended))
                waiting[min(ended, last)].append(node)

        if isinstance(loss, Tensor) and loss.requires_grad:
            hand_to(*edge_of(loss), len(begins))
        found: list[set[K]] = []
        for place in range(len(begins), -1, -1):  # from nodes after the last cut to nodes before the first
            while waiting[place]:
                for node, output in waiting[place].pop().next_functions:
                    if node is not None:
                        hand_to(node, output, place)
            if place:
                found.append({key for key, edge in self.cuts[place - 1][1].items() if edge in edges})
        return found[::-1]


def edge_of(value: Tensor) -> Edge:
    with unseen_functions():  # inspecting a value must not count as a use
        edge: GradientEdge = get_gradient_edge(value)
    return edge.node, edge.output_nr
