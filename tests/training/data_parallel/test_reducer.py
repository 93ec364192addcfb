"""The reducer: what is sent when, in which order, and what becomes of weights that nobody used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.workers.link import Link, Sending
from shoestring.training.data_parallel.reducer import Bucket, Reducer, make_buckets


class Begun:
    """A sum that was begun; it counts how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class Recording:
    """Notes what is sent, with the numbers at that moment."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[float]]] = []
        self.begun: list[Begun] = []

    def __call__(self, bucket: Bucket) -> Sending:
        self.sent.append((bucket.name, bucket.buffer.tolist()))
        self.begun.append(Begun())
        return self.begun[-1]


def made(*sizes: int, multiple: int = 1, keeps_gradients: bool = True) -> tuple[list[nn.Parameter], Reducer, Recording]:
    """Weights of ones, each a bucket of its own, from the last to the first."""
    weights = [nn.Parameter(torch.ones(size)) for size in sizes]
    send = Recording()
    buckets = [Bucket([weight], multiple, str(number)) for number, weight in reversed(list(enumerate(weights)))]
    return weights, Reducer(buckets, Link(0, 2), send, keeps_gradients), send


def loss(weights: list[nn.Parameter]) -> Tensor:
    return torch.stack([(number + 1) * weight.sum() for number, weight in enumerate(weights)]).sum()


def test_weights_are_bucketed_from_the_last_to_the_first_by_size_and_dtype() -> None:
    sizes = [
        nn.Parameter(torch.zeros(count, dtype=dtype))
        for count, dtype in (
            (10, torch.float32),
            (10, torch.float32),
            (30, torch.float32),
            (5, torch.float64),
            (5, torch.float64),
        )
    ]
    found = make_buckets(sizes, most=100)  # bytes
    assert [[weight.numel() for weight in bucket] for bucket in found] == [[5, 5], [30], [10, 10]], (
        "one weight may have more than fits"
    )
    assert [bucket[0].dtype for bucket in found] == [torch.float64, torch.float32, torch.float32]


def test_buckets_are_sent_in_their_order_whatever_arrives_first() -> None:
    """The gradient of a later bucket waits for those before it."""
    weights, reducer, send = made(1, 1, 1)
    for weight in weights:
        weight.grad = torch.ones(1)
    reducer.on_gradient(weights[1])
    reducer.on_gradient(weights[0])
    assert send.sent == [], "the bucket of the last weight goes first"
    reducer.on_gradient(weights[2])
    assert [name for name, _ in send.sent] == ["2", "1", "0"]


def test_a_backward_sends_every_bucket_once_and_waits_for_all() -> None:
    weights, reducer, send = made(2, 1, 3)
    with reducer.listening():
        loss(weights).backward()
    assert send.sent == [("2", [3.0] * 3), ("1", [2.0]), ("0", [1.0] * 2)]
    assert [one.waits for one in send.begun] == [1, 1, 1]
    for _ in range(2):  # nothing is left of the step before
        for weight in weights:
            weight.grad = None
        with reducer.listening():
            loss(weights).backward()
    assert len(send.sent) == 9 and send.sent[6:] == send.sent[:3]


def test_gradients_stay_as_views_of_their_bucket() -> None:
    """So that the sum, which is done in the bucket, is where the optimizer looks."""
    weights, reducer, _ = made(2, 2)
    held: list[Tensor] = []
    reducer.send = lambda bucket: held.append(bucket.buffer) or Begun()  # type: ignore[func-returns-value]
    with reducer.listening():
        loss(weights).backward()
    for flat in held:
        flat.mul_(10)
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[10.0, 10.0], [20.0, 20.0]]


def test_gradients_that_do_not_stay_are_gone_when_sent() -> None:
    weights, reducer, send = made(2, 2, keeps_gradients=False)
    with reducer.listening():
        loss(weights).backward()
    assert len(send.sent) == 2 and all(weight.grad is None for weight in weights)
    assert all(bucket.flat is None for bucket in reducer.buckets)


def test_unused_weights_are_sent_as_zeros_and_told_of() -> None:
    """All workers send the same things, whatever they used; what nobody used keeps no gradient."""
    weights, reducer, send = made(2, 1, 1)
    with reducer.listening():
        (5 * weights[2]).sum().backward()
    assert send.sent == [("2", [5.0]), ("1", [0.0]), ("0", [0.0, 0.0])]
    total, unused = reducer.tally(torch.tensor(0.25))
    assert total.item() == 0.25 and unused == {weights[0], weights[1]}
    assert reducer.used == set(), "of this step only"


def test_a_gradient_of_an_earlier_piece_is_sent_with_the_last() -> None:
    """The earlier pieces of a batch add to .grad without being listened to."""
    weights, reducer, send = made(1, 1)
    (7 * weights[0]).sum().backward()
    with reducer.listening():
        (3 * weights[1]).sum().backward()
    assert send.sent == [("1", [3.0]), ("0", [7.0])]
    assert reducer.tally(torch.tensor(1.0))[1] == set()


def test_a_bucket_is_padded_with_zeros() -> None:
    weights, reducer, send = made(3, multiple=8)
    with reducer.listening():
        loss(weights).backward()
    assert send.sent == [("0", [1.0] * 3 + [0.0] * 5)]


def test_the_tally_is_one_sum_of_the_loss_and_a_number_a_weight() -> None:
    weights, reducer, _ = made(1, 1, 1)
    with reducer.listening():
        loss(weights).backward()
    before = reducer.link.sent
    reducer.tally(torch.tensor(1.0))
    assert reducer.link.sent - before == 4 * (1 + 3), "2 (w - 1) / w of 4 numbers, between two"


def test_a_sparse_gradient_is_told() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer([Bucket([table.weight])], Link(0, 2), Recording())
    with pytest.raises(Mistake, match="sparse=False"), reducer.listening():
        table(torch.tensor([1])).sum().backward()


def test_a_weight_that_was_frozen_since_counts_as_unused() -> None:
    weights, reducer, send = made(1, 1)
    weights[0].requires_grad_(False)
    with reducer.listening():
        (2 * weights[1]).sum().backward()
    assert send.sent == [("1", [2.0]), ("0", [0.0])] and reducer.tally(torch.tensor(0.0))[1] == {weights[0]}
