"""SequencePipeline: slices of a sequence give the gradients of the whole one, and what can't be sliced is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.jobs.gpt import Gpt
from shoestring.jobs.gpt import job as gpt_job
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.sequence.slice_times import best_tokens
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import SMALL, hugging, job, seeded, tokens

LENGTH, SAMPLES = 24, 3
PLANS: tuple[tuple[Technique, ...], ...] = (
    (SequencePipeline(3),),
    (SequencePipeline(lengths="9,1,14"),),
    (SequencePipeline(4), Checkpoint(every=1)),
    (SequencePipeline(2), Checkpoint(groups=-1), FusedOptimizer()),
    (SequencePipeline(3), Accumulate(2)),
    (SequencePipeline(2), LowRank()),
)
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt() -> Job:
    return gpt_job(width=64, depth=3, heads=2, context=LENGTH, batch=SAMPLES)


def gpt2() -> Job:
    """With labels that do not count, more of them in one slice than in another."""
    batch = tokens(LENGTH)
    batch["labels"][:, 2:11] = -100
    return Job(
        hugging(
            "GPT2LMHeadModel", "GPT2Config", n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=64, **STILL
        ),
        lambda: [batch] * 4,
    )


def llama() -> Job:
    return Job(hugging("LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=1), lambda: [tokens(LENGTH)] * 4)


def one_sample() -> Job:
    return gpt_job(width=64, depth=4, heads=2, context=40, batch=1)


JOBS: dict[str, Callable[[], Job]] = {"gpt": gpt, "gpt2": gpt2, "llama": llama}


def gradients(made: Job, plan: tuple[Technique, ...], batch: Any = None) -> tuple[float, Tensor]:
    """Loss and all gradients of a batch, in double precision where the model allows it."""
    model = seeded(made).double()
    run = build_run(made, plan, model)
    loss = run.gradients(run, next(iter(made.data())) if batch is None else batch)
    return float(loss), torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    "name, plans",
    [*((name, PLANS[1:3]) for name in JOBS), *(pytest.param(name, PLANS[:5], marks=pytest.mark.slow) for name in JOBS)],
)
def test_slices_have_the_gradients_of_the_whole_sequence(name: str, plans: tuple[tuple[Technique, ...], ...]) -> None:
    loss, whole = gradients(JOBS[name](), ())
    for plan in plans:
        if plan[-1] == Accumulate(2) and name == "gpt2":
            continue  # its pieces have labels that do not count, which the job's weight does not know
        found, sliced = gradients(JOBS[name](), plan)
        assert abs(found - loss) < 1e-6 * loss
        assert apart(sliced, whole) < 1e-6, plan


def test_slices_are_exact_where_everything_is_double_and_a_missing_context_would_show() -> None:
    whole = gradients(gpt(), ())[1]
    assert apart(gradients(gpt(), (SequencePipeline(5),))[1], whole) < 1e-12
    made = gpt()
    batch = next(iter(made.data()))
    alone = replace(made, data=lambda: [tuple(part.reshape(SAMPLES * 2, LENGTH // 2) for part in batch)])
    assert apart(gradients(alone, ())[1], whole) > 1e-3, "slices that do not see each other"


@pytest.mark.parametrize(
    "name, plans", [("gpt2", PLANS[1:3]), *(pytest.param(name, PLANS, marks=pytest.mark.slow) for name in JOBS)]
)
def test_the_rehearsed_peak_of_slices_is_the_measured_one_to_the_byte(
    name: str, plans: tuple[tuple[Technique, ...], ...]
) -> None:
    made = JOBS[name]()
    for plan in plans:
        predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
        assert peak(predicted).bytes == peak(measured).bytes, plan
        assert predicted.flops.total() == measured.flops.total(), plan


@pytest.mark.slow
def test_slices_in_bf16_are_rehearsed_within_a_thousandth() -> None:
    plan = (SequencePipeline(2), Precision("bf16"))
    predicted, measured = peak(rehearse(gpt(), plan)).bytes, peak(track(gpt(), plan, seeded(gpt()))).bytes
    assert abs(predicted - measured) <= 0.001 * measured


def test_the_largest_temporary_is_that_of_a_slice() -> None:
    """In the head, scores of all tokens are much larger than what blocks keep."""
    made = Job(
        lambda: Gpt(16, 1, 2, 512),
        lambda: [(torch.zeros(1, 512, dtype=torch.long),) * 2],
        weight=lambda batch: batch[1].numel(),
        loss=lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
    )
    plain, sliced = (peak(rehearse(made, plan)).bytes for plan in ((), (SequencePipeline(8),)))
    assert sliced < plain


class Own(nn.Module):
    """A small causal model; what is between its two layers of attention is up to the test."""

    def __init__(
        self,
        between: Callable[[Tensor], Tensor] = lambda x: x,
        heads: Callable[[Tensor], Tensor] | None = None,
        places: Callable[[int, int], Tensor] = torch.arange,
    ) -> None:
        super().__init__()
        self.words, self.where, self.head = nn.Embedding(50, 16), nn.Embedding(64, 16), nn.Linear(16, 50)
        self.between, self.heads, self.places = (
            between,
            heads or (lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2)),
            places,
        )

    def seen(self, x: Tensor) -> Tensor:
        parts = self.heads(x)
        return scaled_dot_product_attention(parts, parts, parts, is_causal=True).transpose(1, 2).reshape(x.shape)

    def forward(self, text: Tensor, start: int = 0) -> Tensor:
        x = self.words(text) + self.where(self.places(start, start + text.shape[1]))
        scores: Tensor = self.head(self.seen(self.between(self.seen(x))))
        return scores


def own(**parts: Any) -> Job:
    def data() -> list[tuple[Tensor, Tensor]]:
        text = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(1))
        return [(text[:, :-1], text[:, 1:])]

    settings = {
        "loss": lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        "weight": lambda batch: batch[1].numel(),
    } | {name: parts.pop(name) for name in ("loss", "weight") if name in parts}
    return Job(lambda: Own(**parts), data, **settings)


def test_a_model_of_ones_own_is_recognised_by_what_it_does() -> None:
    made = own(between=lambda x: functional.gelu(x * x.mean(-1, keepdim=True)))
    assert apart(gradients(made, (SequencePipeline(3),))[1], gradients(made, ())[1]) < 1e-12


@pytest.mark.parametrize(
    "parts, why",
    [
        ({"between": lambda x: x - x.mean(1, keepdim=True)}, "mean in the model makes one of all tokens"),
        ({"between": lambda x: x / x.square().sum()}, "computed from all of them"),
        ({"between": lambda x: x / x.shape[1]}, "depends on how many tokens there are"),
        ({"between": lambda x: x * torch.tensor(1.0 / x.shape[1])}, "depends on how many tokens there are"),
        (
            {"between": lambda x: scaled_dot_product_attention(x, x, x, is_causal=True, scale=1 / x.shape[1])},
            "other arguments",
        ),
        ({"between": lambda x: x.cumsum(1)}, "cumsum in the model is not known to keep tokens apart"),
        ({"between": lambda x: x.roll(1, 1)}, "roll in the model is not known"),
        ({"between": lambda x: functional.pad(x, (0, 0, 1, 0))[:, :-1]}, "shifts or pads tokens"),
        ({"between": lambda x: (x @ x.mT).softmax(-1) @ x}, "every pair of tokens"),
        ({"between": lambda x: x.transpose(1, 2).softmax(-1).transpose(1, 2)}, "goes along the tokens"),
        ({"between": lambda x: functional.scaled_dot_product_attention(x, x, x)}, "is not causal"),
        ({"heads": lambda x: x.reshape(len(x), 2, -1, 8)}, "in another order"),
        (
            {"places": lambda start, stop: torch.arange(stop - start)},
            "counts tokens from 0 in a slice that begins at 3",
        ),
        (
            {
                "loss": lambda output, batch: functional.cross_entropy(
                    output[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
                )
            },
            "shifts or pads",
        ),
    ],
)
def test_what_brings_tokens_together_is_refused_before_training(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(Mistake, match=why):
        made = own(**parts)
        build_run(made, (SequencePipeline(2),), made.model())


@pytest.mark.parametrize(
    "name, why",
    [
        ("bert", "attention in bert.encoder.layer.0.attention.self is not causal"),
        ("gemma", "is given a mask"),
        ("recurrent", "no forward of the model can be told where a slice begins"),
        ("mixtral", "topk in model.layers.0.mlp.gate is not known"),
    ],
)
def test_models_that_are_not_causal_or_not_known_are_refused(name: str, why: str) -> None:
    with pytest.raises(Mistake, match=why):
        build_run(job(name), (SequencePipeline(2),), seeded(job(name)))


def test_attention_that_is_written_out_is_refused() -> None:
    made = Job(
        hugging("LlamaForCausalLM", "LlamaConfig", **SMALL, attn_implementation="eager"), lambda: [tokens(LENGTH)]
    )
    with pytest.raises(Mistake, match='attn_implementation="sdpa"'):
        build_run(made, (SequencePipeline(2),), made.model())


def test_a_batch_with_padding_is_refused_and_one_without_is_not() -> None:
    batch = tokens(LENGTH)
    full = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    made = replace(llama(), data=lambda: [full])
    assert apart(gradients(made, (SequencePipeline(3),))[1], gradients(llama(), ())[1]) < 1e-6
    padded = {**batch, "attention_mask": (torch.arange(LENGTH) < 20).long().expand_as(batch["input_ids"])}
    with pytest.raises(Mistake, match="is given a mask"):
        gradients(replace(llama(), data=lambda: [padded]), (SequencePipeline(3),))
    with pytest.raises(Mistake, match="is given a mask"):
        gradients(made, (SequencePipeline(3),), padded)


def test_a_weight_that_does_not_count_tokens_is_refused() -> None:
    with pytest.raises(Mistake, match="must count tokens"):
        gradients(own(weight=len), (SequencePipeline(2),))


def test_slices_that_can_not_be_are_refused() -> None:
    for wrong in ({"slices": 0}, {"lengths": "3,0"}, {"lengths": "a"}):
        with pytest.raises(Mistake):
            SequencePipeline(**wrong)
    with pytest.raises(Mistake, match="30 slices of a sequence of 24 tokens"):
        gradients(gpt(), (SequencePipeline(30),))
    assert SequencePipeline(4).cut(2) == SequencePipeline(lengths="4,2,2").cut(2) == (1, 1), (
        "a batch that comes later may be shorter"
    )
    assert SequencePipeline(lengths="4,2,2").cut(16) == (8, 4, 4) and SequencePipeline(lengths="4,2,2").cut(8) == (
        4,
        2,
        2,
    )
    assert SequencePipeline(lengths="90,1,1").cut(5) == (2, 1, 2), "every slice has a token"


def test_lengths_follow_from_what_slices_of_the_model_take_and_nothing_is_left_behind() -> None:
    made = one_sample()
    run = build_run(made, (), seeded(made))
    found = best_tokens(run, next(iter(made.data())), stages=2, granularity=8)
    assert sum(found.cut(40)) == 40 and found.lengths
    assert all(one.grad is None for one in run.model.parameters()) and all(
        "forward" not in vars(part) for part in run.model.modules()
    )
