"""What rooms store and send is pinned byte by byte: files, messages and checkpoints of one version are those of the next.

Inputs are made of uniform draws, products and powers of two, and the functions of roundings that IEEE 754 fixes, so digests
do not depend on the processor. To pin another function: add a case, run, and copy the digest that the failure shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256

import pytest
import torch
from torch import Tensor

from shoestring.compression.formats.format import PlainFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.formats.sparse import SparseFormat
from shoestring.compression.quantization.rounding import GridSetting, round_to_grid
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.send.quantize import QuantizeUpdates
from shoestring.federated.techniques.send.quantize_down import QuantizeDown
from shoestring.federated.techniques.send.sketch import Sketch
from shoestring.federated.techniques.send.top_k import TopK
from shoestring.training.data_parallel.gradient_compression.error_feedback import ErrorFeedback
from shoestring.training.data_parallel.gradient_compression.gradient_codecs import CODECS, Codec, Int8Codec, TopKCodec
from shoestring.training.memory.optimizers import eight_bits
from tests.federated.techniques.send.made_up import MadeUp

POWERS = torch.tensor([2.0**power for power in range(-12, 3)])
SIZES = (1, 7, 255, 256, 257, 1023, 1024, 1025, 5001)


def numbers(count: int, seed: int = 0) -> Tensor:
    """Of many sizes, with equal ones, zeros of both signs and the smallest there are."""
    draw = torch.Generator().manual_seed(1000 * seed + count)
    found = (2 * torch.rand(count, generator=draw) - 1) * POWERS[torch.randint(len(POWERS), (count,), generator=draw)]
    found[torch.rand(count, generator=draw) < 0.1] = 0.0
    found[torch.rand(count, generator=draw) < 0.05] = -0.0
    found[torch.rand(count, generator=draw) < 0.05] = 0.25
    found[torch.rand(count, generator=draw) < 0.02] = 1e-44
    return found


def not_finite(count: int) -> Tensor:
    found = numbers(count, 1)
    found[0], found[count // 2], found[-1] = torch.inf, torch.nan, -torch.inf
    return found


def digest(tensors: Iterator[Tensor]) -> str:
    whole = sha256()
    for one in tensors:
        plain = one.detach().contiguous()
        if plain.is_floating_point():  # a NaN has many spellings
            plain = torch.where(plain.isnan(), torch.nan, plain)
        whole.update(str((tuple(plain.shape), plain.dtype)).encode())
        whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def moments() -> Iterator[Tensor]:
    """Optimizer moments in 8 bits."""
    for count in SIZES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for positive in (False, True):
                values = numbers(count).to(dtype)
                held = torch.zeros(eight_bits.size(count), dtype=torch.uint8)
                eight_bits.pack(values.abs() if positive else values, held, positive)
                yield held
                yield eight_bits.unpack(held, count, positive)


def messages(codec: Codec) -> Iterator[Tensor]:
    for count in (*SIZES, 40_000):
        for values in (numbers(count), not_finite(count)):
            message = codec_bytes(codec, count)
            codec.encode(values, message)
            if values.isfinite().all():  # what stands in the bytes of one that is not is nobody's business
                yield message
            total = numbers(count, 2)
            codec.add(message, total, times=-0.5)
            yield total
            yield codec.decode(message, count)


def feedback(codec: Codec) -> Iterator[Tensor]:
    kept = ErrorFeedback()
    for step in range(4):
        message = torch.zeros(codec.size(1025), dtype=torch.uint8)
        values = numbers(1025, step)
        if step == 2:
            values[3] = torch.nan
        kept.encode("bucket", values, codec, message)
        yield kept.rest["bucket"].nan_to_num(0.0)


def federated(*techniques: FederatedTechnique) -> Iterator[Tensor]:
    """Three rounds of two devices; in the second one device finds what is not finite."""
    for count in SIZES[1:]:
        made = MadeUp({}, techniques)
        for number in range(3):
            made.rows = {"ada": numbers(count, number), "bob": not_finite(count) if number == 1 else numbers(count, 9)}
            order, sent = made.sent(["ada", "bob"], number, numbers(count, 5))
            yield order.weights
            yield from (sent.payload[name] for name in sorted(sent.payload))
            yield made.parts.decode(order, sent).rows
            yield from (made.started[-1], *(one for state in made.states.values() for one in state.values()))


def grids() -> Iterator[Tensor]:
    for bits in range(2, 9):
        for shape, group in (((5, 48), 16), ((3, 7, 3), 8), ((11,), 4), ((4, 5), 64), ((6, 40), 40)):
            rows = torch.arange(shape[0]).flip(0)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                weight = numbers(int(torch.Size(shape).numel()), bits)
                weight = weight.view(shape[0], -1) if len(shape) > 1 else weight[None]
                [found] = round_to_grid(weight, [GridSetting(bits, group)])
                form = GridFormat.of(found.codes, found.scales, found.zeros, bits, group, shape, dtype)
                yield from form.buffers()
                yield form.dense()
                if len(shape) > 1:
                    yield form.rows(rows)


def masks() -> Iterator[Tensor]:
    for count in (8, 9, 63, 1001):
        form = SparseFormat.of(numbers(count), PlainFormat.of)
        yield from form.buffers()
        yield form.dense()


def largest() -> Iterator[Tensor]:
    """Of gradients that have no equal numbers: which of those torch takes is its own business."""
    for share in (0.01, 1 / 3, 1.0):
        codec = TopKCodec(share)
        for count in (*SIZES, 40_000):
            values, message = (
                torch.rand(count, generator=torch.Generator().manual_seed(count)),
                codec_bytes(codec, count),
            )
            codec.encode(values - 0.5, message)
            yield message
            yield codec.decode(message, count)


def codec_bytes(codec: Codec, count: int) -> Tensor:
    return torch.full((codec.size(count),), 77, dtype=torch.uint8)


CASES: dict[str, Callable[[], Iterator[Tensor]]] = {
    "moments": moments,
    **{f"codec {name}": lambda codec=codec: messages(codec) for name, codec in CODECS.items() if name != "topk"},
    "codec int8 in sevens": lambda: messages(Int8Codec(7)),
    "feedback int8": lambda: feedback(Int8Codec()),
    "feedback fp16": lambda: feedback(CODECS["fp16"]),
    **{f"federated {bits} bits": lambda bits=bits: federated(QuantizeUpdates(bits, 256)) for bits in (8, 4, 2, 1)},
    **{f"federated down {bits} bits": lambda bits=bits: federated(QuantizeDown(bits, 256)) for bits in (8, 4)},
    "federated top-k": lambda: federated(TopK(0.1)),
    "federated top-k, few": lambda: federated(TopK(0.002)),
    "federated top-k, many, in 4 bits": lambda: federated(TopK(0.4), QuantizeUpdates(4, 64)),
    "federated sketch": lambda: federated(Sketch(share=0.3)),
    "grids": grids,
    "masks": masks,
    "codec topk": largest,
}
PINNED = {
    "moments": "3c9e42d4552f7b0e",
    "codec fp16": "e4ccfe699ca2f1d2",
    "codec bf16": "866f47c1850257cd",
    "codec int8": "8b886cd1c6977d95",
    "codec int8 in sevens": "dc9267698b0a4c3d",
    "feedback int8": "c3df040514ca50f2",
    "feedback fp16": "86c53030ceedc125",
    "federated 8 bits": "de2711840e691da9",
    "federated 4 bits": "14e3acfe32cdfa77",
    "federated 2 bits": "2353a66100aa6e6b",
    "federated 1 bits": "a83adb0b03549939",
    "federated down 8 bits": "eab6b6cd67a19f13",
    "federated down 4 bits": "5faf4143b7cf07c9",
    "federated top-k": "ab2e995877c67b50",
    "federated top-k, few": "f6f62bd5c16b8edd",
    "federated top-k, many, in 4 bits": "26b21e5bd768efb2",
    "federated sketch": "4f2e1eb0e5d9ee3c",
    "grids": "d937b8b01e1f0388",
    "masks": "951105e1aa5c66ef",
    "codec topk": "8f501a9c1e985278",
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_before(case: str) -> None:
    assert digest(CASES[case]()) == PINNED[case]


if __name__ == "__main__":
    for name, case in CASES.items():
        print(f'    "{name}": "{digest(case())}",')
