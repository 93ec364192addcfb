"""Exits after some blocks: samples that are easy leave a model early."""

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
from shoestring.compression.exits.evidence import gathered, seconds_by_part
from shoestring.compression.exits.exit_job import AllExits, ExitTraining, exit_job
from shoestring.compression.exits.thresholds import NEVER, ExitCalibration, calibrate
from shoestring.compression.technique import STRUCTURE
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core import random_state
from shoestring.core.errors import Mistake
from shoestring.core.job import Job

RATE = 3e-3  # of the heads' Adam
LARGEST = 1 << 20  # width, classes or grid of a head that a folder may claim


@dataclass(frozen=True)
class EarlyExit(Restructure):
    """A head after every `every` blocks; a sample leaves at the first one that is sure of its class, and the rest of the
    batch goes on smaller. The model stays as it is: heads learn from its own answers on the calibration samples,
    without labels,

        loss = sum_k T^2 KL( softmax(end / T) || softmax(exit_k / T) )          T = 2

    and thresholds are what costs least for `loss` of agreement with the end, on samples that the heads have not
    learned from. With `delta` that holds for all samples like them with probability 1 - delta (exits/thresholds.py:
    learn then test). Xin et al. 2020, DeeBERT, arXiv 2004.12993; Angelopoulos et al. 2021, Learn then Test, arXiv
    2110.01052.

    every      blocks from one exit to the next
    loss       share of samples that may get another class than the whole model gives: 0.005 is half a point
    delta      that the loss is more than that with this probability at most; 0: it holds on the held-out samples themselves
    measure    of sureness: probability, entropy or margin
    steps      of training the heads

    It makes a classifier faster where most samples are easy, and larger by its heads. Measured on Fashion-MNIST with
    heads that were trained with the model: half a point allowed, 2.4 times as fast in batches of 32 with 0.99 points
    lost on other data; with delta=0.1 1.8 times with 0.06 (benchmarks/compress/README.md). With few held-out samples
    more is lost on others than was allowed: use delta.

    Costs: the heads' weights, a training of them, and nothing for samples that leave early.

    Not for: outputs that are no classes, samples that are all equally hard, or files for ONNX.
    """

    every: int = 1
    loss: float = 0.005
    delta: float = 0.0
    measure: str = "probability"
    steps: int = 200
    why: ClassVar[str] = "samples that are easy leave after some blocks"
    order: ClassVar[int] = STRUCTURE + 5  # of a model that is already cut

    def __post_init__(self) -> None:
        if self.every < 1 or self.steps < 1 or not 0 <= self.loss <= 1 or not 0 <= self.delta < 1:
            raise Mistake(
                f"EarlyExit(every={self.every}, loss={self.loss}, delta={self.delta}, steps={self.steps}): give blocks and steps "
                f"from 1 on, and shares from 0 to 1"
            )
        if self.measure not in MEASURES:
            raise Mistake(f"EarlyExit(measure={self.measure!r}): there are {', '.join(MEASURES)}")

    def changed(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        blocks = len(chain_of(study.model))
        after = tuple(range(self.every, blocks, self.every))
        if not after:
            raise Mistake(
                f"EarlyExit(every={self.every}): the model has {blocks} blocks, so no exit comes before its end"
            )
        early = self.with_heads(study, after).early()
        found = self.calibrated(study, early)
        if all(one == NEVER for one in found.point.thresholds):
            raise Mistake(
                f"no exit is worth its head with {self.loss:g} of the answers other than the whole model's: allow a larger loss, "
                f"give the Job more held-out data, or train heads with the model (docs/exits.md)"
            )
        early.thresholds.copy_(torch.tensor(found.point.thresholds))
        return early, edit_of(early, found), ()

    def with_heads(self, study: Calibration, after: tuple[int, ...]) -> ExitTraining:
        """The model with trained heads; it is a copy."""
        plain = Job(
            model=lambda: copy.deepcopy(study.model),
            data=lambda: list(study.batches),
            forward=study.forward,
            steps=self.steps,
        )
        with random_state.kept(), torch.enable_grad():
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

    def calibrated(self, study: Calibration, early: EarlyExitModel) -> ExitCalibration:
        costs = seconds_by_part(early, study.others[0], forward=study.forward)
        return calibrate(gathered(early, study.others, costs, forward=study.forward), self.loss, self.delta or None)


def edit_of(early: EarlyExitModel, found: ExitCalibration) -> dict[str, Any]:
    """How exits are made again, and what is expected of them."""
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
    """The exits, of a fresh model."""
    for edit in edits:
        heads = {}
        for number, told in zip(edit["after"], edit["heads"], strict=True):
            if not all(type(told[name]) is int and 0 < told[name] < LARGEST for name in ("width", "classes", "grid")):
                raise ValueError(f"a head of {str(told)[:120]}")
            heads[number] = Head(told["width"], told["classes"], told["pool"], told["grid"])
        model = EarlyExitModel(model, heads, measure=edit["measure"]).eval()
    return model
