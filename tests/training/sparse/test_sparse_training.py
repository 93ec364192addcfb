"""Techniques that make weights zero in training: what comes out, beside what, on which models, and that being left changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake
from shoestring.core.model.masks import seed_mask, seed_of, zeros_of
from shoestring.core.workers.mesh import Mesh
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.runs.reports.report import report_of
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.sparse.l0 import L0
from shoestring.training.sparse.magnitude_prune import MagnitudePrune
from shoestring.training.sparse.random_prune import RandomPrune
from shoestring.training.sparse.variational_dropout import VariationalDropout
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import job as usual_job
from tests.models import seeded
from tests.training.test_promises import STEPS, TOLERANCE, drifted, ledger, sgd, weights_after
from tests.training.thread_links import in_threads

KINDS: list[Any] = [MagnitudePrune, RandomPrune, L0, VariationalDropout]
GATED: list[Any] = [L0, VariationalDropout]
INPUTS = [torch.randn(16, 12, generator=torch.Generator().manual_seed(number)) for number in range(6)]
BATCHES = [(x, x[:, :4].argmax(1)) for x in INPUTS]
WEIGHTS = ["0.weight", "2.weight", "4.weight"]
pytestmark = pytest.mark.filterwarnings("ignore:.* is changed for this job")


def net() -> nn.Module:
    layers = nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24, bias=False), nn.ReLU(), nn.Linear(24, 4)
    return nn.Sequential(*layers)


def job(model: Callable[[], nn.Module] = net, **more: Any) -> Job:
    return Job(
        **{
            "model": model,
            "data": lambda: BATCHES[:5],
            "held_out": lambda: BATCHES[5:],
            "steps": 40,
            "every": 20,
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            **more,
        }
    )


def trained(made: Job, *techniques: Technique, **more: Any) -> nn.Module:
    torch.manual_seed(made.seed)
    model = made.model()
    list(shoestring.train(made, techniques, model, **more))
    return model


def zeros(model: nn.Module) -> dict[str, int]:
    return {name: int((weight == 0).sum()) for name, weight in model.named_parameters() if weight.dim() > 1}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_share_is_zero_in_an_ordinary_model(kind: Any) -> None:
    model = trained(job(), kind(share=0.8))
    sizes = {name: weight.numel() for name, weight in model.named_parameters() if name in WEIGHTS}
    wanted = (
        sum(zeros_of(size, 0.8) for size in sizes.values())
        if kind is RandomPrune
        else zeros_of(sum(sizes.values()), 0.8)
    )
    assert sum(zeros(model).values()) == wanted
    assert list(model.state_dict()) == list(net().state_dict()), "nothing is left in the model beside its weights"


def test_each_layer_has_the_share_where_it_is_asked_for_so() -> None:
    model = trained(job(), MagnitudePrune(share=0.7, scope="layer", every=5))
    assert list(zeros(model).values()) == [zeros_of(model.get_parameter(name).numel(), 0.7) for name in WEIGHTS]


@pytest.mark.parametrize(
    ("amount_of", "wanted"), [("all", [0.05, 0.1, 0.15, 0.2]), ("left", [0.05, 0.0975, 0.142625, 0.18549375, 0.2])]
)
def test_five_percent_go_every_so_many_steps(amount_of: str, wanted: list[float]) -> None:
    technique = MagnitudePrune(share=0.2, begin=0.1, end=1.0, every=6, amount=0.05, amount_of=amount_of)
    model, found = net(), [0]
    for _ in shoestring.train(job(), (technique,), model):
        found.append(sum(zeros(model).values()))
    whole = sum(model.get_parameter(name).numel() for name in WEIGHTS)
    changed = [step for step in range(1, 41) if found[step] != found[step - 1]]
    assert changed == [4 + 6 * number - 1 for number in range(1, len(wanted) + 1)], "after the update before"
    assert [found[step] / whole for step in changed] == pytest.approx(wanted, abs=1 / whole)


def test_what_is_gone_stays_gone() -> None:
    model, before = net(), set[tuple[str, int]]()
    for _ in shoestring.train(job(), (MagnitudePrune(every=1),), model):
        gone = {
            (name, place)
            for name in WEIGHTS
            for place in (model.get_parameter(name) == 0).flatten().nonzero()[:, 0].tolist()
        }
        assert before <= gone
        before = gone


def test_random_masks_follow_from_a_seed_alone() -> None:
    model = trained(job(), RandomPrune(seed=5))
    for name in WEIGHTS:
        weight = model.get_parameter(name)
        assert torch.equal(weight != 0, seed_mask(weight.shape, 0.9, seed_of(5, name)))


@pytest.mark.parametrize(
    ("of", "group", "dims"), [("rows", 1, (1,)), ("columns", 1, (0,)), ("columns", 12, (0,)), ("matrices", 1, (0, 1))]
)
def test_gates_close_whole_units(of: str, group: int, dims: tuple[int, ...]) -> None:
    share = 0.5
    model = trained(job(), L0(share=share, of=of, group=group, where="2|4"))
    closed = count = 0
    for name in WEIGHTS[1:]:
        weight = model.get_parameter(name).detach()
        if group > 1:
            weight = weight.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1)
        units = (weight == 0).all(dims[0]) if len(dims) == 1 else (weight == 0).all().view(1)
        closed, count = closed + int(units.sum()), count + len(units)
        assert int((weight == 0).sum()) == int(units.sum()) * weight.numel() // len(units), "nothing else is zero"
    assert closed == zeros_of(count, share)
    assert not zeros(model)["0.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_left_goes_on_with_the_same_bits(kind: Any, tmp_path: Path) -> None:
    made, technique = job(), kind(share=0.8, every=3)
    torch.manual_seed(1)
    whole, parts = made.model(), made.model()
    parts.load_state_dict(whole.state_dict())
    steps = list(shoestring.train(made, (technique,), whole, run=tmp_path / "a"))
    found = []
    for _ in range(2):  # it is left while masks change, and after that
        found += list(islice(shoestring.train(made, (technique,), parts, run=tmp_path / "b", save_every=5), 14))
        parts = made.model()
    found += list(shoestring.train(made, (technique,), parts, run=tmp_path / "b"))
    assert [(one.number, one.loss, dict(one.metrics)) for one in found] == [
        (one.number, one.loss, dict(one.metrics)) for one in steps
    ]
    assert report_of(tmp_path / "b").weights_sha256 == report_of(tmp_path / "a").weights_sha256


@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_changes_nothing(kind: Any) -> None:
    assert same(trained(job(), kind(share=0.8)), trained(job(held_out=None), kind(share=0.8)))


@pytest.mark.parametrize("kind", KINDS)
def test_it_composes_with_techniques_that_keep_the_gradients(kind: Any) -> None:
    """In pieces, with blocks computed again, with fused kernels: as alone, up to rounding."""
    alone = weights_after("chain", (kind(),))
    for other in (Checkpoint(every=1), Accumulate(2), FusedOptimizer()):
        assert not conflict((other, kind()))
        off = (weights_after("chain", (other, kind())) - alone).abs()
        assert torch.equal(off, torch.zeros_like(off)) if isinstance(other, Checkpoint) else off.max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_add_up_gradients_have_the_same_masks_and_gates(kind: Any) -> None:
    """Two copies, each with half of every batch, end with one process's weights up to rounding, and with the same bits as each other."""
    assert not conflict((DataParallel(), kind()))
    made = usual_job("chain", optimizer=sgd)

    def work(mesh: Mesh) -> Tensor:
        mine = replace(made, mesh=mesh)
        run = build_run(mine, (DataParallel(), kind()), copies[mesh.link.rank])
        for _ in steps(run, islice(Feed(mine, assignment=run.team.assignment), STEPS)):
            pass
        return flat(run.model)

    copies = [seeded(made), seeded(made)]
    one, other = in_threads({"data": 2, "stage": 1, "tensor": 1}, work)
    assert torch.equal(one, other) and (one - weights_after("chain", (kind(),))).abs().max() <= TOLERANCE


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().float().reshape(-1) for value in model.state_dict().values()])


