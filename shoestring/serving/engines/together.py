"""How samples are computed together, tried on numbers: padded, only those of equal lengths, or one at a time.

    padded   shorter samples are filled up at their end, if some number fills them so that every answer stays what it is alone
    equal    samples of one shape, if the model's rows do not depend on each other
    alone    one at a time otherwise: a batch norm without kept statistics, a forward that takes one sample

What fills an input is one of the numbers that the model may take for padding: 0, 1 for a mask that marks padding, the
padding index of an embedding or of the configuration. A mask that samples lack is added if that makes the answers right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from inspect import signature
from itertools import islice, product

import torch
from torch import nn

from shoestring.core.errors import error_sentence
from shoestring.serving.engines.comparison import References, holds_bits
from shoestring.serving.engines.inputs import BatchInputs, InputForm
from shoestring.serving.engines.outputs import Compute, answers_alone, split
from shoestring.serving.engines.signature import ModelInterface
from shoestring.serving.sample import Answers, Sample, Tensors

MASK = "attention_mask"  # the argument that forwards of transformers take, where they take a mask
COMBINATIONS = 24  # most ways to fill the inputs that are tried


class Together(Enum):
    """What may be in one batch."""

    PACKED = "samples of any lengths, without padding"
    PADDED = "samples of any lengths, padded to the longest"
    EQUAL = "samples of one shape"
    ALONE = "one sample"


@dataclass(frozen=True)
class Believed:
    """A way that gave the right answers, and why better ones did not."""

    together: Together
    interface: ModelInterface
    why: str = ""


def way_together(
    compute: Compute, interface: ModelInterface, seen: References, tolerance: float, model: nn.Module | None = None
) -> Believed:
    """The best way of computing samples together without packing. `model` knows which numbers are padding."""
    if not interface.varies:
        differs = differences(compute, interface, Together.EQUAL, seen)
        return verdict_on(interface, Together.EQUAL, differs, tolerance)
    worst = ""
    for inputs in islice(filled_ways(interface.inputs, seen.samples[0], model), COMBINATIONS):
        tried = replace(interface, inputs=inputs)
        worst_here = first_difference(compute, tried, seen, tolerance)
        if not worst_here:
            return Believed(Together.PADDED, tried)
        worst = worst or worst_here
    found = verdict_on(interface, Together.EQUAL, differences(compute, interface, Together.EQUAL, seen), tolerance)
    return found if found.together is Together.ALONE else replace(found, why=f"padding changes answers: {worst}")


def verdict_on(interface: ModelInterface, way: Together, differs: float | str, tolerance: float) -> Believed:
    if isinstance(differs, float) and differs <= tolerance:
        return Believed(way, interface)
    why = differs if isinstance(differs, str) else f"outputs differ by {differs:.1e}"
    return Believed(Together.ALONE, interface, f"a sample's answer depends on the others in its batch: {why}")


def first_difference(compute: Compute, interface: ModelInterface, seen: References, tolerance: float) -> str:
    """Why padding is not believed; empty if it is."""
    if not all(form.follows for form in interface.outputs):
        return "the size of an output does not follow from the length"
    for numbers in seen.batches:
        try:
            differs = seen.difference(lambda batch: padded_answers(compute, interface, batch), numbers)
        except Exception as error:  # of the model's own: an index that an embedding does not have
            return error_sentence(error)
        if differs > tolerance:
            return f"outputs differ by {differs:.1e}"
    return ""


def differences(compute: Compute, interface: ModelInterface, way: Together, seen: References) -> float | str:
    try:
        return seen.largest_difference(lambda batch: compute_answers(compute, interface, way, batch))
    except Exception as error:  # the model's own: it takes no batch
        return error_sentence(error)


# Answers


def compute_answers(compute: Compute, interface: ModelInterface, way: Together, samples: Sequence[Sample]) -> Answers:
    """The answers to samples, in as many batches as the way needs."""
    if way is Together.ALONE:
        return answers_alone(compute, interface.inputs, interface.outputs, samples)
    if way is Together.PADDED:
        return padded_answers(compute, interface, samples)
    found: dict[int, Tensors] = {}
    for numbers in equal_groups(samples).values():
        found |= zip(numbers, padded_answers(compute, interface, [samples[one] for one in numbers]), strict=True)
    return [found[number] for number in range(len(samples))]


def equal_groups(samples: Sequence[Sample]) -> dict[object, list[int]]:
    found: dict[object, list[int]] = {}
    for number, one in enumerate(samples):
        found.setdefault(one.shapes, []).append(number)
    return found


def padded_answers(compute: Compute, interface: ModelInterface, samples: Sequence[Sample]) -> Answers:
    forms = interface.outputs
    if not all(form.follows for form in forms):  # one shape: every output has the size that the model gave it
        forms = tuple(replace(form, axes=()) for form in forms)
    return split(compute(interface.inputs.batch(samples)), forms, samples)


# Padding


def filled_ways(inputs: BatchInputs, sample: Sample, model: nn.Module | None) -> Iterator[BatchInputs]:
    """The inputs with every combination of numbers that may fill them, the usual ones first."""
    masked = with_mask(inputs, model)
    choices = [pads_for(form, sample, model) for form in inputs.sample_inputs]
    for combination in product(*choices):
        pads = {form.name: pad for form, pad in zip(inputs.sample_inputs, combination, strict=True)}
        yield from (one.with_pads(pads) for one in (masked, inputs) if one is not None)


def pads_for(form: InputForm, sample: Sample, model: nn.Module | None) -> list[float]:
    if form.axis is None or form.dtype.is_floating_point or form.dtype.is_complex:
        return [0]
    if holds_bits(sample.inputs[form.name]):  # perhaps a mask: of what is there, or of padding
        return [0, 1]
    return [0, *sorted(padding_numbers(model) - {0})] if model is not None else [0]


def padding_numbers(model: nn.Module) -> set[int]:
    """What the model calls padding."""
    found = {one.padding_idx for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))}
    found.add(getattr(getattr(model, "config", None), "pad_token_id", None))
    return {one for one in found if isinstance(one, int) and one >= 0}


def with_mask(inputs: BatchInputs, model: nn.Module | None) -> BatchInputs | None:
    """The inputs and a mask of what is there, if the model's forward takes one by name that the samples lack."""
    if model is None or not isinstance(inputs.template, dict) or MASK in inputs.template:
        return None
    if MASK not in signature(model.forward).parameters or all(form.axis is None for form in inputs.sample_inputs):
        return None
    form = InputForm(MASK, torch.int64, (-1,))
    template = {**inputs.template, MASK: torch.empty(0, dtype=torch.int64)}
    return BatchInputs((*inputs.forms, form), template, MASK)
