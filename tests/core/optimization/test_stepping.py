"""Whether an optimizer's step can be divided is tried on the job's own optimizer, for every way to divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shoestring
from shoestring import Job, Mistake
from shoestring.core.costs.hardware import Hardware
from shoestring.core.optimization.stepping import StepDivision, Stepping
from shoestring.core.running.run import plain_run
from shoestring.measure.blocks import blocks
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.optimizers import Lamb, Lars
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique, check_division
from shoestring.training.tensor.tensor_parallel import TensorParallel

NONE: set[StepDivision] = set()
ALL = set(StepDivision)
COUPLED = {StepDivision.IN_TURNS, StepDivision.APART, StepDivision.IN_PARTS}
LATE = 300


class Plain(optim.Optimizer):
    """Gradient descent, as a user writes it; `factor` says how long its step is, for what all gradients are."""

    def __init__(self, params: Any, lr: float = 0.1, **extra: Any) -> None:
        super().__init__(params, {"lr": lr, **extra})
        self.calls = 0

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        for group in self.param_groups:
            for number, one in enumerate(group["params"]):
                if one.grad is not None:
                    self.move(one, group["lr"] * self.factor(gradients, group), number)

    def move(self, weight: Tensor, rate: float, number: int) -> None:
        assert weight.grad is not None
        weight.add_(weight.grad, alpha=-rate)


class GlobalNorm(Plain):
    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return 1.0 / (1e-6 + float(torch.stack([one.norm() for one in gradients]).norm()))


class GlobalMax(Plain):
    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return 1.0 / (1.0 + float(max(one.abs().max() for one in gradients)))


class Clipping(GlobalNorm):
    """Only where gradients are large."""

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return min(1.0, 100.0 * super().factor(gradients, group))


class CoupledByMark(GlobalNorm):
    """Of weights that the model has marked."""

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        marked = [one.grad for one in group["params"] if getattr(one, "marked", False) and one.grad is not None]
        return super().factor(marked, group) if marked else 1.0


class CoupledBySize(GlobalNorm):
    """Of large weights."""

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        large = [one for one in gradients if one.numel() > 50]
        return super().factor(large, group) if large else 1.0


class SkipsLarge(Plain):
    """Moves no weight while a gradient of one is large."""

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return float(not any(float(one.abs().max()) > 0.1 for one in gradients))


class CoupledLater(GlobalNorm):
    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return super().factor(gradients, group) if self.calls > LATE else 1.0


class LateByState(GlobalNorm):
    """The same, with a counter that each weight has for itself."""

    def move(self, weight: Tensor, rate: float, number: int) -> None:
        self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        super().move(weight, rate if self.state[weight]["step"] > 20 else 0.1, number)


class CoupledByKey(GlobalNorm):
    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return super().factor(gradients, group) if group["joined"] else 1.0


class ByOrder(Plain):
    def move(self, weight: Tensor, rate: float, number: int) -> None:
        super().move(weight, rate * 0.9**number, number)


class Counting(Plain):
    """Steps become shorter with every call: of a stage of a pipeline, as often as of the whole."""

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return 1.0 / self.calls


class SharedState(Plain):
    """A mean that all weights write to."""

    def move(self, weight: Tensor, rate: float, number: int) -> None:
        assert weight.grad is not None
        self.mean = 0.9 * getattr(self, "mean", 1.0) + 0.1 * float(weight.grad.abs().mean())
        super().move(weight, rate / self.mean, number)


class SkipsNan(Plain):
    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        return 0.0 if any(bool(one.isnan().any()) for one in gradients) else 1.0

    def move(self, weight: Tensor, rate: float, number: int) -> None:
        if rate:
            super().move(weight, rate, number)


class ByWeight(Plain):
    def move(self, weight: Tensor, rate: float, number: int) -> None:
        assert weight.grad is not None
        super().move(weight, rate / (1e-6 + float(weight.grad.norm())), number)


class Noisy(Plain):
    def move(self, weight: Tensor, rate: float, number: int) -> None:
        super().move(weight, rate, number)
        weight.add_(torch.randn_like(weight), alpha=0.01 * rate)


class Global(Plain):
    """Its counter is the class's."""

    seen = 0

    def factor(self, gradients: list[Tensor], group: dict[str, Any]) -> float:
        type(self).seen += 1
        return 1.0 / type(self).seen


