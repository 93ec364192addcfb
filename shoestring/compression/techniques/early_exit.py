"""Early exits: easy samples leave the model after some of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.exits.blocks import chain_of
from shoestring.compression.exits.confidence import MEASURES
from shoestring.compression.exits.early_exit import EarlyExitModel, Head
from shoestring.compression.exits.evidence import gather_evidence, seconds_by_part
from shoestring.compression.exits.exit_job import AllExits, ExitTraining, exit_job
from shoestring.compression.exits.thresholds import NEVER, ExitCalibration, calibrate
from shoestring.compression.technique import STRUCTURE
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running import random_state

RATE = 3e-3  # learning rate of Adam for the heads
LARGEST = 1 << 20  # largest width, number of classes or grid of a head that a folder may claim


@dataclass(frozen=True)
class EarlyExit(Restructure):
    """Add a classifier head after every `every` blocks; a sample leaves at the first head that is confident enough, and
    the rest of the batch continues. The model itself is not changed: heads are trained towards its outputs on the
    calibration samples, without labels,

        loss = sum_k T^2 KL( softmax(end / T) || softmax(exit_k / T) )          T = 2

    and thresholds minimise the cost for at most `loss` of disagreement with the whole model, on samples not used to
    train the heads. With `delta` the bound holds for the population of samples with probability 1 - delta
    (exits/thresholds.py: learn then test). Xin et al. 2020, DeeBERT, arXiv 2004.12993; Angelopoulos et al. 2021, Learn
    then Test, arXiv 2110.01052.

    It makes a classifier faster if most samples are easy, and larger by its heads. Measured on Fashion-MNIST with heads
    that were trained with the model: half a point allowed, 2.4 times as fast in batches of 32 with 0.99 points lost on
    other data; with delta=0.1 1.8 times with 0.06 (benchmarks/compress/README.md). With few held-out samples, the loss
    on other samples exceeds the limit: use delta.

    Costs: the heads' weights, and the time to train and run them.

    Not for: outputs other than classes, samples that are all equally hard, or ONNX files.
    """

    every: int = 1  # blocks from one exit to the next
    loss: float = 0.005  # share of samples that may get another class than from the whole model
    delta: float = (
        0.0  # largest probability that the true loss is higher; 0: the limit holds for the held-out samples only
    )
    measure: str = "probability"  # of confidence: probability, entropy or margin
    steps: int = 200  # training steps of the heads
    saves_bytes: ClassVar[bool] = False
    why: ClassVar[str] = "samples that are easy leave after some blocks"
    order: ClassVar[int] = STRUCTURE + 5  # applied to a model that was pruned already

    def __post_init__(self) -> None:
        if self.every < 1 or self.steps < 1 or not 0 <= self.loss <= 1 or not 0 <= self.delta < 1:
            raise Mistake(
                f"EarlyExit(every={self.every}, loss={self.loss}, delta={self.delta}, steps={self.steps}): give blocks and steps "
                f"from 1 on, and shares from 0 to 1"
            )
        if self.measure not in MEASURES:
            raise Mistake(f"EarlyExit(measure={self.measure!r}): there are {', '.join(MEASURES)}")

    def restructure(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        blocks = len(chain_of(study.model))
        after = tuple(range(self.every, blocks, self.every))
        if not after:
            raise Mistake(
                f"EarlyExit(every={self.every}): the model has {blocks} blocks, so no exit comes before its end"
            )
        early = self.with_heads(study, after).early()
        found = self.calibrate_exits(study, early)
        if all(one == NEVER for one in found.point.thresholds):
            raise Mistake(
                f"no exit is worth its head with {self.loss:g} of the answers other than the whole model's: allow a larger loss, "
                f"give the Job more held-out data, or train heads with the model (docs/exits.md)"
            )
        early.thresholds.copy_(torch.tensor(found.point.thresholds))
        return early, edit_of(early, found), ()

    def with_heads(self, study: Calibration, after: tuple[int, ...]) -> ExitTraining:
        """A copy of the model with trained heads."""
        plain = Job(
            model=lambda: copy.deepcopy(study.model),
            data=lambda: list(study.batches),
            forward=study.forward,
            steps=self.steps,
        )
        with random_state.fork_rng(), torch.enable_grad():
            random_state.seed(0)
            job = exit_job(plain, after, train="heads", distil=True, measure=self.measure)
            model = job.model()
            assert isinstance(model, ExitTraining), "exit_job makes one"
            optimizer = torch.optim.Adam(model.heads.parameters(), lr=RATE)
            for step in range(self.steps):
                batch = study.batches[step % len(study.batches)]
                output = job.forward(model, batch)
                if not isinstance(output, AllExits):
                    raise Mistake(
                        f"the job's forward makes a {type(output).__name__} of what the model gives, and exits give their logits "
                        f"beside it: let forward return what the model gives"
                    )
                optimizer.zero_grad()
                job.loss(output, batch).backward()
                optimizer.step()
        return model

    def calibrate_exits(self, study: Calibration, early: EarlyExitModel) -> ExitCalibration:
        costs = seconds_by_part(early, study.others[0], forward=study.forward)
        return calibrate(
            gather_evidence(early, study.others, costs, forward=study.forward), self.loss, self.delta or None
        )


def edit_of(early: EarlyExitModel, found: ExitCalibration) -> dict[str, Any]:
    """The manifest's entry to make the exits again, and what to expect of them."""
    heads = [early.heads[str(number)] for number in early.after]
    told = []
    for head in heads:
        assert isinstance(head, Head), "the usual ones"
        told.append(
            {"classes": head.classify.out_features, "pool": head.pool, "grid": head.grid, "width": width_of(head)}
        )
    expected = {name: asdict(found.point)[name] for name in ("shares", "speedup", "loss", "rows")}
    return {
        "kind": "exits",
        "after": list(early.after),
        "heads": told,
        "measure": early.measure,
        "expected": {**expected, "shares": list(found.point.shares)},
    }


def width_of(head: Head) -> int:
    return head.classify.in_features // (head.grid**2 if head.pool == "grid" else 1)


def exits_again(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Add the exits to a freshly built model."""
    for edit in edits:
        heads = {}
        for number, told in zip(edit["after"], edit["heads"], strict=True):
            if not all(type(told[name]) is int and 0 < told[name] < LARGEST for name in ("width", "classes", "grid")):
                raise ValueError(f"a head of {str(told)[:120]}")
            heads[number] = Head(told["width"], told["classes"], told["pool"], told["grid"])
        model = EarlyExitModel(model, heads, measure=edit["measure"]).eval()
    return model
