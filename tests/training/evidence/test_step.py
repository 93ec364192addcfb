"""Models as other libraries write them: layers in nested lists, layers that are called by other methods than forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job, Mistake
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Findings, StandingBytes, Workers
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import bring_home
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.measure.blocks import blocks
from shoestring.measure.timeline import peak
from shoestring.runs.checkpoints.packing import pack, unpack
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.evidence.step import traits_of
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload import offload_optimizer as offload
from shoestring.training.memory.offload import offloaded_optimizer, streaming
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import of_world, with_traits
from tests.models import seeded

WIDE = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(WIDE), nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(self.norm(x)).chunk(3, -1)
        out: Tensor = self.outward(nn.functional.scaled_dot_product_attention(q, k, v))
        return out


def dense() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))


class Nested(nn.Module):
    """A transformer whose layers are lists of two."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), dense()]) for _ in range(depth)])
        self.head = nn.Linear(WIDE, 10)

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:  # type: ignore[misc]
            x = x + attention(x)
            x = x + mlp(x)
        out: Tensor = self.head(x.mean(1))
        return out


class Named(Nested):
    """The same with dicts, and a layer that is a class without a forward."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"norm": nn.LayerNorm(WIDE), "attention": Attention(), "mlp": dense()}) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["mlp"](x)
        out: Tensor = self.head(x.mean(1))
        return out


class Coupling(nn.Module):
    """A layer of a flow: training runs it backwards, by `inverse`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDE // 2, 4 * WIDE), nn.ReLU(), nn.Linear(4 * WIDE, WIDE))

    def shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(x).chunk(2, -1)
        return torch.tanh(scale), shift

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        one, other = z.chunk(2, -1)
        scale, shift = self.shift(one)
        return torch.cat([other * scale.exp() + shift, one], -1), scale.sum(-1)

    def inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        other, one = x.chunk(2, -1)
        scale, shift = self.shift(one)
        return torch.cat([one, (other - shift) * (-scale).exp()], -1), -scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList([Coupling() for _ in range(4)])

    def log_prob(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for flow in reversed(self.flows):
            x, log = flow.inverse(x)  # type: ignore[operator]
            total = total + log
        return total - 0.5 * x.square().sum(-1)


def classes(model: type[nn.Module], **more: Any) -> Job:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 32, WIDE, generator=draw), torch.randint(10, (8,), generator=draw)
    return Job(
        model=model,
        data=lambda: [(x, y)] * 9,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        steps=3,
        **more,
    )


def density() -> Job:
    x = torch.randn(256, WIDE, generator=torch.Generator().manual_seed(0))
    return Job(
        model=Flow,
        data=lambda: [x] * 9,
        forward=lambda model, batch: model.log_prob(batch),
        loss=lambda output, batch: -output.mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        steps=3,
    )


def weights_after(made: Job, techniques: tuple[Technique, ...]) -> Tensor:
    model = seeded(made)
    run = build_run(made, techniques, model)
    for _ in steps(run, islice(Feed(made), 3)):
        pass
    bring_home(run)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


JOBS = {"lists": lambda: classes(Nested), "dicts": lambda: classes(Named), "a flow": density}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lists", [f"layers.{layer}.{part}" for layer in range(4) for part in range(2)]),
        ("dicts", [f"layers.{layer}.{part}" for layer in range(3) for part in ("attention", "mlp")]),
        ("a flow", [f"flows.{layer}" for layer in range(4)]),
    ],
)
def test_blocks_are_modules_that_can_be_called(name: str, found: list[str]) -> None:
    assert list(blocks(JOBS[name]().model())) == found


def test_a_model_that_is_nothing_but_a_list_of_small_layers_has_those_as_blocks() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"first": nn.Linear(2, 2), "more": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})

    assert list(blocks(Small())) == ["parts.first", "parts.more.0"]


@pytest.mark.parametrize("technique", [Checkpoint(every=1), Checkpoint(every=2), OffloadActivations(), OffloadModel()])
@pytest.mark.parametrize("name", JOBS)
def test_what_is_nested_or_called_by_another_method_is_trained_to_the_same_bits_in_the_bytes_that_were_rehearsed(
    name: str, technique: Technique
) -> None:
    made = JOBS[name]()
    assert torch.equal(weights_after(made, (technique,)), weights_after(made, ()))
    predicted = peak(rehearse(made, (technique,))).bytes
    assert predicted == peak(track(made, (technique,), seeded(made))).bytes
    assert predicted < peak(rehearse(made, ())).bytes