class GlobalNormSgd(optim.SGD):
    """Looks like one of torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1e-3)
        super().step()


class OwnSgd(optim.SGD):
    """Is one of torch's own, with something that changes nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class NormedAdam(optim.Adam):
    """Looks at whole weights, each by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.div_(one.grad.norm() + 1e-6)
        super().step()


def keyed(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    first, *rest = parameters
    return CoupledByKey([{"params": [first], "joined": False}, {"params": rest, "joined": True}])


def large_ones(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Groups that depend on sizes."""
    every = list(parameters)
    large = [one for one in every if one.numel() > 50]
    return CoupledByKey(
        [{"params": [one for one in every if one.numel() <= 50], "joined": False}, {"params": large, "joined": True}]
    )


def wrapped(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """torch's own, whose step was replaced."""
    every = list(parameters)
    made = optim.SGD(every, lr=0.1)
    before = made.step

    def step(closure: Any = None) -> None:
        nn.utils.clip_grad_norm_(every, 1e-3)
        before()

    made.step = step  # type: ignore[method-assign, assignment]
    return made


def muon(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    return optim.Muon([one for _, one in named_parameters], lr=0.01)


def model(bias: bool = True) -> nn.Module:
    made = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8, bias=bias)) for _ in range(3))
    )
    for one in made.parameters():
        one.marked = one.dim() > 1  # type: ignore[attr-defined]
    return made


def made_job(optimizer: Callable[..., optim.Optimizer], bias: bool = True, **more: Any) -> Job:
    data = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), torch.zeros(4, 8)) for seed in range(3)]
    return Job(
        **{
            "model": lambda: model(bias),
            "data": lambda: data,
            "loss": lambda output, batch: (output - batch[1]).square().mean(),
            "optimizer": optimizer,
            "steps": 3,
        }
        | more
    )


def stepping(optimizer: Callable[..., optim.Optimizer], bias: bool = True) -> Stepping:
    made = model(bias)
    return plain_run(made_job(optimizer, bias), made, blocks(made)).stepping()


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        (GlobalNorm, COUPLED),
        (GlobalMax, COUPLED),
        (Clipping, COUPLED),
        (CoupledByMark, COUPLED),
        (CoupledBySize, COUPLED),
        (SkipsLarge, COUPLED),
        (CoupledLater, COUPLED),
        (LateByState, COUPLED),
        (keyed, COUPLED),
        (large_ones, COUPLED),
        (ByOrder, COUPLED),
        (SharedState, COUPLED),
        (SkipsNan, COUPLED),
        (GlobalNormSgd, COUPLED),
        (wrapped, COUPLED),
        (Noisy, ALL),
        (Global, ALL),
        (Counting, {StepDivision.IN_TURNS, StepDivision.IN_PARTS}),
        (Plain, {StepDivision.IN_PARTS}),
        (ByWeight, {StepDivision.IN_PARTS}),
        (NormedAdam, {StepDivision.IN_PARTS}),
        (Lamb, {StepDivision.IN_PARTS}),
        (lambda parameters: Lars(parameters, lr=0.1), {StepDivision.IN_PARTS}),
        (optim.Adafactor, {StepDivision.IN_PARTS}),
        (optim.AdamW, NONE),
        (lambda parameters: OwnSgd(parameters, lr=0.1, momentum=0.9), NONE),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_step_that_can_t_be_divided_is_recognised_by_what_it_does(
    optimizer: Callable[..., Any], refused: set[StepDivision]
) -> None:
    found = stepping(optimizer)
    assert set(found.reasons) == refused
    assert all(found.reasons.values()) and len(found.traits) == len(refused)


