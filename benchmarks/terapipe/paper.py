"""TeraPipe's largest model on paper: what slices of its sequences take on the machines that the paper names, by arithmetic.

t(l, c) is the forward and backward of l tokens after c others through the layers of one stage:

    products     of weights and of scores, in tiles (training/on_paper/products.py); scores of all keys, as in the paper's code: a mask
                 hides what is computed
    memory       what passes through it beside products, scores written, masked and normalised one by one
    sums         four a layer between the devices that share it, in rings inside of a machine
    sending      to the next stage and back, over the machine's network; each of the devices that share a layer sends its part
    adding       gradients of weights to those of earlier slices: both are read and the sum is written, for every slice
    launching    kernels of eager code

Nothing but the share of peak inside large products is calibrated, on one published time without slices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoestring.training.on_paper.block import HALF, bytes_moved, device, weight_products
from shoestring.training.on_paper.calibrate import calibrate
from shoestring.training.on_paper.machines import Machines, machines
from shoestring.training.on_paper.products import MatrixProduct, product_seconds
from shoestring.training.on_paper.sums import all_reduce_seconds
from shoestring.training.on_paper.transformer import Transformer
from shoestring.training.sequence.slices import Seconds, SlicePlan, best_slices, latency

CLUSTER = Path(__file__).with_name("p3_16xlarge.json")
GPT3 = Transformer(12288, 96, 96, 51200, 2048, flash=False, fused_loss=False)
SAMPLES = 2  # a batch, one after the other
KERNELS = (
    90  # of a layer's forward and backward, counted in the paper's code: 30 operations forward, twice as many back
)
LAUNCH = 8e-6  # seconds until the next kernel of eager code can begin
GRANULARITY = 8  # tokens, the paper's
PRECISION = "fp16"


@dataclass(frozen=True)
class Setting:
    """A row of the paper's tables: how 384 GPUs were used, and seconds a step without and with slices."""

    name: str
    stages: int
    tensor: int
    whole: float
    sliced: float


# As we know the paper's tables 1 and 2: the ratios of their times, 5.02 and 6.75, are those of its text
SETTINGS = (Setting("(10)", 48, 8, 5.822, 1.160), Setting("(9)", 96, 4, 9.990, 1.481))


def slice_seconds(setting: Setting, cluster: Machines, adding: bool = True) -> Seconds:
    """t(length, context) of one stage; `adding`: with the adding up of gradients."""
    unit = device(cluster, PRECISION)

    @cache
    def seconds(length: int, context: int) -> float:
        heads = GPT3.heads // setting.tensor
        scores = (
            MatrixProduct(length, context + length, GPT3.head_size, heads),
            MatrixProduct(length, GPT3.head_size, context + length, heads),
        )
        products = (*weight_products(GPT3, length, setting.tensor), *scores)
        computing = sum(product_seconds(one, unit) for product in products for one in (product, *product.backward()))
        looking = replace(GPT3, sequence=context + length)  # so many scores a token
        layer = (
            computing
            + sum(bytes_moved(looking, length, setting.tensor, PRECISION)) / cluster.bandwidth
            + KERNELS * LAUNCH
        )
        layer += adding * 3 * HALF * GPT3.block_parameters() / setting.tensor / cluster.bandwidth
        layer += 4 * all_reduce_seconds(cluster, setting.tensor, setting.tensor, HALF * length * GPT3.hidden)
        crossing = HALF * length * GPT3.hidden / (cluster.network * cluster.devices) + cluster.network_latency
        return GPT3.layers // setting.stages * layer + 2 * crossing

    return seconds


def whole_step(setting: Setting, cluster: Machines) -> float:
    """Without slices: the samples are the pieces."""
    return latency((GPT3.sequence,), slice_seconds(setting, cluster), setting.stages, SAMPLES)


def best(setting: Setting, cluster: Machines, adding: bool = True) -> SlicePlan:
    return best_slices(slice_seconds(setting, cluster, adding), GPT3.sequence, setting.stages, GRANULARITY, SAMPLES)


def described_cluster() -> Machines:
    """The paper's, with the share of peak that its first setting's time without slices says."""
    first = SETTINGS[0]
    return calibrate(machines(CLUSTER), PRECISION, 1 / first.whole, lambda cluster: 1 / whole_step(first, cluster))


def paper_lines() -> list[str]:
    cluster = described_cluster()
    lines = [
        "| setting | stages x tensor ways | whole, paper | predicted | in slices, paper | predicted | speed-up, paper | predicted | "
        "slices, predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in SETTINGS:
        whole, cut = whole_step(one, cluster), best(one, cluster)
        lines.append(
            f"| {one.name} | {one.stages} x {one.tensor} | {one.whole:.3f} s | {whole:.3f} s | {one.sliced:.3f} s | "
            f"{cut.seconds:.3f} s | **{one.whole / one.sliced:.1f}x** | **{whole / cut.seconds:.1f}x** | "
            f"{len(cut.lengths)}, of {max(cut.lengths)} to {min(cut.lengths)} tokens |"
        )
    return [*lines, "", *explained(cluster)]


def explained(cluster: Machines) -> list[str]:
    """Where the difference lies: what a slice of the paper's size takes by our arithmetic, and what the paper's time says it took."""
    one = SETTINGS[0]
    cut, whole = best(one, cluster), slice_seconds(one, cluster)(GPT3.sequence, 0)
    count = len(cut.lengths)
    turns = SAMPLES * count + one.stages - 1
    ideal = whole_step(one, cluster) / (whole / count * turns)
    unadded = " and ".join(
        f"{whole_step(each, cluster) / best(each, cluster, adding=False).seconds:.1f}x" for each in SETTINGS
    )
    return [
        f"The first row's time without slices says {cluster.efficiency[PRECISION]:.0%} of peak; all else follows. With {count} slices "
        f"the paper's {one.sliced:.3f} s are {1000 * one.sliced / turns:.1f} ms for each of {turns} turns, and ours "
        f"{1000 * cut.seconds / turns:.1f} ms. A whole sequence takes {1000 * whole:.0f} ms in a stage; if slices lost nothing, "
        f"{count} of them would take {ideal:.1f}x less time than the whole. They lose most by adding up the gradients of all weights "
        f"once a slice: without that, {unadded} would be predicted."
    ]


if __name__ == "__main__":
    print("\n".join(paper_lines()))
