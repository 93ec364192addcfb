"""The allocations of a step of FULL_SHARD training, in order, and whether a device with a caching allocator can serve
them.

Models torch's FSDP around each block and around the whole: float32 shards of weights, gradients and moments stay; a
block's 16-bit weights are gathered while the previous block computes and freed after it, and again in backward; its
gradients are made in 16 bits, concatenated, converted for the reduction, scattered, and added to the shard. Weights
being gathered and gradients being scattered belong to other streams, and the allocator never gives a block of one
stream to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.training.on_paper.caching_allocator import CachingAllocator, DeviceFull
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.memory import saved_activations
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.step import PaperJob
from shoestring.training.on_paper.transformer import Transformer

Event = tuple[str, int, str]  # name, bytes (0: freed), stream


@dataclass(frozen=True)
class Reserved:
    """Peak memory of a simulated device."""

    tensors: int  # bytes in blocks in use, rounded
    segments: int  # bytes requested from the device
    retries: int  # times that segments had to be returned
    room: int  # bytes of the device available for segments
    refused: str = ""  # why it does not fit; empty if it does

    @property
    def fits(self) -> bool:
        return not self.refused


def simulate_memory(job: PaperJob, mesh: PaperMesh, machines: Machines) -> Reserved:
    allocator = CachingAllocator(int(machines.memory - machines.base))
    refused = ""
    try:
        for name, size, stream in allocations(job, mesh):
            if size:
                allocator.allocate(name, size, stream)
            else:
                allocator.release(name)
    except DeviceFull as error:
        refused = str(error)
    return Reserved(allocator.most_allocated, allocator.most_reserved, allocator.retries, allocator.capacity, refused)


def allocations(job: PaperJob, mesh: PaperMesh) -> Iterator[Event]:
    """The allocations of two steps: moments exist only from the second on. Of a batch's micro-batches only the first
    two are traced, since the others are like the second, in which gradients exist already."""
    model, copies = job.model, mesh.data
    units = {
        "root": model.parameters() - model.layers * model.block_parameters(),
        **{f"block{n}": model.block_parameters() for n in range(model.layers)},
    }
    for unit, size in units.items():
        yield f"{unit}.shard", -(-4 * size // copies), "compute"
    for number in range(2):
        for piece in range(min(mesh.pieces(job.batch), 2)):
            yield from one_piece(job, mesh, units, first=piece == 0)
        for unit, size in units.items():
            part = -(-4 * size // copies)
            if number == 0:
                yield f"{unit}.moment1", part, "compute"
                yield f"{unit}.moment2", part, "compute"
            yield "temporary1", part, "compute"  # the root of the second moment, and the quotient
            yield "temporary2", part, "compute"
            yield "temporary1", 0, "compute"
            yield "temporary2", 0, "compute"
        for unit in units:
            yield f"{unit}.gradient", 0, "scatter"


def one_piece(job: PaperJob, mesh: PaperMesh, units: dict[str, int], first: bool) -> Iterator[Event]:
    """Forward and backward of one micro-batch."""
    model, layers, kept = (
        job.model,
        job.model.layers,
        saved_activations(job.model, mesh.micro_batch * job.model.sequence),
    )
    wide = kept["input"]
    yield from gather("root", units["root"], mesh.data)
    yield from gather("block0", units["block0"], mesh.data)
    yield "0.input", wide, "compute"
    for n in range(layers):
        if n + 1 < layers:
            yield from gather(f"block{n + 1}", units[f"block{n + 1}"], mesh.data)
        yield from forward(n, kept, mesh.checkpointing)
        yield f"block{n}.weights", 0, "gather"
    logits = 2 * mesh.micro_batch * model.sequence * model.vocabulary
    yield from head(model, wide, logits)
    if not job.metrics:
        yield "logits", 0, "compute"
    yield from gather(f"block{layers - 1}", units["block0"], mesh.data)
    for n in reversed(range(layers)):
        if n:
            yield from gather(f"block{n - 1}", units["block0"], mesh.data)
        yield from backward(n, kept, model, mesh.checkpointing)
        yield from scatter(f"block{n}", units["block0"], mesh.data, job.gradient_bytes, first, tuple(matrices(model)))
        yield f"block{n}.weights", 0, "gather"
    yield "embedding.made", 2 * model.embedding_parameters(), "compute"
    yield "gradient", 0, "compute"
    yield from scatter("root", units["root"], mesh.data, job.gradient_bytes, first, ())
    for name in ("embedding.made", "head.made"):
        yield name, 0, "compute"
    yield "root.weights", 0, "gather"
    for _ in range(job.metrics):
        yield from (
            ("copy", 2 * logits, "compute"),
            ("softmax", 2 * logits, "compute"),
            ("copy", 0, "compute"),
            ("softmax", 0, "compute"),
        )
    if job.metrics:
        yield "logits", 0, "compute"


def head(model: Transformer, wide: int, logits: int) -> Iterator[Event]:
    """The last norm, the logits, the loss, and backward to the gradient of the last block's output."""
    yield "norm", wide, "compute"
    yield "logits", logits, "compute"
    if not model.fused_loss:  # in float32: a copy, its log-softmax, and the gradient of that
        yield "copy", 2 * logits, "compute"
        yield "softmax", 2 * logits, "compute"
        yield "copy", 0, "compute"
        yield "back32", 2 * logits, "compute"
        yield "softmax", 0, "compute"
    yield "back", logits, "compute"
    if not model.fused_loss:
        yield "back32", 0, "compute"
    yield "head.made", 2 * model.hidden * model.vocabulary, "compute"
    yield "gradient", wide, "compute"
    for name in ("back", "norm", f"{model.layers}.input"):
        yield name, 0, "compute"