@pytest.mark.parametrize("given", [False, True], ids=["made anew", "given"])
def test_weights_in_the_same_memory_are_moved_together(given: bool) -> None:
    """Two parameters, one a transposed view of the other; a shared parameter and weights side by side are allowed."""

    def views() -> nn.Module:
        made = model(bias=False)
        made[2][2].weight = nn.Parameter(made[0][0].weight.data.t())
        return made

    def side_by_side() -> nn.Module:
        made = model(bias=False)
        made[2][2].weight = made[0][0].weight
        whole = torch.randn(2, 8, 8)
        made[1][0].weight.data, made[1][2].weight.data = whole[0], whole[1]
        return made

    for factory, divisible in ((views, False), (side_by_side, True)):
        made = made_job(optim.SGD, model=factory)
        for technique in (StepInBackward(), OffloadModel(), Pipeline(2), Shard(), TensorParallel(2)):
            with nullcontext() if divisible else pytest.raises(Mistake, match=r"2\.2\.weight are two tensors"):
                check_division((technique,), plain_run(made, factory(), {}))
        ledger = Planner(made, Hardware(), model=factory() if given else None, devices=2, here=2).ledger()
        assert ("are two tensors" in StepInBackward().refusal(ledger)) is not divisible


def test_optimizers_of_matrices_and_of_sparse_gradients_are_tried_on_such() -> None:
    assert set(stepping(muon, bias=False).reasons) == {StepDivision.IN_PARTS}
    assert set(stepping(lambda parameters: optim.SparseAdam(list(parameters)), bias=False).reasons) == {
        StepDivision.IN_PARTS
    }


def test_an_optimizer_that_can_t_be_tried_is_not_taken_to_be_harmless() -> None:
    class Fails(Plain):
        def move(self, weight: Tensor, rate: float, number: int) -> None:
            raise RuntimeError("only weights of a real model")

    found = stepping(Fails)
    assert set(found.reasons) == ALL and "only weights of a real model" in found.why_not(StepDivision.APART)


def test_trying_leaves_the_job_s_weights_and_the_generators_alone() -> None:
    made = model()
    run = plain_run(made_job(Noisy), made, blocks(made))
    before, state = [one.clone() for one in made.parameters()], torch.get_rng_state()
    run.stepping()
    assert all(map(torch.equal, before, made.parameters())) and torch.equal(state, torch.get_rng_state())
    assert not run.optimizer.state and all(one.grad is None for one in made.parameters())


DIVIDING = [StepInBackward(), OffloadModel(), OffloadOptimizer(), Pipeline(2), Shard(), TensorParallel(2)]


@pytest.mark.parametrize("technique", DIVIDING, ids=str)
def test_whoever_divides_a_step_refuses_what_can_t_be_divided_in_planning_and_when_applied(
    technique: TrainingTechnique,
) -> None:
    ledger = Planner(made_job(GlobalNorm), Hardware(), devices=2, here=2).ledger()
    assert "GlobalNorm" in technique.refusal(ledger)
    with pytest.raises(Mistake, match="GlobalNorm"):
        build_run(made_job(GlobalNorm), (technique,), model())


def test_a_script_is_told_and_nothing_is_trained() -> None:
    for call in (
        lambda job: list(shoestring.train(job, (StepInBackward(),))),
        lambda job: shoestring.verify(job, (StepInBackward(),)),
        lambda job: shoestring.plan(job, use=[StepInBackward()]),
    ):
        with pytest.raises(Mistake, match="GlobalNorm moves weights to other values"):
            call(made_job(GlobalNorm))


def test_what_is_allowed_gives_the_bits_of_plain_training() -> None:
    for optimizer in (ByWeight, NormedAdam, optim.Adafactor):
        assert shoestring.verify(made_job(optimizer), (StepInBackward(),)).same_bits, optimizer
