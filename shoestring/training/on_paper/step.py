"""The seconds of a step and their parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoestring.training.on_paper.block import HALF, BlockSeconds, block_work, device, head_work, weight_products
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.products import product_seconds
from shoestring.training.on_paper.sums import all_gather_seconds, all_reduce_seconds, send_seconds
from shoestring.training.on_paper.transformer import Transformer

UPDATED = 40.0  # bytes moved per weight in an update: float32 weight and two moments read and written; gradient read
# for the norm, read and written to clip it, read by the update


@dataclass(frozen=True)
class PaperJob:
    """What is trained on paper: a model, the global batch in sequences, and the precision."""

    model: Transformer
    batch: int
    precision: str = "bf16"
    gradient_bytes: float = 4.0  # bytes of a gradient number in the all-reduce
    overlapped: bool = True  # whether gradients are all-reduced during backward; else after it
    sums_beside: bool = (
        False  # whether backward's all-reduces along tensor run beside the products of weights' gradients
    )
    metrics: int = 0  # cross entropies besides the loss, computed from the logits of every micro-batch after backward
    stops_early: bool = (
        False  # recomputation stops when backward has all it needs, which is before a block's last product: torch's
    )
    # non-reentrant checkpointing since 2.1


@dataclass(frozen=True)
class PaperStepSeconds:
    """Seconds of one step of the slowest device; they add up to the step."""

    compute: float  # forward, backward and recomputation
    tensor: float  # all-reduces along tensor
    bubble: float  # idle in the pipeline
    sends: float  # between stages
    data: float  # all-reduces between replicas, as far as computing does not hide them
    optimizer: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, one.name) for one in fields(self)))


def bubble_share(stages: int, pieces: int, virtual: int = 1) -> float:
    """Idle seconds over busy seconds of 1F1B, interleaved or not (arXiv 2104.04473, section 2.2): (S - 1) / (V M)."""
    return (stages - 1) / (virtual * pieces)


def step(job: PaperJob, mesh: PaperMesh, machines: Machines) -> PaperStepSeconds:
    mesh.check_mesh(job.model, job.batch, machines)
    pieces, blocks = mesh.pieces(job.batch), job.model.layers // mesh.stage
    one = block_work(job.model, machines, job.precision, mesh.micro_batch, mesh.tensor)
    head = head_work(job.model, machines, job.precision, mesh.micro_batch, mesh.tensor, job.metrics)
    again = recompute_seconds(job, mesh, one)
    compute = (
        blocks * (one.forward + again + one.backward) + head.forward + head.backward
    )  # the last stage has the head, and all wait for it
    tensor = tensor_sums(job, mesh, machines, blocks)
    sends = stage_sends(job.model, mesh, machines)
    if mesh.sharding == 3:
        data, state = hidden_gathers(job, mesh, machines, one, head), 1 / mesh.data
    else:
        data, state = (
            gradient_sums(job, mesh, machines, blocks, one.backward),
            (1 / mesh.data if mesh.sharding else 1.0),
        )
    idle = bubble_share(mesh.stage, pieces, mesh.virtual) * (pieces * (compute + tensor + sends))
    update = UPDATED * state * device_parameters(job.model, mesh) / machines.bandwidth
    return PaperStepSeconds(pieces * compute, pieces * tensor, idle, pieces * sends, data, update)


def recompute_seconds(job: PaperJob, mesh: PaperMesh, one: BlockSeconds) -> float:
    return 0.0 if not mesh.checkpointing else one.forward - one.last if job.stops_early else one.forward


def device_parameters(model: Transformer, mesh: PaperMesh) -> float:
    """Weights of the fullest device before sharding: its blocks, and the embedding or the head."""
    ends = (
        model.embedding_parameters()
        if mesh.stage > 1 or model.tied
        else model.embedding_parameters() + model.hidden * model.vocabulary
    )
    return (model.layers // mesh.stage * model.block_parameters() + ends) / mesh.tensor


def tensor_sums(job: PaperJob, mesh: PaperMesh, machines: Machines, blocks: int) -> float:
    """All-reduces of a micro-batch's activations: two in every block's forward, two in its backward, and two if it is
    recomputed.

    Those of backward are of input gradients. With `sums_beside` each runs while the same layer's weight gradients are
    computed, as in Megatron-LM since 2022 (NVIDIA/apex pull request 1297; arXiv 2205.05198 names it as the reason why
    recomputing, whose sums hide behind nothing, costs more than a third).
    """
    model, size = job.model, HALF * mesh.micro_batch * job.model.sequence * job.model.hidden
    one = all_reduce_seconds(machines, mesh.tensor, mesh.inside("tensor", machines), size)
    backward = 2 * one
    if job.sums_beside and mesh.tensor > 1:
        unit = device(machines, job.precision)
        inward, _, *up, _ = weight_products(model, mesh.micro_batch * model.sequence, mesh.tensor)
        computing = [sum(product_seconds(part.backward()[1], unit) for part in layer) for layer in ([inward], up)]
        backward = sum(overlap_excess(seconds, one, machines) for seconds in computing)
    ends = 3  # embedding in forward, head in backward, maximum and sum of the loss
    return blocks * ((4 if mesh.checkpointing else 2) * one + backward) + ends / mesh.stage * one


def stage_sends(model: Transformer, mesh: PaperMesh, machines: Machines) -> float:
    """Activations forward and gradients back, for each chunk of a stage. Each worker along tensor sends its part, and
    the parts are gathered on arrival (the paper's scatter/gather, section 4.1)."""
    if mesh.stage == 1:
        return 0.0
    size = HALF * mesh.micro_batch * model.sequence * model.hidden
    across = send_seconds(machines, size / mesh.tensor, mesh.inside("stage", machines) > 1)
    return (
        2 * mesh.virtual * (across + all_gather_seconds(machines, mesh.tensor, mesh.inside("tensor", machines), size))
    )


def gradient_sums(job: PaperJob, mesh: PaperMesh, machines: Machines, blocks: int, backward: float) -> float:
    """All-reduce of gradients between replicas; if overlapped, all but the first computed block's are hidden behind the
    last micro-batch."""
    inside = mesh.inside("data", machines)
    whole = job.gradient_bytes * device_parameters(job.model, mesh)
    seconds = all_reduce_seconds(machines, mesh.data, inside, whole)
    if job.overlapped:
        seconds = overlap_excess((blocks - 1) * backward, seconds * (blocks - 1) / blocks, machines) + seconds / blocks
    if mesh.stage > 1 and job.model.tied:  # the first and the last stage hold the embedding and all-reduce its gradient
        word = job.gradient_bytes * job.model.hidden * job.model.vocabulary / mesh.tensor
        seconds += all_reduce_seconds(machines, 2, 2 if mesh.inside("stage", machines) >= mesh.stage else 1, word)
    return seconds


def hidden_gathers(job: PaperJob, mesh: PaperMesh, machines: Machines, one: BlockSeconds, head: BlockSeconds) -> float:
    """FULL_SHARD: seconds of waiting for weights or gradients beyond computing, in all micro-batches.

    Every block's weights are gathered while the previous block computes, in forward and again in backward, where that
    block's gradients are also scattered. The embedding, which is the head too, is gathered before everything and
    scattered after everything.
    """
    model, copies, inside = job.model, mesh.data, mesh.inside("data", machines)
    block, root = model.block_parameters(), model.parameters() - model.layers * model.block_parameters()
    weights = all_gather_seconds(machines, copies, inside, HALF * block)
    gradients = all_gather_seconds(machines, copies, inside, job.gradient_bytes * block)
    again = recompute_seconds(job, mesh, one)
    waits = (model.layers - 1) * (
        overlap_excess(one.forward, weights, machines)
        + overlap_excess(one.backward + again, weights + gradients, machines)
    )
    ends = (
        weights + overlap_excess(head.backward, weights, machines) + gradients
    )  # first gathers, last scatter: nothing overlaps them
    ends += all_gather_seconds(machines, copies, inside, HALF * root) + all_gather_seconds(
        machines, copies, inside, job.gradient_bytes * root
    )
    return mesh.pieces(job.batch) * (waits + ends)


def overlap_excess(computing: float, sending: float, machines: Machines) -> float:
    """Extra seconds when communication overlaps `computing`: the longer of both counts, plus the multiprocessors that
    sending occupies."""
    taken = min(computing, sending) * machines.sending / machines.processors
    return max(0.0, sending - computing) + taken


def rate_per_device(job: PaperJob, mesh: PaperMesh, seconds: float) -> float:
    """Operations per second and device, as arXiv 2104.04473 counts them."""
    return job.model.counted_operations(job.batch, mesh.checkpointing) / seconds / mesh.world


def tokens_per_device(job: PaperJob, mesh: PaperMesh, seconds: float) -> float:
    return job.batch * job.model.sequence / seconds / mesh.world
