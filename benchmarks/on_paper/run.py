# ruff: noqa: E501 (sentences of the README that it writes)
"""Two published tables beside what is predicted from descriptions of their clusters: no GPU is needed, it is arithmetic.

    python benchmarks/on_paper/run.py

Writes README.md beside itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from published import (
    HERE,
    SEQUENCE,
    VOCABULARY,
    FoundryRow,
    calibration_row,
    foundry_cluster,
    kinds,
    megatron,
    megatron_cluster,
    off,
    table,
)

from shoestring.core.units import bytes_text
from shoestring.training.on_paper.best_mesh import VOUCHED, MeshCandidate, best_mesh
from shoestring.training.on_paper.machines import Machines
from shoestring.training.on_paper.memory import device_memory
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.step import PaperJob, rate_per_device, step
from shoestring.training.on_paper.trace import simulate_memory
from shoestring.training.on_paper.transformer import Transformer

ABOUT = """# Planned on paper, against published tables

Written by `python benchmarks/on_paper/run.py` in {seconds:.0f} s. Nothing here was measured by us: published figures stand beside what
`shoestring/training/on_paper` predicts from a description of the cluster (`clusters/`), of the model and of the mesh.

**What is described** and from where: peak, memory and its bandwidth from NVIDIA's data sheets, of which kernels
reach 88 % (1.80 of 2.04 TB/s on an A100 80 GB, forums.developer.nvidia.com/t/339083; taken for all kinds); NVLink as 12 (A100) and 18 (H100) links of 20 and
20.6 GB/s, and the delay of a turn of a ring as 3.4 us inside a machine and 9.6 us between machines, as in NCCL's own tables (graph/topo.h,
graph/tuning.cc); the network as 200 Gb/s a GPU (A100, both sources say so) and 400 Gb/s (H100, not stated by the source: what such machines
have); a share of peak for fused attention of 32.5 % on A100, the middle of the 25 to 40 % that arXiv 2307.08691 states for FlashAttention, and of
18.5 % on H100: FlashAttention-2 reaches 35 % there (arXiv 2407.08608), and the first one 0.53 of the second on A100 (32.5 % of 61.5 %); 24 processors
that a sum between GPUs occupies, the channels that NCCL opens on such machines; 1.5 GiB of each GPU for the driver and NCCL.
llm-foundry's class of the models computes two more cross entropies from every micro-batch's logits, as measures of training: they are counted.

