"""Gradients of all workers, added up in buckets while backward still runs.

A gradient that is there is copied into its bucket and becomes a view of it; a bucket that is full is sent. Buckets go in the order in
which backward fills them, last weights first, and each waits for those before it, so that all workers send the same things in the
same order whatever they used. Weights that nobody used keep no gradient, as in plain training.
Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020, arXiv 2006.15704.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.link import Link, Sending

BUCKET = 16 << 20   # bytes of gradients that are sent at once, unless one weight has more

Send = Callable[[int, Tensor], Sending]   # number of a bucket, its gradients: to be the sum over all workers when waited for


class Bucket:
    def __init__(self, number: int, members: list[nn.Parameter]) -> None:
        self.number, self.members = number, members
        self.offsets, size = {}, 0
        for parameter in members:
            self.offsets[parameter] = size
            size += parameter.numel()
        self.size = size
        self.flat: Tensor | None = None
        self.here: set[nn.Parameter] = set()

    def view(self, parameter: nn.Parameter) -> Tensor:
        if self.flat is None:
            self.flat = parameter.grad.new_empty(self.size) if parameter.grad is not None else parameter.new_empty(self.size)
        begin = self.offsets[parameter]
        return self.flat[begin:begin + parameter.numel()].view(parameter.shape)


def bucketed(parameters: Iterable[nn.Parameter], most: int = BUCKET) -> list[Bucket]:
    """Weights in buckets of one dtype, from the last to the first."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(list(parameters)):
        if not groups or size + parameter.nbytes > most or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.nbytes
    return [Bucket(number, members) for number, members in enumerate(groups)]


class Reducer:
    """The buckets of a run's trained weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], link: Link, send: Send) -> None:
        self.parameters = list(parameters)
        self.link, self.send = link, send
        self.buckets = bucketed(self.parameters)
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.members}
        self.sendings: list[Sending] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, gradients that arrive are sent."""
        hooks = [parameter.register_post_accumulate_grad_hook(self.arrived) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None, "a gradient has just arrived"
        if parameter.grad.is_sparse:
            raise Mistake("a weight has a sparse gradient, which can't be added up in buckets: make its embedding with sparse=False")
        bucket = self.bucket_of[parameter]
        assert bucket.number >= len(self.sendings), "a weight's gradient comes once in a backward"
        if parameter not in bucket.here:
            view = bucket.view(parameter)
            view.copy_(parameter.grad)
            parameter.grad = view
            bucket.here.add(parameter)
        self.send_full()

    def send_full(self) -> None:
        """Send what is full and in turn."""
        while len(self.sendings) < len(self.buckets):
            bucket = self.buckets[len(self.sendings)]
            if len(bucket.here) < len(bucket.members):
                return
            assert bucket.flat is not None, "what is full was filled"
            self.sendings.append(self.send(bucket.number, bucket.flat))

    def finish(self, loss: Tensor) -> Tensor:
        """Send what is left and wait for all; gives the sum of the workers' losses."""
        used = torch.tensor([float(parameter in self.bucket_of[parameter].here) for parameter in self.parameters])
        for bucket in self.buckets[len(self.sendings):]:
            for parameter in bucket.members:
                if parameter not in bucket.here:
                    parameter.grad = bucket.view(parameter).zero_()
                    bucket.here.add(parameter)
        self.send_full()
        tally = torch.cat([loss.detach().reshape(1).float(), used.to(loss.device)])
        self.link.sum(tally).wait()
        for sending in self.sendings:
            sending.wait()
        if not self.link.imagined:
            used = tally[1:].cpu()
        for parameter, count in zip(self.parameters, used.tolist(), strict=True):
            if not count:
                parameter.grad = None
        self.sendings.clear()
        for bucket in self.buckets:
            bucket.flat = None
            bucket.here.clear()
        return tally[0]