def test_the_methods_of_a_model_are_its_own_again_after_a_step() -> None:
    made = density()
    model = seeded(made)
    for _ in steps(build_run(made, (Checkpoint(every=1),), model), islice(Feed(made), 2)):
        pass
    assert not any({"forward", "inverse", "shift"} & set(module.__dict__) for module in model.modules())


class Spectral(nn.Module):
    """Weights of real and of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDE, WIDE)
        self.weight = nn.Parameter(torch.randn(9, WIDE, WIDE, dtype=torch.cfloat) / WIDE)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.einsum("bkd,kde->bke", torch.fft.rfft(x, dim=1), self.weight)
        return torch.relu(torch.fft.irfft(found, n=x.shape[1], dim=1) + self.mix(x))


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, WIDE, sparse=True)
        self.blocks = nn.ModuleList([dense(), dense()])
        self.head = nn.Linear(WIDE, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class InPlace(nn.Module):
    """Changes what goes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return x + torch.tanh(self.work(x))


class ChangingInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlace(), InPlace()])
        self.head = nn.Linear(WIDE, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * 1.0)
        out: Tensor = self.head(x.mean(1))
        return out


def spectral() -> Job:
    x = torch.randn(4, 16, WIDE, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: nn.Sequential(Spectral(), Spectral()),
        data=lambda: [x] * 9,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        steps=3,
    )


def words(momentum: float = 0.9) -> Job:
    draw = torch.Generator().manual_seed(0)
    ids, y = torch.randint(500, (6, 12), generator=draw), torch.randint(10, (6,), generator=draw)
    return Job(
        model=Words,
        data=lambda: [(ids, y)] * 9,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum),
        steps=3,
    )


def complex_weights_after(made: Job, techniques: tuple[Technique, ...]) -> list[Tensor]:
    model = seeded(made)
    run = build_run(made, techniques, model)
    for _ in steps(run, islice(Feed(made), 3)):
        pass
    bring_home(run)
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize(
    "technique", [OffloadOptimizer(), OffloadModel(), StepInBackward(), Checkpoint(every=1), OffloadActivations()]
)
def test_complex_weights_are_trained_to_the_same_bits(technique: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offloaded_optimizer, offload, streaming):
        monkeypatch.setattr(module, "SMALL", 256)  # so that the moments of real and of complex weights leave memory
    plain, other = complex_weights_after(spectral(), ()), complex_weights_after(spectral(), (technique,))
    assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))


def test_what_has_no_kernel_for_complex_weights_is_refused_with_the_reason_and_the_rest_is_planned() -> None:
    planner = Planner(spectral(), Hardware())
    outcome = planner.outcome(None)
    assert (
        dict(outcome.refused)["FusedOptimizer"]
        == "the model has complex weights, and torch's fused kernels are for real ones"
    )
    ledger = planner.ledger()
    ledger = with_traits(of_world(ledger, 2), "own process")
    assert "complex weights" in OffloadModel(moments="8bit").refusal(ledger) and not OffloadModel().refusal(ledger)
    assert "complex weights" in DataParallel().refusal(ledger)


@pytest.mark.parametrize(
    "technique", [None, Accumulate(2), Checkpoint(every=1), OffloadActivations(), StepInBackward()]
)
def test_sparse_gradients_are_tracked_and_trained_on(technique: Technique | None) -> None:
    techniques = (technique,) if technique else ()
    made = words(0.0 if isinstance(technique, Accumulate) else 0.9)
    log = track(made, techniques, seeded(made))
    assert "sparse gradients" in log.traits or isinstance(technique, StepInBackward)
    assert peak(log).bytes > 500 * WIDE * 4
    assert torch.allclose(weights_after(made, techniques), weights_after(made, ()), atol=1e-6)


def test_what_can_not_step_sparse_gradients_is_refused_with_the_reason() -> None:
    made = words()
    traits = frozenset(traits_of(made, track(made, (), seeded(made)), own_process=True))
    ledger = Ledger((), standing=StandingBytes(optimizer=1.0), workers=Workers(2), findings=Findings(traits))
    for technique in (
        FusedOptimizer(),
        OffloadModel(),
        OffloadOptimizer(),
        DataParallel(),
        Shard(),
        DropStragglers(),
        LocalSteps(),
        CompressGradients(),
    ):
        assert "sparse gradients" in technique.refusal(of_world(ledger, 3)), technique
    assert not StepInBackward().refusal(ledger) and not Checkpoint().refusal(ledger)


