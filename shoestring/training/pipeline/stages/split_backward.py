"""A backward in two halves: first the gradients of inputs, which another worker waits for, later the gradients of
weights.

The gradient of a weight can be deferred if the weight is used once, by a node on a path to the inputs: the gradient
arriving at that node is kept, and the second half runs that node alone. All other weights (tied ones, a bias that all
layers share, weights that depend on no input) get their gradients in the first half, where autograd sums over all
paths. torch.distributed.pipelining splits backwards too; where a weight is used twice its gradients were silently wrong
(DeBERTa, by 1 %) or it failed (T5).

A checkpoint with use_reentrant=True runs a backward of its own within backward, which reaches all of its weights at
once, and torch refuses to run through one for some inputs only. A graph with such a node is not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

REENTRANT = f"{CheckpointFunction.__name__}Backward"  # torch's, and others' that are named after it


@dataclass
class DeferredGradient:
    """A node that computes the gradients of its weights in the second half."""

    node: Node
    weights: list[nn.Parameter]
    arrived: tuple[Tensor | None, ...] = ()  # gradients at the node, from the first half


@dataclass
class DeferredWeights:
    """The work that the first half leaves for the second."""

    done: list[tuple[nn.Parameter, Tensor]]  # gradients that could not be deferred
    later: list[DeferredGradient] = field(default_factory=list)


def goes_in_halves(root: Tensor) -> bool:
    """Whether autograd can run a graph for some inputs only."""
    assert root.grad_fn is not None, "it has a history"
    return all(node.name() != REENTRANT for node in users_of(root.grad_fn))


def to_inputs(root: Tensor, inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> DeferredWeights:
    """The first half, from a scalar; sets .grad of the inputs."""
    assert root.grad_fn is not None, "it has a history"
    users = users_of(root.grad_fn)
    alive = leading_to({get_gradient_edge(one).node for one in inputs}, users)
    later: dict[Node, DeferredGradient] = {}
    now = []
    for weight in weights:
        leaf = get_gradient_edge(weight).node
        if leaf not in users:
            continue  # this micro-batch does not use it
        node = separate_node(leaf, users)
        if node in (None, root.grad_fn) or node not in alive:  # the root passes received gradients on, only once
            now.append(weight)
        else:
            later.setdefault(node, DeferredGradient(node, [])).weights.append(weight)
    hooks = [one.node.register_prehook(keeping(one)) for one in later.values()]
    try:
        found = torch.autograd.grad(root, [*inputs, *now], retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for one, gradient in zip(inputs, found, strict=False):
        one.grad = gradient
    root.detach_()  # the graph between it and the nodes of `later` is not needed again
    return DeferredWeights(
        [
            (weight, gradient)
            for weight, gradient in zip(now, found[len(inputs) :], strict=True)
            if gradient is not None
        ],
        list(later.values()),
    )


def to_weights(rest: DeferredWeights) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The second half: weights and their gradients."""
    yield from rest.done
    while rest.later:
        one = rest.later.pop(0)  # its graph is freed with it
        edges = [
            (GradientEdge(one.node, place), gradient)
            for place, gradient in enumerate(one.arrived)
            if gradient is not None
        ]
        if edges:
            found = torch.autograd.grad(
                [edge for edge, _ in edges], one.weights, [gradient for _, gradient in edges], allow_unused=True
            )
            yield from (
                (weight, gradient) for weight, gradient in zip(one.weights, found, strict=True) if gradient is not None
            )


def keeping(one: DeferredGradient) -> Any:
    def keep(arrived: tuple[Tensor | None, ...]) -> None:
        one.arrived = arrived

    return keep


def users_of(top: Node) -> dict[Node, list[Node]]:
    """For every node below `top`, the nodes that pass gradients to it, once for every path."""
    found: dict[Node, list[Node]] = {}
    waiting, seen = [top], {top}
    while waiting:
        user = waiting.pop()
        for node, _ in user.next_functions:
            if node is not None:
                found.setdefault(node, []).append(user)
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
    return found


def leading_to(ends: set[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """The nodes from which gradients reach one of `ends`."""
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def separate_node(leaf: Node, users: dict[Node, list[Node]]) -> Node | None:
    """The node that computes a weight's gradient along with others: only nodes that pass it on, such as a
    transposition, lie between.
    None if the weight, or a node that passes it on, is used more than once."""
    node = leaf
    while len(users.get(node, ())) == 1:
        (node,) = users[node]
        if sum(one is not None for one, _ in node.next_functions) > 1:
            return node
    return None
