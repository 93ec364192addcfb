"""Find out whether a model can be packed, by trying: where its attention is, what its blocks are given, and whether every
answer is what the model says to the sample alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.errors import error_sentence
from shoestring.measure.blocks import blocks
from shoestring.measure.interception import patch_forwards
from shoestring.serving.engines.attention import AttentionCalls, Unpackable
from shoestring.serving.engines.comparison import References
from shoestring.serving.engines.lengths import LengthRule, length_rule
from shoestring.serving.engines.outputs import Compute
from shoestring.serving.engines.packing import Axes, Packing, Path, Unpack, map_tensors, packed_answers
from shoestring.serving.engines.position_mixing import mixing_module
from shoestring.serving.engines.signature import ModelInterface
from shoestring.serving.sample import Sample


@dataclass(frozen=True)
class Tried:
    packing: Packing | None
    why_not: str = ""  # empty if it can be packed


def try_packing(
    model: nn.Module, compute: Compute, interface: ModelInterface, seen: References, tolerance: float
) -> Tried:
    """A packing that gave the right answers, or why there is none."""
    if not interface.varies:
        return Tried(None, "all samples have one shape")
    stacks = attention_stacks(model, compute, interface, seen.samples[-1])
    if not stacks:
        return Tried(None, "attention is not scaled_dot_product_attention")
    whys = []
    for region in regions(model, stacks):
        try:
            packing = observe_packing(compute, interface, seen, region)
            why = ""
            for unpack in Unpack:
                tried = replace(packing, unpack=unpack)
                why = why_wrong(compute, interface, tried, seen, tolerance)
                if not why:
                    return Tried(tried)
            whys.append(why)
        except Unpackable as error:
            whys.append(str(error))
    return Tried(None, whys[0] if whys else "attention is outside of repeated blocks")


def why_wrong(compute: Compute, interface: ModelInterface, packing: Packing, seen: References, tolerance: float) -> str:
    """Why answers of a packing are wrong; empty if they are right."""
    for numbers in seen.batches:
        try:
            differs = seen.difference(lambda batch: packed_answers(compute, interface, packing, batch), numbers)
        except Unpackable as error:
            return str(error)
        except Exception as error:  # of the model's own code, which does not expect such shapes
            return f"its blocks can't take packed states ({error_sentence(error)})"
        if not differs <= tolerance:
            found = mixing_module(compute, interface, packing, [seen.samples[number] for number in numbers], tolerance)
            return f"{found}: outputs differ by {differs:.1e}"
    return ""


# Where attention is


def attention_stacks(
    model: nn.Module, compute: Compute, interface: ModelInterface, sample: Sample
) -> list[tuple[str, ...]]:
    """For every call of attention, the modules around it by name, outermost first."""
    inside: list[str] = []
    found: list[tuple[str, ...]] = []

    def note_entry(name: str) -> Any:
        return lambda module, args: inside.append(name)

    def left(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    handles = [
        handle
        for name, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(note_entry(name)),
            module.register_forward_hook(left, always_call=True),
        )
    ]
    original = F.scaled_dot_product_attention

    def really(*args: Any, **kwargs: Any) -> Tensor:
        found.append(tuple(inside))
        return original(*args, **kwargs)

    try:
        with AttentionCalls(really):
            compute(interface.inputs.batch([sample]))
    finally:
        for handle in handles:
            handle.remove()
    return found


def regions(model: nn.Module, stacks: Sequence[tuple[str, ...]]) -> Iterator[dict[str, nn.Module]]:
    """Modules that may be packed: the model's repeated blocks that have attention in them, else those around all of it that
    are of one class (ALBERT has one; packed weights are no parameters, by which blocks are found), outermost first."""
    modules = dict(model.named_modules())
    repeated = blocks(model)
    found = [next((name for name in stack if name in repeated and name), "") for stack in stacks]
    if all(found):
        yield {name: modules[name] for name in dict.fromkeys(found)}
    for depth in range(1, min(map(len, stacks))):
        names = dict.fromkeys(stack[depth] for stack in stacks)
        if len({type(modules[name]) for name in names}) == 1 and list(names) != list(dict.fromkeys(found)):
            yield {name: modules[name] for name in names}


# What blocks are given


def observe_packing(
    compute: Compute, interface: ModelInterface, seen: References, region: Mapping[str, nn.Module]
) -> Packing:
    """What the blocks of a region are given, seen in padded batches of several sizes."""
    rule = positions_rule(compute, interface, seen, region)
    axes: dict[tuple[str, Path], set[Axes]] = {}
    counts = set()
    for numbers in seen.batches:
        samples = [seen.samples[number] for number in numbers]
        count, longest = len(samples), rule(max(one.length for one in samples))
        if len({one.length for one in samples}) == 1:
            continue
        given = arguments(compute, interface, region, samples)
        counts.add(len(given))
        for name, leaves in given:
            for path, leaf in leaves.items():
                possible = possible_axes(tuple(leaf.shape), count, longest)
                axes[name, path] = axes.get((name, path), possible) & possible
    if len(counts) != 1:
        raise Unpackable("how often its blocks are called depends on the batch")
    chosen = {where: next(one for one in Axes if one in possible) for where, possible in axes.items()}
    if not any(one in (Axes.ROWS, Axes.TURNED) for one in chosen.values()):
        raise Unpackable("its blocks are given no tensor with a row of positions for each sample")
    return Packing(dict(region), counts.pop(), chosen, rule)


def possible_axes(shape: tuple[int, ...], count: int, longest: int) -> set[Axes]:
    """
    >>> sorted(one.name for one in possible_axes((3, 7, 16), 3, 7)), possible_axes((3, 1, 7, 7), 3, 7) == {Axes.OTHER, Axes.SQUARE}
    (['OTHER', 'ROWS'], True)
    """
    found = {Axes.OTHER}
    if shape[-2:] == (longest, longest):
        found.add(Axes.SQUARE)
    if len(shape) > 1 and shape[0] in (1, count) and shape[1] == longest:
        found.add(Axes.ROWS)
    if len(shape) > 1 and shape[0] == longest and shape[1] in (1, count):
        found.add(Axes.TURNED)
    if shape[:1] == (longest,):
        found.add(Axes.POSITIONS)
    return found


def arguments(
    compute: Compute, interface: ModelInterface, region: Mapping[str, nn.Module], samples: Sequence[Sample]
) -> list[tuple[str, dict[Path, Tensor]]]:
    """The tensors that each call of a block is given, when samples are computed in a padded batch."""
    found: list[tuple[str, dict[Path, Tensor]]] = []

    def around(name: str, inner: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves: dict[Path, Tensor] = {}
            map_tensors((args, kwargs), leaves.setdefault)
            found.append((name, leaves))
            return inner(*args, **kwargs)

        return forward

    with patch_forwards({block: around(name, block.forward) for name, block in region.items()}):
        compute(interface.inputs.batch(samples))
    return found


def positions_rule(
    compute: Compute, interface: ModelInterface, seen: References, region: Mapping[str, nn.Module]
) -> LengthRule:
    """How many positions the blocks see, by the length of a sample."""
    longest = seen.samples[-1]

    def shapes(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        (_, leaves), *_ = arguments(compute, interface, region, samples)
        return [tuple(leaf.shape) for leaf in leaves.values() if leaf.is_floating_point() and leaf.ndim > 2]

    one, two = shapes([longest]), shapes([longest, longest])
    if not one or len(one) != len(two) or one[0][2:] != two[0][2:]:
        raise Unpackable("its blocks are given no states (samples, positions, width)")
    axis = 1 if two[0][:1] == (2,) else 0

    def size(length: int) -> int:
        return shapes([interface.inputs.crop(longest, length)])[0][axis]

    lengths = {length: size(length) for length in sorted({sample.length for sample in seen.samples})}
    rule = length_rule(size, lengths, longest.length)
    if rule is None or len(set(lengths.values())) == 1 < len(lengths):
        raise Unpackable("how many positions its blocks see does not follow from the length of a sample")
    return rule
