"""Stages are tried against one process on numbers: whatever a model collects from several blocks is right there, or refused with why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.training.evidence.trials.stages import try_in_stages
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.planner import Planner
from tests.awkward import Work
from tests.models import hugging, job, seeded
from tests.training.pipeline.cutting import alone, apart, cut
from tests.training.pipeline.partition.test_chain import (
    Body,
    CountsInPython,
    Detached,
    KeepsForLater,
    PartlyDetached,
    a_job,
)

slow = pytest.mark.slow
NEAR = 2e-5
PLANS = (
    Pipeline(2, 1),
    Pipeline(3, 2, balance=(1, 2, 1)),
    Pipeline(2, 2, "gpipe"),
    Pipeline(2, 2, "interleaved", chunks=2),
    Pipeline(2, 2, "zero-bubble"),
)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
HIDDEN = {
    "gpt2": hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=16),
    "bert": hugging("BertModel", "BertConfig", **SIZES),
    "llama": hugging("LlamaForCausalLM", "LlamaConfig", **SIZES),
    "t5": hugging(
        "T5ForConditionalGeneration", "T5Config", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    ),
}


def of_hidden_states(name: str) -> Job:
    """A loss over the hidden states of all layers, which transformers collects by hooks that the first forward adds."""
    chance = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 50, (4, 8), generator=chance) for _ in range(3)]

    def forward(model: nn.Module, batch: Tensor) -> Any:
        more = {"decoder_input_ids": batch} if name == "t5" else {}
        return model(input_ids=batch, output_hidden_states=True, **more)

    def loss(output: Any, batch: Tensor) -> Tensor:
        kinds = ("encoder_hidden_states", "decoder_hidden_states") if name == "t5" else ("hidden_states",)
        return sum((state.square().mean() for kind in kinds for state in output[kind]), torch.zeros(()))

    return Job(
        model=HIDDEN[name],
        data=lambda: batches,
        forward=forward,
        loss=loss,
        steps=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            name,
            plan,
            id=f"{name} {plan.schedule} {plan.stages}",
            marks=() if (name, plan) in [("bert", PLANS[1]), ("t5", PLANS[0])] else slow,
        )
        for name in HIDDEN
        for plan in PLANS
    ],
)
def test_hidden_states_are_collected_once(name: str, plan: Pipeline) -> None:
    made = of_hidden_states(name)
    assert apart(cut(made, plan, 2), alone(made, 2)) <= NEAR
    assert try_in_stages(made, lambda: seeded(made), plan).difference == ""


def test_segformer_is_cut() -> None:
    """Its decoder takes what hooks have collected from the encoder."""
    model = hugging(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    batches = [(torch.randn(2, 3, 32, 32), torch.randint(0, 3, (2, 32, 32)))] * 2
    made = Job(
        model=model,
        data=lambda: batches,
        forward=lambda model, batch: model(pixel_values=batch[0], labels=batch[1]),
        loss=lambda output, batch: output.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        steps=2,
    )
    assert apart(cut(made, Pipeline(2, 1)), alone(made)) <= NEAR


# What people collect with


COLLECTED = threading.local()  # a worker of `cut` is a thread


def collected() -> list[Tensor]:
    if not hasattr(COLLECTED, "found"):
        COLLECTED.found = []
    found: list[Tensor] = COLLECTED.found
    return found


def with_collected(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean() + sum(one.square().mean() for one in collected())


class ByHooks(Body):
    """Into a global list, which a forward empties first."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.body:
            block.register_forward_hook(lambda module, given, output: collected().append(output))

    def forward(self, x: Tensor) -> Any:
        collected().clear()
        return super().forward(x)


class HooksOfOneForward(Body):
    def forward(self, x: Tensor) -> Any:
        found: list[Tensor] = []
        handles = [
            block.register_forward_hook(lambda module, given, output: found.append(output)) for block in self.body
        ]
        output = super().forward(x)
        for handle in handles:
            handle.remove()
        return [output, *found]


class HooksOnce(Body):
    """The first forward adds hooks, and remembers that it did."""

    hooked = False

    def forward(self, x: Tensor) -> Any:
        if not self.hooked:
            for block in self.body:
                block.register_forward_hook(lambda module, given, output: collected().append(output))
            self.hooked = True
        collected().clear()
        return super().forward(x)


class Storing(Work):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class KeptInBlocks(Body):
    def __init__(self) -> None:
        super().__init__(Storing)

    def forward(self, x: Tensor) -> Any:
        return [super().forward(x), *(block.kept for block in self.body)]


