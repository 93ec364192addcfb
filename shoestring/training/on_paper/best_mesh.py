"""The best mesh for a described model on a described cluster: enumerate all, keep those that fit, take the fastest.

A plain function rather than a `Room` of planning/choose: there is nothing to apply or confirm here, exactness is the
same for all meshes, and axes are not techniques that can be added, but sizes that must multiply to the number of
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.units import bytes_text
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.machines import machines as read_machines
from shoestring.training.on_paper.memory import PaperMemory, device_memory
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.step import PaperJob, PaperStepSeconds, step
from shoestring.training.on_paper.trace import simulate_memory
from shoestring.training.on_paper.transformer import read_transformer

MOST_SEQUENCES = 128  # in a micro-batch
VOUCHED = 128  # most replicas over which everything may be sharded: beyond that no published figure confirms the
# prediction, and the one that exists (arXiv 2104.04473, table 2) is far slower
CONFIRMED = 20  # fully sharded meshes that are tried with the simulated allocator before giving up
NAMES = {
    "tensor": "sums between tensor neighbours",
    "bubble": "idle in the pipeline",
    "sends": "sends between stages",
    "data": "sums between copies",
    "optimizer": "the update",
}


@dataclass(frozen=True)
class MeshCandidate:
    mesh: PaperMesh
    parts: PaperStepSeconds
    held: PaperMemory


@dataclass(frozen=True)
class PaperPlan:
    chosen: MeshCandidate
    runners_up: tuple[MeshCandidate, ...]  # the next best, fastest first
    tried: int
    fitting: int

    def why(self) -> str:
        """The reason for the choice, in one sentence."""
        parts, total = self.chosen.parts, self.chosen.parts.total
        shares = sorted(((getattr(parts, name) / total, word) for name, word in NAMES.items()), reverse=True)
        lost = ", ".join(f"{share:.1%} {word}" for share, word in shares if share >= 0.001) or "nothing"
        second = (
            f"; next is {self.runners_up[0].mesh}, {self.runners_up[0].parts.total / total - 1:.1%} slower"
            if self.runners_up
            else ""
        )
        return (
            f"{self.chosen.mesh}: {total:.3g} s a step and {bytes_text(int(self.chosen.held.total))} a device; beside computing it "
            f"takes {lost}{second}; {self.fitting:,} of {self.tried:,} meshes fit"
        )


def meshes(job: PaperJob, world: int, machines: Machines) -> Iterator[PaperMesh]:
    """All possible meshes."""
    model = job.model
    for tensor in divisors(world, machines.devices):
        for stage in divisors(world // tensor, model.layers):
            data = world // tensor // stage
            if job.batch % data:
                continue
            for micro_batch in divisors(job.batch // data, MOST_SEQUENCES):
                for virtual in divisors(model.layers // stage, model.layers) if stage > 1 else (1,):
                    for checkpointing in (False, True):
                        for sharding in (0,) if data == 1 else (0, 1, 3) if data <= VOUCHED else (0, 1):
                            mesh = PaperMesh(data, stage, tensor, micro_batch, virtual, checkpointing, sharding)
                            if not mesh.wrong(model, job.batch, machines):
                                yield mesh


def divisors(number: int, most: int) -> list[int]:
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


def plan_on_paper(model: Path, cluster: Path, devices: int, batch: int, precision: str = "bf16") -> PaperPlan:
    """The plan from two files: a transformer's numbers and a cluster's."""
    if devices < 1 or batch < 1:
        raise Mistake(f"a batch of {batch} on {devices} devices: both must be at least 1")
    return best_mesh(PaperJob(read_transformer(model), batch, precision), devices, read_machines(cluster))


def best_mesh(
    job: PaperJob,
    world: int,
    machines: Machines,
    allowed: Callable[[PaperMesh], bool] = lambda mesh: True,
    runners_up: int = 5,
) -> PaperPlan:
    """The fastest mesh that is allowed and fits, and the next ones; if none fits, the error says the least memory
    needed."""
    everything = [(mesh, device_memory(job, mesh, machines)) for mesh in meshes(job, world, machines) if allowed(mesh)]
    if not everything:
        raise Mistake(
            f"{job.model.layers} blocks, {job.model.heads} heads and batches of {job.batch} can't be spread over "
            f"{world} devices: choose a number of devices that batch, heads and blocks can be divided by"
        )
    fitting = [
        MeshCandidate(mesh, step(job, mesh, machines), needs)
        for mesh, needs in everything
        if needs.total <= machines.memory
    ]
    ranked = first_confirmed(job, machines, sorted(fitting, key=lambda one: (one.parts.total, one.held.total)))
    if fitting and not ranked:
        raise Mistake(
            f"nothing fits {bytes_text(int(machines.memory))} a device: {len(fitting):,} meshes would by their tensors, but not "
            "with the segments that the allocator cuts them from: more devices, or a smaller model"
        )
    if not ranked:
        mesh, least = min(everything, key=lambda one: one[1].total)
        raise Mistake(
            f"nothing fits {bytes_text(int(machines.memory))} a device: of {len(everything):,} meshes the least demanding needs "
            f"{bytes_text(int(least.total))} ({mesh}): more devices, or a smaller model"
        )
    return PaperPlan(ranked[0], tuple(ranked[1 : 1 + runners_up]), len(everything), len(fitting))


def first_confirmed(job: PaperJob, machines: Machines, ranked: Sequence[MeshCandidate]) -> list[MeshCandidate]:
    """The ranking from the first mesh that also fits in the simulated allocator, which is run for fully sharded
    meshes."""
    for number, one in enumerate(ranked[:CONFIRMED]):
        if one.mesh.sharding != 3 or simulate_memory(job, one.mesh, machines).fits:
            return list(ranked[number:])
    return [one for one in ranked[CONFIRMED:] if one.mesh.sharding != 3]
