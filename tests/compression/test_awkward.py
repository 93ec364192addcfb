"""Models and data that are made otherwise than most: packed as they are and answering as they did, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.compression.calibration.fidelity import OutputMeasure, collect_outputs, fidelity
from shoestring.compression.formats.packed_modules import formats_of
from shoestring.compression.loading.source import samples_of
from shoestring.core.errors import Mistake, OverBudget
from tests.compression.models import batches, called, loss, vectors, words


class Scaled(nn.Embedding):
    """As Gemma's: what is looked up is multiplied."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index) * 4


class Told(nn.Module):
    """Words through a table, then a layer."""

    def __init__(self, table: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(width, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.table(input_ids))


class Gathered(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(40, 16, mode="mean"), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.bag(input_ids))


class Ordered(nn.Module):
    """A parameter that is whole numbers, and one that is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(16), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64), requires_grad=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x[:, self.order] * self.turn).real)


class Remembering(nn.Linear):
    """State that is saved and no tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Sparsely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.register_buffer("mask", torch.eye(16).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.mask @ x.T).T)


class Last(nn.Module):
    """The first of what a layer gives."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x.view(len(x), 4, -1))
        return self.head(found[0] if isinstance(found, tuple) else found)


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(16, 16, 8)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 4))])

    def forward(self, x: Tensor) -> Tensor:
        return (self.both(x, x) * self.scale[0]) @ self.scale[1]


class WithNothing(nn.Module):
    """A matrix without rows, a layer of a single number, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.gain = nn.Parameter(torch.empty(0, 16)), nn.Parameter(torch.tensor(1.5))
        self.one, self.head = nn.Linear(1, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, x @ self.rows.T], 1) * self.gain) + self.one(x[:, :1])


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


WORKING: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "scaled embedding": (lambda: Told(Scaled(40, 16)), words),
    "embedding of limited norms": (lambda: Told(nn.Embedding(40, 16, max_norm=0.5)), words),
    "embedding bag": (Gathered, words),
    "whole and complex parameters": (Ordered, vectors(16)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)),
        vectors(16),
    ),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)),
        vectors(16),
    ),
    "gru": (lambda: Last(nn.GRU(16, 12, bidirectional=True, batch_first=True), 24), vectors(64)),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (4, 16)), nn.ConvTranspose1d(4, 8, 3), nn.Flatten(), nn.Linear(144, 4)),
        vectors(64),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 8, 3), nn.Flatten(), nn.Linear(64, 4)),
        vectors(64),
    ),
    "torch's own transformer": (lambda: Last(encoder(), 16), vectors(64)),
    "attention": (lambda: Told(nn.Sequential(nn.Embedding(40, 16), Itself()), 16), words),
    "bilinear, and a list of parameters": (Paired, vectors(16)),
    "a matrix without rows": (WithNothing, vectors(16)),
    "float64": (lambda: nn.Sequential(Wider(), nn.Linear(16, 4).double()), vectors(16)),
}


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x, x, x)[0]


class Wider(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def job_for(make: Callable[[], nn.Module], batch: Callable[[torch.Generator], Any], count: int = 6) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return Job(
        model=model,
        data=lambda: batches(count, batch),
        held_out=lambda: batches(count, batch, seed=1),
        forward=called,
        loss=loss,
    )


@pytest.mark.parametrize("name", WORKING)
def test_awkward_models_are_packed_and_answer_as_before(name: str, tmp_path: Path) -> None:
    job = job_for(*WORKING[name])
    close = shoestring.compress(job, tmp_path / "close", use=["Quantize(bits=8)"], samples=32)
    assert close.report["fidelity"]["mean"]["measured"] > 0.999, (
        "eight bits change nearly nothing, whatever the module does with them"
    )
    half = shoestring.compress(job, tmp_path / "half", use=["Half()"], samples=32)
    assert half.report["fidelity"]["worst"]["measured"] > 0.99999
    for one in (close, half):
        size = one.report["size_bytes"]
        assert size["predicted"] == size["measured"]
        loaded, dense = (shoestring.load(one.folder, model=job.model, decoded=decoded) for decoded in (False, True))
        batch = batches(1, WORKING[name][1])[0]
        assert torch.equal(called(loaded, batch), called(one.model, batch)) and torch.equal(
            called(dense, batch), called(loaded, batch)
        )


@pytest.mark.parametrize("use", [None, "Codebook(bits=4)", "Int8()", "Sparsify(share=0.5)"])
def test_a_matrix_without_rows_stops_no_technique(use: str | None, tmp_path: Path) -> None:
    job = job_for(WithNothing, vectors(16))
    wanted: dict[str, Any] = {"size": "4KB"} if use is None else {"use": [use]}
    small = shoestring.compress(job, tmp_path / "small", samples=32, **wanted)
    assert [one["bytes"] for one in small.report["layers"] if one["name"] == "rows"] == [0]


@pytest.mark.parametrize("use", ["Prune(neurons=0.5)", "Factorize(share=0.9)"])
def test_a_structure_that_saves_no_bytes_is_refused_with_the_bytes(use: str, tmp_path: Path) -> None:
    job = job_for(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), vectors(16))
    plain = shoestring.compress(job, tmp_path / "half", use=["Half()"], samples=32).report["plain"]["size_bytes"]
    with pytest.raises(Mistake, match=rf"no smaller: [\d,]+ bytes, where the model as it is takes {plain:,}"):
        shoestring.compress(job, tmp_path / "small", use=[use, "Quantize(bits=4)"], samples=32)
    assert not (tmp_path / "small").exists()


