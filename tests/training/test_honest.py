"""Honest: the rehearsed peak is the measured one, to the byte in float32 and within 0.1 % in mixed precision."""

from __future__ import annotations

import pytest

from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import MODELS, job, seeded

PLANS: tuple[tuple[Technique, ...], ...] = (
    (),
    (Checkpoint(every=1),),
    (Checkpoint(every=2), FusedOptimizer()),
    (Checkpoint(schedule="((0,(1,)),)"), StepInBackward()),
    (Accumulate(3),),
    (Accumulate(2), Checkpoint(groups=-1), FusedOptimizer()),
    (OffloadActivations(), FusedOptimizer()),
    (OffloadActivations(blocks=1), Checkpoint(every=1), StepInBackward()),
)
MIXED: tuple[tuple[Technique, ...], ...] = (
    (Precision("bf16"),),
    (Precision("fp16"), Checkpoint(every=1)),
    (Precision("bf16"), Accumulate(2), OffloadActivations()),
    (Precision("bf16", "bf16"), FusedOptimizer(), StepInBackward()),
)


SLOW = (
    "albert",
    "bart",
    "bert",
    "convnext",
    "deberta",
    "gemma",
    "mamba",
    "rwkv",
    "swin",
    "torch encoder",
    "wav2vec2",
    "whisper",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_the_rehearsed_peak_is_the_measured_one_to_the_byte(name: str) -> None:
    made = job(name)
    for plan in PLANS:
        assert peak(rehearse(made, plan)).bytes == peak(track(made, plan, seeded(made))).bytes, plan


@pytest.mark.parametrize("name", ["chain", "gpt2", "llama", "resnet", "t5", "u-net", "vit"])
def test_mixed_precision_is_within_a_thousandth(name: str) -> None:
    made = job(name)
    for plan in MIXED:
        predicted, measured = peak(rehearse(made, plan)).bytes, peak(track(made, plan, seeded(made))).bytes
        assert abs(predicted - measured) <= 0.001 * measured, plan


@pytest.mark.parametrize("name", ["chain", "gpt2", "u-net"])
def test_rehearsed_operations_are_the_measured_ones(name: str) -> None:
    made = job(name)
    for plan in PLANS:
        assert rehearse(made, plan).flops.total() == track(made, plan, seeded(made)).flops.total(), plan
