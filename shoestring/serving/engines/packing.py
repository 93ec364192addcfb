"""Compute samples of different lengths in one batch without padding inside a model's repeated blocks.

    ids (n, longest) -> embeddings -> (n, longest, width)           the user's own code
                                         | pack
                                      (1, total, width) -> block -> block -> ... -> block
                                         | unpack             attention sample by sample (attention.py)
    pooler, head     <-               (n, longest, width)           the user's own code

The model is called with the ordinary padded batch. Blocks apply linear layers, norms and activations to each position by
itself, so only attention needs to know where a sample ends. What follows may stay packed as well: a language model's head
is larger than its blocks. Whether a model is of this kind is tried (packing_trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from shoestring.measure.interception import patch_forwards
from shoestring.serving.engines.attention import AttentionCalls, PackedAttention, PackedRows, Unpackable
from shoestring.serving.engines.lengths import LengthRule
from shoestring.serving.engines.outputs import Compute, OutputForm
from shoestring.serving.engines.signature import ModelInterface
from shoestring.serving.sample import Answers, Sample, Tensors


class Axes(Enum):
    """The axes of a block's argument. Where several fit in every batch that was tried, it is the first of them."""

    SQUARE = "last two: positions, positions; a mask"
    ROWS = "samples (or 1), positions"
    TURNED = "positions, samples (or 1)"
    POSITIONS = "positions"
    OTHER = "not by position, or a mask of another form"


class Unpack(Enum):
    """Where states are unpacked: the later, the less is computed on padding."""

    NEVER = "what follows the blocks goes position by position too, and outputs are packed"
    AFTER_LAST = "after the last block"
    AFTER_EACH = "after each block, because something between them knows samples"


Path = tuple[Any, ...]  # where a tensor is among the arguments: names and numbers


@dataclass(frozen=True, eq=False)
class Packing:
    """What is known of a model that can be packed."""

    blocks: Mapping[str, nn.Module]
    calls: int  # of blocks, in a forward
    axes: Mapping[tuple[str, Path], Axes]  # of the blocks' tensor arguments
    rule: LengthRule  # positions in the blocks by the length of a sample
    unpack: Unpack = Unpack.NEVER


class PackedPass:
    """One forward of a packed batch."""

    def __init__(self, packing: Packing, rows: PackedRows) -> None:
        self.packing, self.rows = packing, rows
        attention = PackedAttention(rows)
        self.mode = AttentionCalls(attention.attend, attention.is_padded)
        self.called = 0
        self.packed: dict[int, tuple[Tensor, Tensor]] = {}  # what several blocks are given is packed once

    def around(self, name: str, block: nn.Module) -> Callable[..., Any]:
        """A block's forward on packed states."""
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called += 1
            args, kwargs = map_tensors((args, kwargs), lambda path, leaf: self.entering(name, path, leaf))
            with self.mode:
                output = inner(*args, **kwargs)
            if self.stays_packed():
                return output
            return map_tensors(output, lambda path, leaf: self.leaving(leaf))

        return forward

    def stays_packed(self) -> bool:
        unpack = self.packing.unpack
        return unpack is Unpack.NEVER or (unpack is Unpack.AFTER_LAST and self.called < self.packing.calls)

    def entering(self, name: str, path: Path, leaf: Tensor) -> Tensor:
        axes = self.packing.axes.get((name, path))
        if axes is None:
            raise Unpackable(f"{name} was given a tensor that it was not given when packing was tried")
        if axes in (Axes.SQUARE, Axes.OTHER) or self.is_packed(leaf):
            return leaf
        if id(leaf) not in self.packed:
            self.packed[id(leaf)] = leaf, self.pack(leaf, axes)
        return self.packed[id(leaf)][1]

    def pack(self, leaf: Tensor, axes: Axes) -> Tensor:
        at = 1 if axes is Axes.ROWS else 0
        rows = () if axes is Axes.POSITIONS else (leaf.shape[1 - at],)
        if leaf.shape[at] != self.rows.longest or any(size not in (1, self.rows.count) for size in rows):
            raise Unpackable(
                f"a block was given a tensor of the shape {tuple(leaf.shape)} for {self.rows.count} samples"
            )
        if axes is Axes.POSITIONS:
            return leaf.index_select(0, self.rows.positions)
        return self.rows.pack(leaf) if axes is Axes.ROWS else self.rows.pack(leaf.transpose(0, 1)).transpose(0, 1)

    def is_packed(self, leaf: Tensor) -> bool:
        return tuple(sorted(leaf.shape[:2])) == (1, self.rows.total) or leaf.shape[:1] == (self.rows.total,)

    def leaving(self, leaf: Tensor) -> Tensor:
        if tuple(leaf.shape[:2]) == (1, self.rows.total):
            return self.rows.unpack(leaf)
        if tuple(leaf.shape[:2]) == (self.rows.total, 1):
            return self.rows.unpack(leaf.transpose(0, 1)).transpose(0, 1)
        return leaf

    def check_calls(self) -> None:
        if self.called != self.packing.calls:
            raise Unpackable(f"{self.called} blocks were called, and {self.packing.calls} when packing was tried")


def map_tensors(value: Any, change: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return type(value)(*(map_tensors(one, change, (*path, at)) for at, one in enumerate(value)))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(one, change, (*path, at)) for at, one in enumerate(value))
    if isinstance(value, dict):
        copied = copy(value)  # perhaps a dataclass of outputs, as in transformers
        for key in value:
            copied[key] = map_tensors(value[key], change, (*path, key))
        return copied
    return value


def packed_answers(compute: Compute, interface: ModelInterface, packing: Packing, samples: Sequence[Sample]) -> Answers:
    """Answers to samples of any lengths; raises Unpackable if they can't be had packed."""
    order = sorted(range(len(samples)), key=lambda number: samples[number].length)
    ordered = [samples[number] for number in order]
    lengths = [packing.rule(one.length) for one in ordered]
    batch = interface.inputs.batch(ordered)
    rows = None
    if len(set(lengths)) == 1:
        outputs = compute(batch)
    else:
        rows = PackedRows(lengths)
        passed = PackedPass(packing, rows)
        with patch_forwards({block: passed.around(name, block) for name, block in packing.blocks.items()}):
            outputs = compute(batch)
        passed.check_calls()
    found: list[Tensors] = [{}] * len(samples)
    starts = starts_of(lengths)
    for row, number in enumerate(order):
        found[number] = {
            form.name: answer_of(outputs[form.name], form, row, ordered[row].length, rows, starts[row])
            for form in interface.outputs
        }
    return found


def starts_of(lengths: Sequence[int]) -> list[int]:
    """
    >>> starts_of([2, 3, 3])
    [0, 2, 5]
    """
    found, start = [], 0
    for length in lengths:
        found.append(start)
        start += length
    return found


def answer_of(output: Tensor, form: OutputForm, row: int, length: int, rows: PackedRows | None, start: int) -> Tensor:
    """A sample's part of an output, which is packed if it was taken between the blocks."""
    if rows is not None and form.rows is not None and len(form.axes) == 1 and output.shape[form.rows] == 1:
        axis = form.axes[0][0] + (form.axes[0][0] >= form.rows)
        if output.shape[axis] == rows.total:
            return output.narrow(axis, start, rows.lengths[row]).select(form.rows, 0)
    return form.of_row(output, row, length)