**What is calibrated**: one number a kind of GPU and precision, the share of peak inside a large matrix product, on the one row that is named; and for
all of them one number, how long a wave of tiles waits before its first products, on the first table.
All else follows from sizes: waves of tiles and what must be written (`products.py`), bytes through memory (`block.py`), rings (`sums.py`).
"""


STARTS = tuple(1e-6 * number for number in range(9))  # seconds of a wave before its first products that are compared


def lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def megatron_part() -> str:
    rows = megatron()
    cluster = megatron_cluster(rows[0])
    wrong = [off(row, cluster) for row in rows]
    shown = []
    for row, error in zip(rows, wrong, strict=True):
        mesh = row.mesh(cluster)
        parts = step(row.job, mesh, cluster)
        shares = [f"{getattr(parts, name) / parts.total:.1%}" for name in ("tensor", "bubble", "sends", "data")]
        shown.append(
            [
                f"{row.billions:g}",
                f"{row.gpus:,}",
                str(mesh),
                f"{row.published / 1e12:.0f}",
                f"{row.predicted(cluster) / 1e12:.1f}",
                f"{error:+.1%}",
                *shares,
                bytes_text(int(device_memory(row.job, mesh, cluster).total)),
            ]
        )
    text = [
        "## Megatron-LM, arXiv 2104.04473, table 1\n",
        "A100 80 GB, float16, sequence 2,048, vocabulary 51,200, TFLOP/s per GPU as the paper counts them (recomputation included). The table "
        "gives tensor ways, stages, GPUs and batch; it does not give micro-batch and parts a stage, which are here the best by prediction. The ten rows "
        "are quoted as they are known; sizes of the models agree with other copies of them, and each row's TFLOP/s times its GPUs with its PFLOP/s.\n",
        f"Calibrated on the first row, which has no tensor ways and no stages: {cluster.efficiency['fp16']:.1%} of peak. "
        f"**Off by {median(map(abs, wrong)):.1%} in the median, {min(wrong):+.1%} to {max(wrong):+.1%}** (8 % and 15 % were asked for).\n",
        lines(
            [
                "billions",
                "GPUs",
                "mesh",
                "published",
                "predicted",
                "off",
                "tensor sums",
                "bubble",
                "sends",
                "sums of copies",
                "a GPU holds",
            ],
            shown,
        ),
        "Had another row been the calibration:\n",
        other_rows(),
        starts_part(),
    ]
    return "\n".join(text) + "\n" + second_table(cluster) + "\n" + recompute_part(cluster) + "\n" + choices(cluster)


def other_rows() -> str:
    rows, shown = megatron(), []
    for one in rows:
        cluster = megatron_cluster(one)
        wrong = [off(row, cluster) for row in rows]
        shown.append(
            [
                f"{one.billions:g}",
                f"{cluster.efficiency['fp16']:.1%}",
                f"{median(map(abs, wrong)):.1%}",
                f"{min(wrong):+.1%}",
                f"{max(wrong):+.1%}",
            ]
        )
    return lines(["calibrated on", "share of peak", "median off", "least", "most"], shown)


def starts_part() -> str:
    """How the seconds before a wave's first products were chosen: by table 1, and what the other tables say of that."""
    rows, parted = megatron(), [row for row in megatron("megatron_zero.csv") if not row.sharding]
    errors, shown = {}, []
    for start in STARTS:
        cluster = megatron_cluster(rows[0], start)
        errors[start] = [off(row, cluster) for row in rows]
        two = [abs(off(row, cluster)) for row in parted]
        later = [step(job, mesh, cluster).total / seconds for job, mesh, seconds in recompute_rows()]
        shown.append(
            [
                f"{1e6 * start:.0f}",
                f"{cluster.efficiency['fp16']:.1%}",
                f"{spread(errors[start]):.1%}",
                f"{median(two):.1%}",
                ", ".join(f"{ratio:.2f}" for ratio in later),
            ]
        )
    places = range(len(rows))
    chosen = [
        min(STARTS, key=lambda start: spread([errors[start][place] for place in places if place != left]))
        for left in places
    ]
    each = Counter(f"{1e6 * start:.0f}" for start in chosen)
    told = ", ".join(f"{start} for {count}" for start, count in sorted(each.items()))
    return "\n".join(
        [
            "\nThe microseconds that a wave of tiles waits before its first products (`START`) are the second number calibrated on A100, on all rows of this table "
            f"together. With each of the ten rows left out, the best is: {told}.\n",
            lines(
                ["microseconds", "share of peak", "table 1, root mean square", "table 2, median", "2205.05198, ratios"],
                shown,
            ),
        ]
    )


def spread(errors: Sequence[float]) -> float:
    """The root of the mean square."""
    return (sum(error * error for error in errors) / len(errors)) ** 0.5


