"""The seconds of a block and of the head on one device: matrix products, attention, and memory-bound operations."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.costs.cluster_file import PRECISIONS
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.products import MatrixProduct, PaperDevice, product_seconds
from shoestring.training.on_paper.transformer import Transformer

HALF = 2.0  # bytes of a number between products, whatever their precision
MASK = 0.5  # bytes of a dropout mask per byte of its tensor
UNFUSED_LOSS = 40.0  # bytes moved per logit by an unfused cross entropy in float32 (read and write: conversion 6,
# maximum 4, difference 8, exponential 8, sum 4, backward 10)
MEASURED = 14.0  # bytes moved per logit by a metric with its own cross entropy: conversion to float32 6, log-softmax 8


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block, or of the head, for one micro-batch."""

    forward: float
    backward: float
    last: float = 0.0  # of forward: its last product, and the additions after it


def device(machines: Machines, precision: str) -> PaperDevice:
    rate, wide = machines.rate(precision), PRECISIONS[precision]
    return PaperDevice(rate, machines.bandwidth, machines.processors, machines.start, wide)


def block_work(model: Transformer, machines: Machines, precision: str, micro_batch: int, tensor: int) -> BlockSeconds:
    tokens, unit = micro_batch * model.sequence, device(machines, precision)
    dense = weight_products(model, tokens, tensor)
    forward = sum(product_seconds(one, unit) for one in dense)
    backward = sum(product_seconds(half, unit) for one in dense for half in one.backward())
    if model.flash:
        operations = (
            2.0 * tokens * model.sequence * model.hidden / tensor
        )  # two products, half of each hidden by the causal mask
        speed = machines.attention * sixteen_bits(machines)
        forward, backward = (
            forward + operations / speed,
            backward + 2.5 * operations / speed,
        )  # five products instead of two
    else:
        half = device(machines, sixteen_bit_name(machines)) if precision == "fp8" else unit
        pairs = score_products(model, micro_batch, tensor)
        forward += sum(product_seconds(one, half) for one in pairs)
        backward += sum(product_seconds(part, half) for one in pairs for part in one.backward())
    there, back = bytes_moved(model, tokens, tensor, precision)
    last = product_seconds(dense[-1], unit) + HALF * tokens * 3 * model.hidden / machines.bandwidth
    return BlockSeconds(forward + there / machines.bandwidth, backward + back / machines.bandwidth, last)


def weight_products(model: Transformer, tokens: int, tensor: int) -> tuple[MatrixProduct, ...]:
    h, f = model.hidden, model.inner
    return (
        MatrixProduct(tokens, (h + model.key_values) // tensor, h),
        MatrixProduct(tokens, h, h // tensor),
        *[MatrixProduct(tokens, f // tensor, h)] * (2 if model.gated else 1),
        MatrixProduct(tokens, h, f // tensor),
    )


def score_products(model: Transformer, micro_batch: int, tensor: int) -> tuple[MatrixProduct, MatrixProduct]:
    """The attention products; every score is computed, also masked ones."""
    heads = micro_batch * model.heads // tensor
    return MatrixProduct(model.sequence, model.sequence, model.head_size, heads), MatrixProduct(
        model.sequence, model.head_size, model.sequence, heads
    )


def bytes_moved(model: Transformer, tokens: int, tensor: int, precision: str) -> tuple[float, float]:
    """Bytes moved through memory in forward and in backward, except by matrix products.

    Forward: two norms read and write, two additions read two and write one, the nonlinearity reads and writes.
    Backward: norms and nonlinearity read two and write one, branches are added, gradients of biases read what comes.
    """
    h, f, drop = model.hidden, model.inner * (2 if model.gated else 1) / tensor, model.dropout
    there = 4 * h + 6 * h + (2 * MASK * h if drop else 0) + 2 * f
    back = 6 * h + 6 * h + (2 * (2 + MASK) * h if drop else 0) + 3 * f
    if model.biases:
        back += 2 * h + (h + model.key_values + model.inner) / tensor
    if not model.flash:
        scores = model.sequence * model.heads / tensor
        there += scores * (2 + (2 + MASK if drop else 0))
        back += scores * (3 + (2 + MASK if drop else 0))
    if precision == "fp8":  # a product's input is read in 16 bits and written twice in 8, plain and transposed
        there += 2 * (2 * h + h / tensor + f)
        back += 2 * (2 * h + (h + model.key_values + f) / tensor)
    return HALF * tokens * there, HALF * tokens * back


def head_work(
    model: Transformer, machines: Machines, precision: str, micro_batch: int, tensor: int, metrics: int = 0
) -> BlockSeconds:
    """The last norm, the logits, the loss, and the metrics. If blocks compute in 8 bits, the head computes in 16."""
    tokens = micro_batch * model.sequence
    unit = device(machines, sixteen_bit_name(machines) if precision == "fp8" else precision)
    logits = MatrixProduct(tokens, model.vocabulary // tensor, model.hidden)
    through = HALF * tokens * 2 * model.hidden
    loss = tokens * model.vocabulary / tensor * (3 * HALF if model.fused_loss else UNFUSED_LOSS)
    return BlockSeconds(
        product_seconds(logits, unit) + (through + loss / 3) / machines.bandwidth,
        sum(product_seconds(half, unit) for half in logits.backward())
        + (1.5 * through + 2 * loss / 3 + metrics * MEASURED * tokens * model.vocabulary / tensor) / machines.bandwidth,
    )


def sixteen_bit_name(machines: Machines) -> str:
    return "bf16" if "bf16" in machines.peak else "fp16"


def sixteen_bits(machines: Machines) -> float:
    return machines.peak.get(sixteen_bit_name(machines)) or max(machines.peak.values())
