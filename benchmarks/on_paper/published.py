"""The published tables as jobs and meshes on paper, and the cluster files calibrated on one row each."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoestring.training.on_paper.best_mesh import divisors
from shoestring.training.on_paper.calibrate import calibrate
from shoestring.training.on_paper.machines import START, Machines, machines
from shoestring.training.on_paper.memory import device_memory
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.step import PaperJob, rate_per_device, step, tokens_per_device
from shoestring.training.on_paper.transformer import Transformer

HERE = Path(__file__).parent
SEQUENCE, VOCABULARY = 2048, 51_200  # of all of Megatron's rows
LARGEST = 8  # micro-batch that is tried for them: the paper's own experiments go so far
SAME = ("3b", 2048)  # the row of each table of llm-foundry that is calibrated on, with the fewest GPUs


@dataclass(frozen=True)
class MegatronRow:
    billions: float
    job: PaperJob
    tensor: int
    stage: int
    gpus: int
    published: float  # operations per second and GPU
    micro_batch: int = 0  # 0: the table does not say
    sharding: int = 0

    def meshes(self, cluster: Machines) -> Iterator[PaperMesh]:
        """Theirs, as far as the table says: it does not say micro-batch and parts a stage, only that the schedule was interleaved."""
        data = self.gpus // self.tensor // self.stage
        if self.sharding:
            yield PaperMesh(data, micro_batch=self.micro_batch, sharding=self.sharding)
            return
        for micro_batch in [self.micro_batch] if self.micro_batch else divisors(self.job.batch // data, LARGEST):
            for virtual in (
                divisors(self.job.model.layers // self.stage, self.job.model.layers) if self.stage > 1 else (1,)
            ):
                mesh = PaperMesh(data, self.stage, self.tensor, micro_batch, virtual)
                if (
                    not mesh.wrong(self.job.model, self.job.batch, cluster)
                    and device_memory(self.job, mesh, cluster).total <= cluster.memory
                ):
                    yield mesh

    def mesh(self, cluster: Machines) -> PaperMesh:
        """The fastest of them, by prediction."""
        return min(self.meshes(cluster), key=lambda mesh: step(self.job, mesh, cluster).total)

    def predicted(self, cluster: Machines) -> float:
        mesh = self.mesh(cluster)
        return rate_per_device(self.job, mesh, step(self.job, mesh, cluster).total)


@dataclass(frozen=True)
class FoundryRow:
    model: str
    job: PaperJob
    mesh: PaperMesh
    gpu: str
    mode: str
    published: float  # tokens per second and GPU
    parameters: int

    def predicted(self, cluster: Machines) -> float:
        return tokens_per_device(self.job, self.mesh, step(self.job, self.mesh, cluster).total)


def table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def megatron(name: str = "megatron.csv") -> list[MegatronRow]:
    """In float16, gradients too; copies add them up after backward, not beside it; attention and loss were not fused in 2021."""
    rows = []
    for row in table(name):
        model = Transformer(
            int(row["hidden"]),
            int(row["layers"]),
            int(row["heads"]),
            VOCABULARY,
            SEQUENCE,
            flash=False,
            fused_loss=False,
            dropout=True,
        )
        rows.append(
            MegatronRow(
                float(row["billions"]),
                PaperJob(model, int(row["batch"]), "fp16", 2.0, overlapped=False),
                int(row["tensor"]),
                int(row["stage"]),
                int(row["gpus"]),
                1e12 * float(row["teraflops_per_gpu"]),
                int(row.get("micro_batch", 0)),
                3 if row.get("way") == "ZeRO-3" else 0,
            )
        )
    return rows


def megatron_cluster(row: MegatronRow, start: float = START) -> Machines:
    cluster = replace(machines(HERE / "clusters/a100_80gb.json"), start=start)
    return calibrate(cluster, "fp16", row.published, row.predicted)


def foundry() -> list[FoundryRow]:
    """Everything sharded, fused attention and loss. PURE adds up gradients in 16 bits, DEFAULT in 32. While training, the model's class
    (ComposerMPTCausalLM) also computes cross entropy and perplexity from the logits, unless told not to."""
    shapes = {row["model"]: [int(row[name]) for name in ("hidden", "layers", "heads")] for row in table("models.csv")}
    rows = []
    for row in table("llm_foundry.csv"):
        model = Transformer(*shapes[row["model"]], 50_368, int(row["sequence"]))
        gpus, micro_batch = int(row["gpus"]), int(row["micro_batch"])
        job = PaperJob(
            model,
            gpus * micro_batch * int(row["accumulation"]),
            row["precision"].removeprefix("amp_"),
            2.0 if row["mode"] == "PURE" else 4.0,
            metrics=2,
        )
        mesh = PaperMesh(gpus, micro_batch=micro_batch, checkpointing=row["checkpointing"] == "yes", sharding=3)
        rows.append(
            FoundryRow(
                row["model"],
                job,
                mesh,
                row["gpu"],
                row["mode"],
                float(row["tokens_per_second_per_gpu"]),
                int(row["parameters"]),
            )
        )
    return rows


def kinds() -> dict[tuple[str, str], list[FoundryRow]]:
    """Rows by kind of GPU and precision."""
    found: dict[tuple[str, str], list[FoundryRow]] = {}
    for row in foundry():
        found.setdefault((row.gpu, row.job.precision), []).append(row)
    return found


def calibration_row(rows: list[FoundryRow]) -> FoundryRow:
    return min((row for row in rows if (row.model, row.job.model.sequence) == SAME), key=lambda row: row.mesh.world)


@cache
def foundry_cluster(gpu: str, precision: str) -> Machines:
    """8 bits: the head computes in 16, at the rate that the 16-bit rows were calibrated to."""
    cluster = foundry_cluster(gpu, "bf16") if precision == "fp8" else machines(HERE / f"clusters/{gpu}.json")
    row = calibration_row(kinds()[gpu, precision])
    return calibrate(cluster, precision, row.published, row.predicted)


def off(row: MegatronRow | FoundryRow, cluster: Machines) -> float:
    return row.predicted(cluster) / row.published - 1