class InDicts(Body):
    def forward(self, x: Tensor) -> Any:
        found: dict[str, Any] = {"states": [], "deep": {"means": []}}
        for block in self.body:
            x = block(x)
            found["states"].append(x)
            found["deep"]["means"].append(x.square().mean())
        return found | {"output": self.last(x)}


def of_dicts(output: Any, batch: Tensor) -> Tensor:
    """A mean over samples: the square of a batch's mean would be another number in pieces."""
    states = sum(one.square().mean() for one in (output["output"], *output["states"]))
    return states + sum(output["deep"]["means"])  # type: ignore[no-any-return]


class CountsCalls(Body):
    """In an attribute, before the first block."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x / self.calls)


class CountsFromTheHundredth(CountsCalls):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return Body.forward(self, x if self.calls < 100 else x / 2)


CALLS: list[int] = []  # everybody's: which of them a block sees depends on who else calls


class CountingBlock(Work):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return super().forward(x) / len(CALLS)


class Counting(Body):
    """A global list: nothing that the model keeps changes, and every worker would have a list of its own."""

    def __init__(self) -> None:
        CALLS.clear()
        super().__init__(CountingBlock)


RIGHT: list[tuple[type[Body], Callable[..., Tensor] | None]] = [
    (ByHooks, with_collected),
    (HooksOfOneForward, None),
    (HooksOnce, with_collected),
    (InDicts, of_dicts),
    (Detached, None),
    (PartlyDetached, None),
]


def of(model: type[Body], loss: Callable[..., Tensor] | None = None) -> Job:
    return a_job(model, **({} if loss is None else {"loss": loss}))


@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(plan, marks=slow) for plan in PLANS[1:])], ids=lambda plan: plan.schedule
)
@pytest.mark.parametrize(("model", "loss"), RIGHT, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_right_in_stages_passes_the_trial(
    model: type[Body], loss: Callable[..., Tensor] | None, plan: Pipeline
) -> None:
    made = of(model, loss)
    assert try_in_stages(made, lambda: seeded(made), plan).difference == ""
    assert apart(cut(made, plan, 3), alone(made, 3)) <= NEAR


@pytest.mark.parametrize(
    ("model", "plan", "told"),
    [
        (
            KeptInBlocks,
            Pipeline(2, 1),
            r"uses a tensor that body\.0 gave in an object which nobody can look into, or left somewhere",
        ),
        (CountsInPython, Pipeline(2, 1), "keeps something else"),
        (KeepsForLater, Pipeline(2, 1), "an earlier forward left"),
        (CountsCalls, Pipeline(2, 1, "interleaved", chunks=2), "once for each of its chunks"),
        (CountsFromTheHundredth, Pipeline(2, 1, "interleaved", chunks=2), "once for each of its chunks"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_would_be_different_is_refused(model: type[Body], plan: Pipeline, told: str) -> None:
    made = of(model)
    with pytest.raises(AssertionError, match=told):
        assert (found := try_in_stages(made, lambda: seeded(made), plan)).difference == "", found.difference


def test_a_wrong_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that forgets gradients, or adds those of a piece twice."""
    from shoestring.training.pipeline.stages.stages import Stages

    made = of(Body)
    send = Stages.send_gradients

    def doubled(self: Stages, inputs: list[Tensor], *words: Any) -> None:
        for one in inputs:
            one.grad = None if one.grad is None else 1.01 * one.grad
        send(self, inputs, *words)

    monkeypatch.setattr(Stages, "send_gradients", doubled)
    assert "of its size apart" in try_in_stages(made, lambda: seeded(made), Pipeline(2, 1)).difference
    monkeypatch.setattr(Stages, "send_gradients", lambda self, *words: None)
    assert "sent nothing" in try_in_stages(made, lambda: seeded(made), Pipeline(2, 1)).difference


def test_a_plan_is_refused_before_it_says_how_exact_it_is() -> None:
    planner = Planner(of(Counting), Hardware(), devices=2)
    with pytest.raises(
        Mistake, match=r"the stages of Pipeline.* were tried in one process, and the loss is .* in stages and"
    ):
        planner.outcome(None, (Pipeline(2, 2),))
    fine = Planner(of(InDicts, of_dicts), Hardware(), devices=2).outcome(None, (Pipeline(2, 2),)).chosen
    assert "not tried" not in fine.basis


def test_what_was_not_tried_is_told() -> None:
    described = Hardware(described=True, memory=1 << 40, base=0)
    plan = Planner(job("chain"), described, devices=2).outcome(None, (Pipeline(2, 2),)).chosen
    assert (
        "whether stages compute the numbers of one process was not tried: no real step could be run here" in plan.basis
    )