def second_table(cluster: Machines) -> str:
    """Rows that nothing was calibrated on, and those that can't be predicted."""
    shown, whole, sharded = [], [], []
    for row in megatron("megatron_zero.csv"):
        error, mesh = off(row, cluster), row.mesh(cluster)
        (sharded if row.sharding else whole).append(error)
        shown.append(
            [
                f"{row.billions:g}",
                f"{row.gpus:,}",
                str(mesh),
                f"{row.published / 1e12:.0f}",
                f"{row.predicted(cluster) / 1e12:.1f}",
                f"{error:+.1%}",
            ]
        )
    return "\n".join(
        [
            "### The same paper's table 2, with the constant of table 1\n",
            "Quoted as it is known; each row's TFLOP/s agrees with its days of training. **Tensor ways and stages: off by "
            f"{median(map(abs, whole)):.1%} in the median, {min(whole):+.1%} to {max(whole):+.1%}.** Everything sharded (DeepSpeed's ZeRO-3 of 2021) is predicted "
            f"{1 + min(sharded):.2f} to {1 + max(sharded):.2f} times as fast as it was: there, what was sent was not hidden. llm-foundry's rows show that later "
            f"software does hide it, on up to {VOUCHED} GPUs; over more, nothing here vouches for it, and the planner leaves it out.\n",
            lines(["billions", "GPUs", "mesh", "published", "predicted", "off"], shown),
        ]
    )


def recompute_part(cluster: Machines) -> str:
    """Seconds of a step with every block recomputed, by later software than table 1's; nothing is calibrated on them.

    Each is compared with table 1's row of the same width, tensor ways and nearly the same number of blocks:

        predicted / published  =  newer / older  x  older        newer / older: published rates over predicted ones
                                                                 older: table 1's own row, published over predicted
    """
    same_width, shown = {row.job.model.hidden: row for row in megatron()}, []
    for row, (job, mesh, published) in zip(table("recompute.csv"), recompute_rows(), strict=True):
        seconds, older = step(job, mesh, cluster).total, same_width[job.model.hidden]
        rate, before = rate_per_device(job, mesh, published), older.published / older.predicted(cluster)
        after = rate / rate_per_device(job, mesh, seconds)
        shown.append(
            [
                row["billions"],
                row["gpus"],
                str(mesh),
                row["seconds"],
                f"{seconds:.2f}",
                f"{after:.2f}",
                f"{older.billions:g}: {older.published / 1e12:.0f} TFLOP/s, here {rate / 1e12:.0f}",
                f"{after / before:.2f}",
                f"{before:.2f}",
            ]
        )
    return "\n".join(
        [
            "### arXiv 2205.05198 (2022), full recomputation, with the constant of table 1\n",
            "Seconds a step. **The rows are quoted from memory** (`recompute.csv`); no copy of the table was found to compare them with. Nothing is calibrated on "
            "them. Two things made larger models too slow here and are counted now: a wave of tiles waits before its first products (`START` in `machines.py`, "
            "chosen by table 1), which is little of a large product; and by then Megatron-LM summed input gradients beside the products of weights' gradients "
            "(`sums_beside`; NVIDIA/apex pull request 1297 has the code of February 2022). Adding 6 to 10 bytes a weight and micro-batch for sums of gradients "
            "was tried too: it made table 2 worse (2.1 to 6.5 % in the median) and is left out. What is left still grows with size and is not explained. The last columns compare with "
            "table 1's row of the same width: the ratio is that of the two papers' rates beyond what the meshes explain (*newer over older*) times table 1's own "
            "error (*older*).\n",
            lines(
                [
                    "billions",
                    "GPUs",
                    "mesh",
                    "published",
                    "predicted",
                    "predicted / published",
                    "table 1's row of this width",
                    "newer over older",
                    "older",
                ],
                shown,
            ),
        ]
    )


def recompute_rows() -> list[tuple[PaperJob, PaperMesh, float]]:
    return list(map(recompute_row, table("recompute.csv")))


def recompute_row(row: dict[str, str]) -> tuple[PaperJob, PaperMesh, float]:
    """The job and the mesh of a row, and its published seconds."""
    number = {name: int(value) for name, value in row.items() if name != "seconds"}
    size = (number["hidden"], number["layers"], number["heads"], VOCABULARY, SEQUENCE)
    model = Transformer(*size, flash=False, fused_loss=False, dropout=True)
    mesh = PaperMesh(1, number["stage"], number["tensor"], number["micro_batch"], number["virtual"])
    return (
        PaperJob(model, number["batch"], "fp16", 2.0, overlapped=False, sums_beside=True),
        mesh,
        float(row["seconds"]),
    )


