"""Early exits: easy samples leave the model after some of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.exits.blocks import chain_of
from shoestring.compression.exits.confidence import MEASURES
from shoestring.compression.exits.early_exit import EarlyExitModel, Head
from shoestring.compression.exits.evidence import closeness
from shoestring.compression.exits.thresholds import NEVER, ExitEvidence, Point, Thresholds, calibrate, operate
from shoestring.compression.exits.trained_heads import trained_heads, with_heads
from shoestring.compression.exits.within_seconds import least_damage
from shoestring.compression.technique import STRUCTURE, ModelCost
from shoestring.compression.techniques.leave_early import (
    FoundExits,
    LeaveEarly,
    evidence_of,
    expected_entry,
    predicted_latency,
)
from shoestring.core.errors import Mistake

LARGEST = 1 << 20  # largest width, number of classes or grid of a head that a folder may claim
MOST_EXITS = 6  # that the planner tries
SPARE = 0.95  # share of a latency's limit that the planner plans exits for: timings differ from one to the next
DIGITS = 3  # of the seconds that it writes


@dataclass(frozen=True)
class EarlyExit(LeaveEarly):
    """Add a classifier head after every `every` blocks; a sample leaves at the first head that is confident enough, and
    the rest of the batch continues. The model itself is not changed: heads are trained towards its outputs on the
    calibration samples, without labels,

        loss = sum_k T^2 KL( softmax(end / T) || softmax(exit_k / T) )          T = 2

    and thresholds minimise the cost for at most `loss` of disagreement with the whole model, on samples not used to
    train the heads. With `delta` the bound holds for the population of samples with probability 1 - delta
    (exits/thresholds.py: learn then test). Xin et al. 2020, DeeBERT, arXiv 2004.12993; Angelopoulos et al. 2021, Learn
    then Test, arXiv 2110.01052.

    With `seconds` the thresholds do the least damage at which a share of the answers takes no longer
    (exits/within_seconds.py): `compress --latency 5ms@90%` tries that beside the other techniques, if the model as it is
    misses the limit. Every answer takes the time of its exit, so `--latency 5ms`, which 99 of 100 answers must keep, needs
    an exit that nearly all samples take.

    It makes a classifier faster if most samples are easy, and larger by its heads. Measured on Fashion-MNIST with heads
    that were trained with the model: half a point allowed, 2.4 times as fast in batches of 32 with 0.99 points lost on
    other data; with delta=0.1 1.8 times with 0.06 (benchmarks/compress/README.md). With few held-out samples, the loss
    on other samples exceeds the limit: use delta.

    Costs: the heads' weights, and the time to train and run them; with a latency, planning about twice as long.

    Not for: outputs other than classes, samples that are all equally hard, or ONNX files.
    """

    every: int = 1  # blocks from one exit to the next
    loss: float = 0.005  # share of samples that may get another class than from the whole model
    delta: float = (
        0.0  # largest probability that the true loss is higher; 0: the limit holds for the held-out samples only
    )
    measure: str = "probability"  # of confidence: probability, entropy or margin
    steps: int = 200  # training steps of the heads
    seconds: float = 0.0  # that an answer may take: the least damage that keeps it; 0: the least mean time
    share: float = 0.99  # of the answers that must keep `seconds`
    saves_bytes: ClassVar[bool] = False
    why: ClassVar[str] = "samples that are easy leave after some blocks"
    on_request: ClassVar[bool] = False  # a latency may need it
    order: ClassVar[int] = STRUCTURE + 5  # applied to a model that was pruned already

    def __post_init__(self) -> None:
        if self.every < 1 or self.steps < 1 or not 0 <= self.loss <= 1 or not 0 <= self.delta < 1:
            raise Mistake(
                f"EarlyExit(every={self.every}, loss={self.loss}, delta={self.delta}, steps={self.steps}): give blocks and steps "
                f"from 1 on, and shares from 0 to 1"
            )
        if self.measure not in MEASURES:
            raise Mistake(f"EarlyExit(measure={self.measure!r}): there are {', '.join(MEASURES)}")
        if self.seconds < 0 or not 0 < self.share < 1 or (self.seconds and self.delta):
            raise Mistake(
                f"EarlyExit(seconds={self.seconds}, share={self.share}, delta={self.delta}): give seconds of zero or more and a "
                f"share between 0 and 1; delta bounds the loss of the least mean time, so it can't stand beside seconds"
            )

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        """One setting, if the model as it is misses the latency: heads are only trained then."""
        limit, share = cost.wanted.latency, cost.wanted.percentile
        if limit is None or not cost.study.timed or cost.study.clock.plain.at(share) <= limit:
            return ()
        try:
            every = max(1, -(-len(chain_of(cost.study.model)) // (MOST_EXITS + 1)))
        except Mistake:
            every = 1  # refused with this reason
        return (cls(every=every, loss=1.0, seconds=float(f"{SPARE * limit:.{DIGITS}g}"), share=share),)

    def find_exits(self, study: Calibration) -> FoundExits:
        blocks = len(chain_of(study.model))
        after = tuple(range(self.every, blocks, self.every))
        if not after:
            raise Mistake(
                f"EarlyExit(every={self.every}): the model has {blocks} blocks, so no exit comes before its end"
            )
        heads = study.parts(
            f"heads after {after}, {self.steps} steps",
            lambda: trained_heads(study.model, study.batches, study.forward, after, self.steps),
        )
        every = with_heads(study.model, heads, None, self.measure)
        evidence, single = evidence_of(study, every)
        if self.seconds:
            point = operate(evidence, self.thresholds_in_time(study, every, single))
        else:
            point = calibrate(evidence, self.loss, self.delta or None).point
        if all(one == NEVER for one in point.thresholds):
            raise Mistake(
                f"no exit is worth its head with {self.loss:g} of the answers other than the whole model's: allow a larger loss, "
                f"give the Job more held-out data, or train heads with the model (docs/exits.md)"
            )
        early = with_heads(study.model, heads, point.thresholds, self.measure)
        return FoundExits(early, edit_of(early, point), predicted_latency(study, single, point))

    def thresholds_in_time(self, study: Calibration, early: EarlyExitModel, single: ExitEvidence) -> Thresholds:
        close = replace(single, right=closeness(early, study.others, study.forward))
        best = least_damage(close, study.clock.plain, self.seconds, self.share).thresholds
        if (lost := operate(single, best).loss) > self.loss:
            raise Mistake(
                f"EarlyExit(loss={self.loss:g}, seconds={self.seconds:g}): {lost:.2%} of the held-out samples get another "
                f"class where the limit is kept: allow a larger loss, or more seconds"
            )
        return best


def edit_of(early: EarlyExitModel, point: Point) -> dict[str, Any]:
    """The manifest's entry to make the exits again, and what to expect of them."""
    told = []
    for number in early.after:
        head = early.heads[str(number)]
        assert isinstance(head, Head), "the usual ones"
        told.append(
            {"classes": head.classify.out_features, "pool": head.pool, "grid": head.grid, "width": width_of(head)}
        )
    return {
        "kind": "exits",
        "after": list(early.after),
        "heads": told,
        "measure": early.measure,
        "expected": expected_entry(point),
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
