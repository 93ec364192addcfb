"""The memory of each device, by formula: weights, gradients, optimizer state, and activations of micro-batches in
flight."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.step import PaperJob, device_parameters
from shoestring.training.on_paper.transformer import Transformer


@dataclass(frozen=True)
class PaperMemory:
    """Bytes of the fullest device at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # including logits
    base: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, one.name) for one in fields(self)))


def saved_activations(model: Transformer, tokens: int, tensor: int = 1) -> dict[str, int]:
    """Tensors that a block keeps for its backward, in bytes, 16 bits a number. Their sum is formula 2 of arXiv
    2205.05198, s b h (10 + 24/t + 5 a s/(h t)), without masks if there is no dropout and without scores if attention is
    fused."""
    h, f = 2 * tokens * model.hidden, 2 * tokens * model.inner // tensor
    kept = {"input": h, "norm1": h, "qkv": 2 * tokens * (model.hidden + model.key_values) // tensor}
    scores = tokens * model.sequence * model.heads // tensor
    if not model.flash:
        kept["softmax"] = 2 * scores
        if model.dropout:
            kept |= {"score_mask": scores, "scores": 2 * scores}
    kept |= {"attention": h // tensor}
    if model.dropout:
        kept["mask1"] = h // 2
    kept |= {"middle": h, "norm2": h, "up": f}
    if model.gated:
        kept["gate"] = f
    kept["nonlinear"] = f
    if model.dropout:
        kept["mask2"] = h // 2
    return kept


def pieces_held(mesh: PaperMesh, pieces: int) -> float:
    """Micro-batches whose activations the first stage holds, in units of its whole part of the model: S for 1F1B, a
    little more if interleaved (arXiv 2205.05198, section 4.2.3), and at most all of them."""
    held = mesh.stage if mesh.virtual == 1 else (mesh.stage * mesh.virtual + mesh.stage - 1) / mesh.virtual
    return min(held, pieces)


def state_bytes(gradient_bytes: float, copies: int, sharding: int) -> tuple[float, float, float]:
    """Bytes per weight of (weights, gradients, optimizer): 16-bit weights, gradients as they are summed, float32 master
    weights, two moments, and float32 gradients unless gradients are float32 already (Megatron-LM's docs, "distributed
    optimizer")."""
    optimizer = 12.0 + (4.0 if gradient_bytes < 4 else 0.0)
    if sharding == 3:  # float32 shards of weights are the master weights; gradients become float32 when scattered
        return 4.0 / copies, 4.0 / copies, 8.0 / copies
    return 2.0, gradient_bytes, optimizer / (copies if sharding else 1)


def device_memory(job: PaperJob, mesh: PaperMesh, machines: Machines) -> PaperMemory:
    """The memory of the first stage, with the most micro-batches, or of the last, with the logits: whichever is
    fuller."""
    model, tokens, blocks = job.model, mesh.micro_batch * job.model.sequence, job.model.layers // mesh.stage
    kept = saved_activations(model, tokens, mesh.tensor)
    whole, logits = float(sum(kept.values())), tokens * model.vocabulary / mesh.tensor * logit_bytes(model)
    parameters = device_parameters(model, mesh)
    weights, gradients, optimizer = (
        each * parameters for each in state_bytes(job.gradient_bytes, mesh.data, mesh.sharding)
    )
    if mesh.sharding == 3:  # gathered: two blocks and the embedding; and a block's gradients before they are scattered
        weights += 2.0 * (2 * model.block_parameters() + model.embedding_parameters())
        gradients += (2.0 + job.gradient_bytes) * model.block_parameters() + 2.0 * model.embedding_parameters()
    waiting = 2.0 * tokens * model.vocabulary / mesh.tensor if job.metrics else 0.0  # logits, kept until after backward
    last = at_once(blocks, 1.0, kept["input"], whole + waiting * mesh.checkpointing, logits, mesh.checkpointing)
    last = max(last, 5 * waiting)  # then with two float32 copies, for a metric
    first = at_once(blocks, pieces_held(mesh, mesh.pieces(job.batch)), kept["input"], whole, 0.0, mesh.checkpointing)
    activations = max(first, last)
    if (
        mesh.sharding == 3 and mesh.pieces(job.batch) == 1
    ):  # gradients to be scattered replace activations that backward has consumed
        activations = max(0.0, activations - 4.0 * parameters / mesh.data)
    return PaperMemory(weights, gradients, optimizer, activations, machines.base)


def logit_bytes(model: Transformer) -> float:
    """Bytes per logit at the peak: fused, itself and its gradient in 16 bits; not fused, itself and two float32
    copies."""
    return 4.0 if model.fused_loss else 10.0


def at_once(blocks: int, pieces: float, inputs: float, whole: float, logits: float, checkpointing: bool) -> float:
    """Activations at the peak. With checkpointing, a block is recomputed only after the logits are freed."""
    return blocks * pieces * inputs + max(whole, logits) if checkpointing else blocks * pieces * whole + logits
