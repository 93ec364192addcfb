"""Sum all workers' gradients in buckets while backward still runs.

A gradient is copied into its bucket when it is ready; a full bucket is sent. Buckets are sent in the order in which
backward fills them, last weights first, each after the one before it, so that all workers send the same buckets in the
same order whichever weights they used.
Weights that no worker used keep no gradient, as in plain training.
Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020, arXiv 2006.15704.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.workers.link import Link, Sending

BUCKET = 16 << 20  # bytes of gradients per message, unless one weight has more


class Bucket:
    """Weights whose gradients are sent together, flattened into one tensor whose length is a multiple of `multiple`."""

    def __init__(self, members: Sequence[nn.Parameter], multiple: int = 1, name: str = "") -> None:
        self.members, self.name = list(members), name
        self.offsets: dict[nn.Parameter, int] = {}
        size = 0
        for parameter in members:
            self.offsets[parameter] = size
            size += parameter.numel()
        self.full, self.size = size, -(-size // multiple) * multiple
        self.flat: Tensor | None = None  # the gradients, from the first one's arrival until they are sent
        self.here: set[nn.Parameter] = set()

    def view(self, parameter: nn.Parameter) -> Tensor:
        if self.flat is None:
            self.flat = parameter.data.new_empty(self.size)
            self.flat[self.full :] = 0.0
        return part_of(self.flat, self.offsets[parameter], parameter)

    @property
    def buffer(self) -> Tensor:
        assert self.flat is not None, "a bucket has memory from its first gradient on"
        return self.flat


def part_of(flat: Tensor, begin: int, parameter: nn.Parameter) -> Tensor:
    return flat[begin : begin + parameter.numel()].view(parameter.shape)


Send = Callable[[Bucket], Sending]  # starts to sum a bucket over all workers


def make_buckets(parameters: Iterable[nn.Parameter], most: int = BUCKET) -> list[list[nn.Parameter]]:
    """Weights in buckets of one dtype, from the last to the first."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(list(parameters)):
        if not groups or size + parameter.nbytes > most or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return groups


class Reducer:
    """The buckets of a run's trained weights."""

    def __init__(self, buckets: Sequence[Bucket], link: Link, send: Send, keeps_gradients: bool = True) -> None:
        self.buckets, self.link, self.send = buckets, link, send
        self.keeps_gradients = keeps_gradients  # whether gradients stay, as views of their bucket
        self.bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.members}
        self.used: set[nn.Parameter] = set()  # weights that got a gradient in this step
        self.sendings: list[Sending] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, buckets are sent as gradients arrive; at the end all are summed."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
            for parameter in self.bucket_of
            if parameter.requires_grad
        ]  # a weight frozen since then counts as unused
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.send_rest()

    def on_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None, "a gradient has just arrived"
        if parameter.grad.is_sparse:
            raise Mistake(
                "a weight has a sparse gradient, which can't be added up in buckets: make its embedding with sparse=False"
            )
        bucket = self.bucket_of[parameter]
        if parameter in bucket.here:  # a second gradient: its bucket may have been sent
            raise Mistake(
                "a weight's gradient came a second time in one backward, as it does where a weight is used both in a checkpoint "
                "with use_reentrant=True and somewhere else: make the model's checkpoints with use_reentrant=False"
            )
        view = bucket.view(parameter)
        view.copy_(parameter.grad)
        parameter.grad = view if self.keeps_gradients else None
        bucket.here.add(parameter)
        self.used.add(parameter)
        self.send_full()

    def send_full(self) -> None:
        """Send full buckets, in order."""
        while len(self.sendings) < len(self.buckets):
            bucket = self.buckets[len(self.sendings)]
            if len(bucket.here) < len(bucket.members):
                return
            self.sendings.append(self.send(bucket))
            if not self.keeps_gradients:
                bucket.flat = None

    def send_rest(self) -> None:
        """Send the remaining buckets, with zeros for unused weights, and wait for all."""
        for bucket in self.buckets[len(self.sendings) :]:
            for parameter in bucket.members:
                if parameter not in bucket.here:
                    view = bucket.view(parameter)
                    if parameter.grad is None:
                        view.zero_()
                    else:  # the gradient is of an earlier micro-batch
                        view.copy_(parameter.grad)
                        self.used.add(parameter)
                    parameter.grad = view if self.keeps_gradients else None
                    bucket.here.add(parameter)
            self.send_full()
        for sending in self.sendings:
            sending.wait()
        self.sendings.clear()
        for bucket in self.buckets:
            bucket.flat = None
            bucket.here.clear()

    def tally(self, loss: Tensor) -> tuple[Tensor, set[nn.Parameter]]:
        """The sum of the workers' losses, and the weights that no worker used in this step."""
        weights = list(self.bucket_of)
        own = torch.tensor([float(parameter in self.used) for parameter in weights])
        sums = torch.cat([loss.detach().reshape(1).float(), own.to(loss.device)])
        self.link.sum(sums).wait()
        used = (own if self.link.imagined else sums[1:]).tolist()
        self.used.clear()
        return sums[0].clone(), {parameter for parameter, count in zip(weights, used, strict=True) if not count}