def gather(unit: str, size: int, copies: int) -> Iterator[Event]:
    """A unit's 16-bit weights: the own shard is converted to 16 bits first."""
    yield f"{unit}.half", -(-2 * size // copies), "gather"
    yield f"{unit}.weights", 2 * size, "gather"
    yield f"{unit}.half", 0, "gather"


def scatter(
    unit: str, size: int, copies: int, gradient_bytes: float, first: bool, made: tuple[str, ...]
) -> Iterator[Event]:
    """A unit's gradients: concatenated, converted for the reduction, scattered, and stored in float32 or added."""
    yield "joined", 2 * size, "compute"
    for name in made:
        yield f"made.{name}", 0, "compute"
    if gradient_bytes > 2:
        yield "widened", int(gradient_bytes * size), "scatter"
    else:
        yield "scattered", -(-2 * size // copies), "scatter"
    yield f"{unit}.gradient" if first else "added", -(-4 * size // copies), "scatter"
    yield "widened" if gradient_bytes > 2 else "scattered", 0, "scatter"
    if not first:
        yield "added", 0, "scatter"
    yield "joined", 0, "compute"


def forward(n: int, kept: dict[str, int], checkpointing: bool) -> Iterator[Event]:
    """A block's forward: what it keeps, what each half adds to the residual stream, and its output, the next block's
    input."""
    for name, size in kept.items():
        if name == "middle":
            yield "branch", kept["input"], "compute"
        if name != "input":
            yield f"{n}.{name}", size, "compute"
        if name == "middle":
            yield "branch", 0, "compute"
    yield "branch", kept["input"], "compute"
    yield f"{n + 1}.input", kept["input"], "compute"
    yield "branch", 0, "compute"
    if checkpointing:
        yield from ((f"{n}.{name}", 0, "compute") for name in kept if name != "input")


def backward(n: int, kept: dict[str, int], model: Transformer, checkpointing: bool) -> Iterator[Event]:
    """A block's backward: gradients of its matrices and inputs; kept tensors are freed once they are used."""
    wide = kept["input"]
    if checkpointing:
        yield from ((f"{n}.{name}", size, "compute") for name, size in kept.items() if name != "input")
    uses = {
        "down": ("nonlinear",),
        "up": ("up", "gate", "mask2", "norm2"),
        "out": ("middle", "mask1", "attention"),
        "qkv": ("scores", "score_mask", "softmax", "qkv", "norm1", "input"),
    }
    flows = {"down": kept["nonlinear"], "up": kept["up"], "out": kept["attention"], "qkv": kept["qkv"]}
    for made, size in matrices(model).items():
        yield f"made.{made}", size, "compute"
        yield "towards", flows[made], "compute"
        if made == "qkv" and model.flash:
            yield "queries", 2 * wide, "compute"  # the fused kernel sums their gradients in float32
            yield "queries", 0, "compute"
        yield from ((f"{n}.{name}", 0, "compute") for name in uses[made] if name in kept)
        if made in ("up", "qkv"):  # back at the residual stream: the branch's gradient is added to it
            yield "sum", wide, "compute"
            yield "gradient", 0, "compute"
            yield "gradient", wide, "compute"
            yield "sum", 0, "compute"
        yield "towards", 0, "compute"


def matrices(model: Transformer) -> dict[str, int]:
    """Bytes of a block's matrices in 16 bits, in backward's order."""
    h, f = model.hidden, model.inner
    return {
        "down": 2 * h * f,
        "up": 2 * h * f * (2 if model.gated else 1),
        "out": 2 * h * h,
        "qkv": 2 * h * (h + model.key_values),
    }