@pytest.mark.parametrize("kind", KINDS)
def test_the_rehearsal_has_its_bytes_and_operations(kind: Any) -> None:
    made = usual_job("chain", optimizer=sgd)
    for plan in ((kind(),), (Accumulate(2), kind()), (Checkpoint(every=1), kind())):
        predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
        assert peak(predicted).bytes == peak(measured).bytes, plan
        assert predicted.flops.total() == measured.flops.total(), plan
    plain = rehearse(made, ())
    assert predicted.flops.total() >= plain.flops.total() == rehearse(made, (kind(),)).flops.total()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chain", "u-net", "frozen bottom"])
def test_it_drifts_no_further_than_it_states(kind: Any, name: str) -> None:
    assert 0 < drifted(name, weights_after(name, (kind(),))) <= kind().drift(ledger(name)) < 10


@pytest.mark.parametrize("kind", KINDS)
def test_its_conflicts_are_told_with_the_reason(kind: Any) -> None:
    assert "would not be sparse" in conflict((EMA(), kind()))
    for other in KINDS:
        assert other is kind or "choose one" in conflict((kind(), other()))


class Tied(nn.Module):
    """Its head is its embedding; tokens are taken from what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(self.embedding((x > 0).long()).mean(1))))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x.view(-1, 4, 3))[0][:, -1])
        return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(x.view(-1, 1, 12)).mean(1))
        return found


class Aside(nn.Module):
    """It uses a weight without calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


