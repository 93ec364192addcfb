"""Frames between the front and its replicas: what goes in comes out, and whatever is broken is refused, never read as another thing."""

from __future__ import annotations

import json
import socket
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoestring.serving.replicas.wire import (
    DTYPES,
    MARK,
    PREFIX,
    BatchReply,
    BrokenFrame,
    SampleFailed,
    batch_frame,
    lengths_in,
    read_batch,
    read_header,
    read_reply,
    received_frame,
    reply_frame,
)
from shoestring.serving.sample import Sample

SHAPES = st.lists(st.integers(0, 3), max_size=3)


def tensor(dtype: str, shape: list[int]) -> Tensor:
    return (torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 2).to(DTYPES[dtype])


TENSORS = st.builds(tensor, st.sampled_from(sorted(DTYPES)), SHAPES)


def parts(pieces: list[bytes | memoryview]) -> tuple[Any, bytearray]:
    data = bytearray(b"".join(pieces))
    head, body = lengths_in(data[: PREFIX.size])
    assert len(data) == PREFIX.size + head + body
    return read_header(data[PREFIX.size :][:head]), data[PREFIX.size + head :]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


@given(st.lists(st.dictionaries(st.text(max_size=5), TENSORS, max_size=3), max_size=4))
def test_batches_and_replies_come_back_as_they_went(made: list[dict[str, Tensor]]) -> None:
    number, samples = read_batch(*parts(batch_frame(7, [Sample(one, 3) for one in made])))
    assert number == 7 and all(one.length == 3 for one in samples)
    reply = read_reply(*parts(reply_frame(BatchReply(7, [*made, SampleFailed("no", True)], 0.5))))
    assert (reply.batch, reply.seconds, reply.answers[-1]) == (7, 0.5, SampleFailed("no", True))
    for found in ([one.inputs for one in samples], reply.answers[:-1]):
        assert [list(one) for one in found] == [list(one) for one in made]  # type: ignore[arg-type]
        assert all(same(one[name], to[name]) for one, to in zip(found, made, strict=True) for name in to)  # type: ignore[index]


def test_a_view_and_a_transposed_tensor_are_sent_as_they_look() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    _, (found,) = read_batch(*parts(batch_frame(1, [Sample({"a": x.T, "b": x[1], "c": x[:, ::2]}, 1)])))
    assert same(found.inputs["a"], x.T) and same(found.inputs["b"], x[1]) and same(found.inputs["c"], x[:, ::2])


def test_what_can_not_be_sent_is_told() -> None:
    with pytest.raises(TypeError, match="complex64"):
        batch_frame(1, [Sample({"x": torch.zeros(2, dtype=torch.complex64)}, 1)])
    with pytest.raises(TypeError, match="sparse"):
        batch_frame(1, [Sample({"x": torch.eye(2).to_sparse()}, 1)])


@pytest.mark.parametrize(
    "prefix",
    [PREFIX.pack(b"http", 2, 0), PREFIX.pack(MARK, 0, 0), PREFIX.pack(MARK, 1 << 25, 0), PREFIX.pack(MARK, 2, 1 << 40)],
)
def test_no_frame_begins_so(prefix: bytes) -> None:
    with pytest.raises(BrokenFrame):
        lengths_in(prefix)


GOOD = {"tensors": [["y", "float32", [2]]]}


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (GOOD, bytearray(8)),
        (GOOD, bytearray(32)),
        ({"tensors": [["y", "object", [2]]]}, bytearray(16)),
        ({"tensors": [["y", "float32", [-2]]]}, bytearray(16)),
        ({"tensors": [["y", "float32", [True]]]}, bytearray(16)),
        ({"tensors": [["y", "float32", [1 << 62, 8]]]}, bytearray(16)),
        ({"tensors": 3}, bytearray()),
        ([], bytearray()),
    ],
)
def test_sizes_that_do_not_fit_are_refused(answer: Any, body: bytearray) -> None:
    assert read_reply({"batch": 1, "answers": [GOOD], "seconds": 0}, bytearray(16)).batch == 1
    with pytest.raises(BrokenFrame):
        read_reply({"batch": 1, "answers": [answer], "seconds": 0}, body)


@given(st.binary(max_size=60), st.booleans())
def test_noise_is_refused(data: bytes, with_mark: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Thread(
            target=lambda: (theirs.sendall((MARK if with_mark else b"") + data), theirs.shutdown(socket.SHUT_WR))
        )
        sender.start()
        try:
            found = received_frame(ours)
            assert found is None or json.dumps(found[0])
        except BrokenFrame:
            pass
        sender.join()