def test_sparse_moments_are_saved_and_come_back_the_same() -> None:
    sparse = torch.sparse_coo_tensor([[3, 1, 3]], torch.randn(3, 2), (5, 2), check_invariants=True)
    tensors: dict[str, Any] = {}
    back = unpack(pack({"momentum": sparse}, tensors, "state"), tensors)["momentum"]
    assert back.is_coalesced() == sparse.is_coalesced() and torch.equal(back._values(), sparse._values())
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_a_candidate_that_fails_in_its_rehearsal_is_passed_over_with_the_reason() -> None:
    planner = Planner(classes(ChangingInputs), Hardware(flops=1e9), catalogue=(Checkpoint, Hopeful))
    outcome = planner.outcome(None)
    assert outcome.chosen.techniques == ()
    told = [why for plan, why in outcome.runners_up if Hopeful() in plan.techniques]
    assert told == ["it fails when it is rehearsed: RuntimeError: not with this model"]
    assert sum(Hopeful() in one.techniques for one, _ in outcome.runners_up) == 1  # and no other plan with it was tried


def test_a_technique_that_was_asked_for_and_fails_is_told_by_name() -> None:
    with pytest.raises(Mistake, match=r"^Checkpoint\(every=1\) can't be used for this job: "):
        Planner(classes(ChangingInputs), Hardware()).outcome(None, (Checkpoint(every=1),))


def test_a_model_whose_blocks_change_what_goes_into_them_is_planned_and_trained_plainly() -> None:
    outcome = Planner(classes(ChangingInputs), Hardware(), catalogue=(Checkpoint, OffloadActivations)).outcome(None)
    assert outcome.chosen.techniques == ()


@dataclass(frozen=True)
class Hopeful(Technique):
    """Promises much and fails."""

    exact: ClassVar[bool] = True
    why: ClassVar[str] = "it would be fast"

    def cost(self, ledger: Ledger) -> Ledger:
        blocks = tuple(block.with_changes(forward=0.0, backward=0.0) for block in ledger.blocks)
        return replace(ledger, blocks=blocks, update=replace(ledger.update, seconds=0.0))

    def apply(self, run: Run) -> Run:
        raise RuntimeError("not with this model")


class ByWeights(nn.Module):
    """Uses the weights of its layers and never calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(WIDE, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(nn.functional.linear(x, block[0].weight, block[0].bias))  # type: ignore[index]
        out: Tensor = self.head(x.mean(1))
        return out


@pytest.mark.parametrize("technique", [Checkpoint(every=1), OffloadActivations()])
def test_blocks_that_are_never_called_are_told_of_and_nothing_is_wrapped_for_nothing(technique: Technique) -> None:
    planner = Planner(classes(ByWeights), Hardware())
    with pytest.raises(Mistake, match="no block of the model was called as a module"):
        planner.outcome(None, (technique,))
    assert {"Checkpoint", "OffloadActivations"} <= set(dict(planner.outcome(None).refused))


def test_stream_names_the_weight_that_is_used_outside_of_its_module() -> None:
    with pytest.raises(Mistake, match=r"uses the weight blocks\.0\.0\.weight outside of the module that it belongs to"):
        rehearse(classes(ByWeights), (OffloadModel(),))


def test_a_technique_that_was_asked_for_and_saves_nothing_says_so() -> None:
    def small(model: nn.Module, batch: Any) -> Any:
        return model(batch[0][:, :1])

    heavy = replace(
        classes(Nested, forward=small), optimizer=torch.optim.AdamW
    )  # hardly any activations: the peak is in the update
    plan = Planner(heavy, Hardware()).outcome(None, (Checkpoint(every=1),)).chosen
    assert (
        "Checkpoint(every=1) saves nothing here: the peak of tensors is" in plan.basis and "in the update" in plan.basis
    )
    assert (
        "saves nothing" not in Planner(classes(Nested), Hardware()).outcome(None, (Checkpoint(every=1),)).chosen.basis
    )


@pytest.mark.parametrize("name", JOBS)
def test_a_group_can_part_the_weights_of_what_is_nested_or_called_by_another_method(name: str) -> None:
    grouped = replace(
        JOBS[name](), mesh=on_one_axis(Link(0, 2))
    )  # the rehearsal refuses a weight that is used while it is not there
    whole, parted = (peak(rehearse(grouped, (Shard(stage=stage),))).bytes for stage in (1, 3))
    assert parted < whole