def eight_bit_floats() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 4), Wider())
    model.unused = nn.Parameter(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Sequential(Remembering(16, 4)), "get_extra_state"),
        (Sparsely, "mask is a torch.sparse_coo"),
        (eight_bit_floats, "unused is a torch.strided tensor of torch.float8"),
    ],
)
def test_what_a_folder_can_not_hold_is_refused_before_anything_is_written(
    make: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    with pytest.raises(Mistake, match=said):
        shoestring.compress(job_for(make, vectors(16)), tmp_path / "small", use=["Half()"], samples=32)
    assert not (tmp_path / "small").exists()


def test_the_users_own_model_stays_as_it_is(tmp_path: Path) -> None:
    job = job_for(lambda: nn.Linear(16, 4), vectors(16))
    model = nn.Linear(16, 4).train()
    before = model.weight.detach().clone()
    small = shoestring.compress(job, tmp_path / "small", use=["Quantize(bits=2)"], samples=32, model=model)
    assert (
        model.training and model.weight.requires_grad and torch.equal(model.weight, before) and small.model is not model
    )


@pytest.mark.parametrize("held_out", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_batches_are_cut_for_their_three_uses(count: int, held_out: int) -> None:
    job = Job(
        model=lambda: nn.Linear(16, 4),
        data=lambda: batches(count, vectors(16)),
        forward=called,
        loss=loss,
        held_out=(lambda: batches(held_out, vectors(16), seed=1)) if held_out else None,
    )
    given = samples_of(job)
    uses = [torch.cat([batch[0] for batch in some]) for some in (given.calibration, given.checked, given.unseen)]
    assert all(len(one) for one in uses)
    rows = [tuple(row.tolist()) for one in uses for row in one]
    assert len(set(rows)) == len(rows), "none has two uses"


def test_a_single_sample_is_too_few() -> None:
    one = [(torch.zeros(1, 16), torch.zeros(1, dtype=torch.long))]
    with pytest.raises(Mistake, match="needs some to calibrate and others to measure"):
        samples_of(Job(model=lambda: nn.Linear(16, 4), data=lambda: one, forward=called, loss=loss))


def test_what_is_nearest_is_told_though_it_answers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bits for every weight can break a model altogether; its size is still what could be reached."""
    monkeypatch.setattr(
        "shoestring.compression.calibration.calibration.collect_outputs",
        lambda model, forward, given, measures: [
            {name: value * torch.inf if formats_of(model) else value for name, value in one.items()}
            for one in collect_outputs(model, forward, given, measures)
        ],
    )
    job = job_for(lambda: nn.Linear(64, 64), vectors(64))
    with pytest.raises(OverBudget) as told:
        shoestring.compress(job, tmp_path / "small", size="2KB", samples=16)
    nearest: Any = told.value.nearest
    assert 2000 < nearest.predicted["size_bytes"] < 4000 and nearest.predicted["quality"] == 0


def test_what_is_not_finite_has_no_fidelity_and_an_original_must_be_finite() -> None:
    wanted, broken = torch.ones(3, 4), torch.ones(3, 4)
    broken[1, 2] = torch.nan
    for how in (OutputMeasure("y", "cosine"), OutputMeasure("y", "kl"), OutputMeasure("y", "r2", variance=(1.0,))):
        found = fidelity([{"y": broken}], [{"y": wanted}], [how])
        assert found.mean == pytest.approx(2 / 3) and found.worst == 0
        with pytest.raises(Mistake, match="the original's y has numbers that are not finite"):
            fidelity([{"y": wanted}], [{"y": broken}], [how])


def test_a_loss_that_does_not_work_is_told(tmp_path: Path) -> None:
    def broken(output: Tensor, batch: Any) -> Mapping[str, Tensor]:
        raise KeyError("labels")

    job = Job(model=lambda: nn.Linear(16, 4), data=lambda: batches(6, vectors(16)), forward=called, loss=broken)
    small = shoestring.compress(job, tmp_path / "small", use=["Half()"], samples=16)
    assert any("KeyError: 'labels'" in note for note in small.report["notes"]) and not small.report["metric"]
