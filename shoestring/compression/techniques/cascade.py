"""A cascade: a smaller model answers first, and only samples of which it is not sure go on to the large one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.exits.cascade import CascadeModel
from shoestring.compression.exits.confidence import MEASURES
from shoestring.compression.exits.evidence import closeness
from shoestring.compression.exits.thresholds import NEVER, calibrate, operate
from shoestring.compression.loading.source import open_source
from shoestring.compression.technique import STRUCTURE
from shoestring.compression.techniques.leave_early import (
    FoundExits,
    LeaveEarly,
    evidence_of,
    expected_entry,
    predicted_latency,
)
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Cascade(LeaveEarly):
    """A small model answers every sample; those of which it is not confident go on to the large one, in a smaller batch.
    Both are packed into one folder.

        answer(x) = small(x) if confidence(small(x)) >= threshold, else large(x)

    The threshold minimises the mean cost for at most `loss` of the answers other than the large model's or, with
    `--keep`, for at least that fidelity, on held-out samples; `delta` makes `loss` a bound for their population with
    probability 1 - delta. Both models take the same arguments and have the same classes. Viola, Jones 2001, CVPR; Wang
    et al. 2022, "Wisdom of Committees", arXiv 2012.01988.

    The job of the small model is named by you, here and when the folder is loaded (`shoestring.load(folder, job=...,
    small=...)`), never by a file. Measured on Fashion-MNIST, half a point allowed: 3.1 times as fast in batches of 32,
    with 0.22 points lost on other data (docs/exits.md).

    Costs: the bytes of the small model, and for samples that go on the time of both. So the latency of 99 of 100
    answers grows, unless the small model answers nearly all.

    Not for: outputs other than classes, a small model that is rarely sure, or a limit on bytes.
    """

    small: str = ""  # folder of its run, a job file with weights, or weights
    job: str = ""  # the job that makes it; built-in ones are known
    loss: float = 0.005  # share of samples that may get another class than from the large model
    delta: float = 0.0  # largest probability that the true loss is higher; 0: the limit holds for the held-out samples
    measure: str = "probability"  # of confidence: probability, entropy or margin
    keep: float = 0.0  # least fidelity, instead of `loss`; taken from --keep
    saves_bytes: ClassVar[bool] = False
    why: ClassVar[str] = "a smaller model answers what is easy"
    order: ClassVar[int] = STRUCTURE + 6

    def __post_init__(self) -> None:
        if not self.small:
            raise Mistake("Cascade(): name the small model, such as Cascade(small='runs/small', job='small.py')")
        if not 0 <= self.loss <= 1 or not 0 <= self.delta < 1 or not 0 <= self.keep <= 1:
            raise Mistake(f"Cascade(loss={self.loss}, delta={self.delta}, keep={self.keep}): give shares from 0 to 1")
        if self.delta and self.keep:
            raise Mistake("Cascade(delta=..., keep=...): delta bounds the share of other classes, so leave keep out")
        if self.measure not in MEASURES:
            raise Mistake(f"Cascade(measure={self.measure!r}): there are {', '.join(MEASURES)}")

    def within(self, budget: Budget) -> Self:
        return self if self.delta or self.keep or budget.quality is None else replace(self, keep=budget.quality)

    @property
    def small_job(self) -> str:
        return self.job or (self.small if self.small.endswith(".py") else "")

    def find_exits(self, study: Calibration) -> FoundExits:
        source = open_source(self.small, {}, job=self.job or None)
        model = CascadeModel([source.model, copy.deepcopy(study.model)], measure=self.measure).eval()
        batches, single = evidence_of(study, model)
        if self.keep:
            close = replace(batches, right=closeness(model, study.others, study.forward))
            point = operate(batches, calibrate(close, 1 - self.keep).point.thresholds)
        else:
            point = calibrate(batches, self.loss, self.delta or None).point
        if point.thresholds[0] == NEVER:
            least = (
                f"fidelity {self.keep:g}" if self.keep else f"{self.loss:g} of the answers other than the large model's"
            )
            raise Mistake(
                f"{self.small} is too rarely sure, or too slow, to answer before the large model with {least}: allow a "
                f"larger loss, or train the small model longer"
            )
        model.thresholds.copy_(torch.tensor(point.thresholds))
        edit = {
            "kind": "cascade",
            "job": source.about["job"],
            "measure": self.measure,
            "expected": expected_entry(point),
        }
        return FoundExits(model, edit, predicted_latency(study, single, point))


def cascade_again(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Put the small model before a freshly built large one; the caller's job has built it (load.py)."""
    for edit in edits:
        small = edit.get("small")
        if not isinstance(small, nn.Module):
            raise Mistake("the folder is a cascade: name the job of its small model too, small=")
        model = CascadeModel([small, model], measure=edit["measure"]).eval()
    return model