AWKWARD: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tied": (Tied, 2),
    "recurrent": (Recurrent, 5),
    "attention": (Attention, 5),
    "aside": (Aside, 1),
}  # kind -> the model, and how many of its weights become sparse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", AWKWARD)
def test_awkward_models_become_sparse(model: str, kind: Any) -> None:
    made, count = AWKWARD[model]
    found = trained(job(made, steps=20), kind(share=0.8))
    sparse = {name: weight for name, weight in found.named_parameters() if (weight == 0).sum() > 1}
    matrices = sum(weight.numel() for weight in found.parameters() if weight.dim() > 1)
    assert len([one for one in sparse.values() if one.dim() > 1]) <= count
    assert sum(zeros(found).values()) / matrices == pytest.approx(0.8, abs=0.02)
    made().load_state_dict(found.state_dict())


def test_skipped_and_frozen_weights_stay_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = net()
        model.get_parameter("2.weight").requires_grad_(False)
        return model

    assert [
        name for name, count in zeros(trained(job(frozen), MagnitudePrune(skip="4|nothing*"))).items() if count
    ] == ["0.weight"]
    assert [name for name, count in zeros(trained(job(), MagnitudePrune(where="4"))).items() if count] == ["4.weight"]


def test_what_it_is_not_for_is_refused_with_the_reason() -> None:
    for model, said in (
        (lambda: nn.Sequential(nn.LayerNorm(12)), "no weight to make sparse"),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))), "is parametrized"),
    ):
        with pytest.raises(Mistake, match=said):
            trained(job(model), MagnitudePrune())
    with pytest.raises(Mistake, match="no mask would ever change"):
        trained(replace(job(), steps=1), MagnitudePrune())


@pytest.mark.parametrize(
    ("kind", "knobs", "said"),
    [
        (MagnitudePrune, {"scope": "every"}, "all, layer"),
        (MagnitudePrune, {"share": 90}, "share=90"),
        (MagnitudePrune, {"amount": 1.5}, "amount=1.5"),
        (MagnitudePrune, {"amount": 0.05, "amount_of": "some"}, "amount_of"),
        (L0, {"of": "heads"}, "numbers, rows, columns, matrices"),
        (L0, {"group": 4}, "belong together"),
        (L0, {"rate": 0.0}, "rate=0.0"),
        (VariationalDropout, {"begin": 0.7}, "begin=0.7"),
    ],
)
def test_knobs_that_can_not_be_are_refused(kind: Any, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        kind(**knobs)