def as_theirs(mesh: PaperMesh) -> bool:
    """What the paper's software did: every block computed again, every copy whole."""
    return mesh.checkpointing and not mesh.sharding


def choices(cluster: Machines) -> str:
    """What our planner would have done."""
    shown, slowest = [], 0.0
    for row in megatron():
        theirs = planned(row.job, row.mesh(cluster), cluster)
        began = time.perf_counter()
        free = best_mesh(row.job, row.gpus, cluster)
        slowest = time.perf_counter() - began
        bound = best_mesh(row.job, row.gpus, cluster, as_theirs)
        for name, one in (("theirs", theirs), ("ours, as theirs", bound.chosen), ("ours", free.chosen)):
            shown.append(
                [
                    f"{row.billions:g}",
                    name,
                    str(one.mesh),
                    f"{one.parts.total:.2f} s",
                    f"{theirs.parts.total / one.parts.total:.2f}",
                    bytes_text(int(one.held.total)),
                    f"{one.parts.bubble / one.parts.total:.1%}",
                ]
            )
    return "\n".join(
        [
            "### The mesh that our planner would choose\n",
            "For the same model, batch, GPUs and kernels (attention and loss not fused, sums of copies not overlapped), all by prediction. *As theirs*: with "
            "checkpointing and without sharding, as the paper's software did. *Ours*: also without checkpointing, with the optimizer's state or everything sharded "
            "between copies. Memory is by formula, without the allocator's rounding, except where everything is sharded.\n",
            f"The last plan, for 3,072 GPUs, took {slowest:.2f} s (30 s were asked for): {free.why()}.\n",
            lines(["billions", "whose", "mesh", "a step", "speed", "a GPU holds", "bubble"], shown),
        ]
    )


def planned(job: PaperJob, mesh: PaperMesh, cluster: Machines) -> MeshCandidate:
    return MeshCandidate(mesh, step(job, mesh, cluster), device_memory(job, mesh, cluster))


