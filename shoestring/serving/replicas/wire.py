"""What the front and its replicas say to each other: frames over a socket pair.

    4 bytes   mark
    4 bytes   length of the header       at most MOST_HEADER
    8 bytes   length of the tensors      at most MOST_TENSORS
    header    JSON: what it is, and name, dtype and shape of every tensor
    tensors   their bytes, in the header's order, each from a multiple of 16 on

Nothing is unpickled. A frame whose sizes do not fit each other ends the connection, and with it the replica.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoestring.serving.sample import Sample, Tensors

PREFIX = struct.Struct("!4sIQ")
MARK = b"sho1"
MOST_HEADER = 1 << 24
MOST_TENSORS = 1 << 32
ALIGNED = 16
DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BrokenFrame(ValueError):
    """What came is no frame."""


@dataclass(frozen=True)
class SampleFailed:
    """A sample that has no answer."""

    text: str
    of_input: bool  # the model refuses what it was given; else it failed otherwise


@dataclass(frozen=True)
class BatchReply:
    batch: int
    answers: Sequence[Tensors | SampleFailed]
    seconds: float  # that the replica computed


def round_up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which live as long as they are looked at; copied only if they do not lie in one piece."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def tensor_headers(tensors: Tensors) -> list[Any]:
    for name, one in tensors.items():
        if one.dtype not in NAMES or one.layout != torch.strided:
            raise TypeError(f"{name} is a tensor of {one.dtype} ({one.layout}), which can't be sent")
    return [[name, NAMES[one.dtype], list(one.shape)] for name, one in tensors.items()]


def frame(header: Mapping[str, Any], tensors: Iterable[Tensor]) -> list[bytes | memoryview]:
    """A frame in pieces that are sent one after the other."""
    pieces: list[bytes | memoryview] = []
    total = 0
    for one in tensors:
        data = tensor_bytes(one)
        pieces += [data, bytes(round_up(len(data)) - len(data))]
        total += round_up(len(data))
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER or total > MOST_TENSORS:
        raise BrokenFrame(f"a frame of {len(text):,} and {total:,} bytes is too large")
    return [PREFIX.pack(MARK, len(text), total), text, *(one for one in pieces if len(one))]


def lengths_in(prefix: bytes | bytearray) -> tuple[int, int]:
    """Lengths of the header and of the tensors, from a frame's first bytes."""
    mark, header, body = PREFIX.unpack(prefix)
    if mark != MARK or not 2 <= header <= MOST_HEADER or body > MOST_TENSORS:
        raise BrokenFrame("this is not how a frame begins")
    return header, body


class TensorReader:
    """Takes tensors out of a frame's bytes, which they share."""

    def __init__(self, data: bytearray) -> None:
        self.data, self.place = data, 0

    def read(self, described: Any) -> dict[str, Tensor]:
        return {str(name): self.one(dtype, shape) for name, dtype, shape in described}

    def one(self, dtype: Any, shape: Any) -> Tensor:
        if (
            dtype not in DTYPES
            or not isinstance(shape, list)
            or any(type(size) is not int or size < 0 for size in shape)
        ):
            raise BrokenFrame(f"no tensor has dtype {dtype!r} and shape {shape!r}")
        kind, count = DTYPES[dtype], prod(shape)
        size = count * kind.itemsize
        if self.place + round_up(size) > len(self.data):
            raise BrokenFrame("a tensor is longer than its frame")
        found = (
            torch.frombuffer(self.data, dtype=kind, count=count, offset=self.place)
            if count
            else torch.empty(0, dtype=kind)
        )
        self.place += round_up(size)
        return found.reshape(shape)

    def end(self) -> None:
        if self.place != len(self.data):
            raise BrokenFrame("a frame is longer than its tensors")


def batch_frame(number: int, samples: Sequence[Sample]) -> list[bytes | memoryview]:
    header = {"batch": number, "samples": [[one.length, tensor_headers(one.inputs)] for one in samples]}
    return frame(header, (tensor for one in samples for tensor in one.inputs.values()))


def read_batch(header: Any, body: bytearray) -> tuple[int, list[Sample]]:
    tensors = TensorReader(body)
    samples = [Sample(tensors.read(inputs), int(length)) for length, inputs in header["samples"]]
    tensors.end()
    return int(header["batch"]), samples


def reply_frame(reply: BatchReply) -> list[bytes | memoryview]:
    answers = [
        [one.text, one.of_input] if isinstance(one, SampleFailed) else {"tensors": tensor_headers(one)}
        for one in reply.answers
    ]
    header = {"batch": reply.batch, "answers": answers, "seconds": reply.seconds}
    return frame(header, (t for one in reply.answers if not isinstance(one, SampleFailed) for t in one.values()))


def read_reply(header: Any, body: bytearray) -> BatchReply:
    try:
        tensors = TensorReader(body)
        answers = [
            tensors.read(one["tensors"]) if isinstance(one, dict) else SampleFailed(str(one[0]), bool(one[1]))
            for one in header["answers"]
        ]
        tensors.end()
        return BatchReply(int(header["batch"]), answers, float(header["seconds"]))
    except (KeyError, TypeError, IndexError) as error:
        raise BrokenFrame(f"this is no reply: {error}") from error


def read_header(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise BrokenFrame("a frame's header is no JSON") from error


def receive(line: socket.socket, size: int) -> bytearray | None:
    """So many bytes of a blocking socket; None if it was closed before the first."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        more = line.recv_into(view[got:])
        if not more:
            if got:
                raise BrokenFrame("the line was closed within a frame")
            return None
        got += more
    return data


def received_frame(line: socket.socket) -> tuple[Any, bytearray] | None:
    """The next frame of a blocking socket; None if there is no more."""
    prefix = receive(line, PREFIX.size)
    if prefix is None:
        return None
    head, body = lengths_in(prefix)
    header, tensors = receive(line, head), receive(line, body)
    if header is None or (tensors is None and body):
        raise BrokenFrame("the line was closed within a frame")
    return read_header(header), tensors or bytearray()
