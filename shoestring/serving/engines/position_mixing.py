"""Which module of a model's blocks mixes positions other than by attention: the first whose packed output is not what it is
for each sample alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shoestring.serving.engines.comparison import difference
from shoestring.serving.engines.outputs import Compute
from shoestring.serving.engines.packing import Packing, packed_answers
from shoestring.serving.engines.signature import ModelInterface
from shoestring.serving.sample import Sample

POSITIONWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Embedding, nn.Identity)
Calls = list[tuple[str, Tensor]]  # name of a module, its output


def mixing_module(
    compute: Compute, interface: ModelInterface, packing: Packing, samples: Sequence[Sample], tolerance: float
) -> str:
    """What mixes positions."""
    samples = sorted(samples, key=lambda one: one.length)
    lengths = [packing.rule(one.length) for one in samples]
    leaves = leaves_in(packing.blocks)
    with noting_outputs(leaves) as packed:
        packed_answers(compute, interface, packing, samples)
    alone: list[Calls] = []
    for one in samples:
        with noting_outputs(leaves) as calls:
            compute(interface.inputs.batch([one]))
        alone.append(calls)
    for at, (name, output) in enumerate(packed):
        own = [calls[at][1] for calls in alone if at < len(calls) and calls[at][0] == name]
        if len(own) == len(samples) and not agree(output, own, lengths, tolerance):
            kind = type(leaves[name])
            if not at:
                return "what comes before its blocks depends on padding"
            before = "something before " if issubclass(kind, POSITIONWISE) else ""
            return f"blocks mix positions otherwise ({before}{name}, {kind.__name__})"
    return "what follows its blocks depends on padding"


def leaves_in(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        f"{name}.{inner}".rstrip("."): module
        for name, block in blocks.items()
        for inner, module in block.named_modules()
        if not any(True for _ in module.children())
    }


@contextmanager
def noting_outputs(leaves: Mapping[str, nn.Module]) -> Iterator[Calls]:
    """While inside, outputs of these modules are noted, in the order of the calls."""
    found: Calls = []

    def note(name: str) -> Any:
        return lambda module, args, output: found.append((name, output)) if isinstance(output, Tensor) else None

    handles = [module.register_forward_hook(note(name)) for name, module in leaves.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def agree(packed: Tensor, alone: Sequence[Tensor], lengths: Sequence[int], tolerance: float) -> bool:
    """Whether a packed output consists of the samples' own."""
    axis = next((axis for axis, size in enumerate(packed.shape) if size == sum(lengths)), None)
    if axis is None or any(
        one.ndim != packed.ndim or one.shape[axis] != length for one, length in zip(alone, lengths, strict=True)
    ):
        return False
    parts = packed.split(list(lengths), axis)
    wanted = [{"output": one} for one in alone]
    return all(difference(one, {"output": part}, wanted) <= tolerance for one, part in zip(wanted, parts, strict=True))