def foundry_part() -> str:
    summary, shown = [], []
    every: list[tuple[FoundryRow, float]] = []
    unfit = doubled = count = 0
    for (gpu, precision), rows in kinds().items():
        cluster, on = foundry_cluster(gpu, precision), calibration_row(rows)
        wrong = [off(row, cluster) for row in rows]
        every += zip(rows, wrong, strict=True)
        full = []
        for row, error in zip(rows, wrong, strict=True):
            fit = simulate_memory(row.job, row.mesh, cluster)
            full.append(fit.segments / fit.room)
            unfit, count, doubled = (
                unfit + (not fit.fits),
                count + 1,
                doubled + (not simulate_memory(*twice(row), cluster).fits),
            )
            shown.append(
                [
                    row.model,
                    f"{row.job.model.sequence:,}",
                    str(row.mesh.world),
                    gpu,
                    f"{precision} {row.mode}",
                    str(row.mesh.micro_batch),
                    "yes" if row.mesh.checkpointing else "no",
                    f"{row.published:,.0f}",
                    f"{row.predicted(cluster):,.0f}",
                    f"{error:+.1%}",
                    bytes_text(fit.tensors),
                    bytes_text(fit.segments) + (f", {fit.retries} retries" if fit.retries else ""),
                    bytes_text(fit.room),
                    "yes" if fit.fits else f"no: {fit.refused}",
                ]
            )
        summary.append(
            [
                gpu,
                precision,
                str(len(rows)),
                f"{on.model}, {on.mesh.world} GPUs",
                f"{cluster.efficiency[precision]:.1%}",
                f"{median(map(abs, wrong)):.1%}",
                f"{min(wrong):+.1%}",
                f"{max(wrong):+.1%}",
                str(sum(abs(one) > FAR for one in wrong)),
                f"{max(full):.0%}",
            ]
        )
    return "\n".join(
        [
            "## mosaicml/llm-foundry, scripts/train/benchmarking/README.md\n",
            f"MPT models, FULL_SHARD, all {count} rows of the stored version (commit 061f2c7c); each row's throughput agrees with its own MFU, its batch with "
            "micro-batch x accumulation x GPUs, and its number of weights with ours. Calibrated on one row a kind of GPU and precision: 3 B, 2,048 tokens, fewest GPUs.\n",
            f"**Tokens/s/GPU off by {median(abs(error) for _, error in every):.1%} in the median** (15 % was asked for); **{count - unfit} of {count} rows are predicted to fit**, "
            "by the allocations of two steps run through a simulated CUDA caching allocator (`trace.py`, `caching_allocator.py`). "
            f"That this could fail: with twice the micro-batch {doubled} of {count} would not fit.\n",
            lines(
                [
                    "GPU",
                    "precision",
                    "rows",
                    "calibrated on",
                    "share of peak",
                    "median off",
                    "least",
                    "most",
                    f"rows off by more than {FAR:.0%}",
                    "fullest GPU",
                ],
                summary,
            ),
            by_model(every),
            falls_short(every),
            "### All rows\n",
            lines(
                [
                    "model",
                    "tokens",
                    "GPUs",
                    "GPU",
                    "precision",
                    "micro-batch",
                    "checkpointing",
                    "published",
                    "predicted",
                    "off",
                    "tensors",
                    "segments",
                    "room",
                    "fits",
                ],
                shown,
            ),
        ]
    )


def twice(row: FoundryRow) -> tuple[PaperJob, PaperMesh]:
    mesh = replace(row.mesh, micro_batch=2 * row.mesh.micro_batch)
    return replace(row.job, batch=2 * row.job.batch), mesh


def by_model(every: Sequence[tuple[FoundryRow, float]]) -> str:
    """Where it errs, and in which direction."""
    shown = []
    for model in dict.fromkeys(row.model for row, _ in every):
        for checkpointing in (False, True):
            wrong = [error for row, error in every if row.model == model and row.mesh.checkpointing == checkpointing]
            if wrong:
                shown.append(
                    [
                        model,
                        "yes" if checkpointing else "no",
                        str(len(wrong)),
                        f"{median(wrong):+.1%}",
                        f"{min(wrong):+.1%}",
                        f"{max(wrong):+.1%}",
                    ]
                )
    return lines(["model", "checkpointing", "rows", "median", "least", "most"], shown)


def falls_short(every: Sequence[tuple[FoundryRow, float]]) -> str:
    early = [
        off(replace(row, job=replace(row.job, stops_early=True)), foundry_cluster(row.gpu, row.job.precision))
        for row, _ in every
    ]
    far = sorted((one for one in every if abs(one[1]) > FAR), key=lambda one: -abs(one[1]))
    named = "; ".join(
        f"{row.model}, {row.job.model.sequence:,} tokens, {row.mesh.world} x {row.gpu}, {row.job.precision} ({error:+.0%})"
        for row, error in far
    )
    return (
        f"Off by more than {FAR:.0%}, {len(far)} rows: {named}. Most of them are also slower than their neighbours in the source, for no reason that it "
        "states. Rows with checkpointing are predicted too slow: a whole forward is counted again, as the source counts it. Since 2.1, torch leaves out each block's "
        f"last product; which versions were used is not stated. Had it been left out everywhere, the median would be {median(map(abs, early)):.1%}.\n"
    )


FAR = 0.15


def main() -> None:
    began = time.perf_counter()
    parts = [megatron_part(), foundry_part()]
    (HERE / "README.md").write_text(ABOUT.format(seconds=time.perf_counter() - began) + "\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
