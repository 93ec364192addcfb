"""All outputs count, each by what suits it, and the worst leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shoestring
from shoestring import Job
from shoestring.compression.calibration import output_kinds
from shoestring.compression.calibration.fidelity import OutputMeasure, fidelity
from shoestring.compression.calibration.model_outputs import compared_names, named_tensors
from shoestring.compression.calibration.output_kinds import measures_of
from shoestring.core.errors import Mistake

Loss = Callable[[Any, Any], Tensor]


def made(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def job_of(make: Callable[[], nn.Module], x: tuple[int, ...], loss: Loss, metrics: Any = None, count: int = 8) -> Job:
    """x and labels from 0 to 3, in batches of 16."""

    def data(seed: int) -> list[Any]:
        return [
            (made(seed + number, 16, *x), torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(number)))
            for number in range(count)
        ]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return Job(model=model, data=lambda: data(0), held_out=lambda: data(1000), loss=loss, metrics=metrics)


def kind(
    make: Callable[[], nn.Module], x: tuple[int, ...], loss: Loss, metrics: Any = None
) -> dict[str, tuple[str, int]]:
    job = job_of(make, x, loss, metrics)
    model = job.model().eval().requires_grad_(False)
    return {one.name: (one.measure, one.axis) for one in measures_of(job, model, job.data()[:4])[0]}


class TwoHeads(nn.Module):
    """A detector: classes, and boxes far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Linear(32, 64), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = torch.relu(self.trunk(x))
        return {"classes": self.classes(seen), "boxes": 3 * self.boxes(seen) + 100, "loss": seen.mean()}


def detected(output: Any, batch: Any) -> Tensor:
    wanted = torch.zeros_like(output["boxes"]) + 100
    return functional.cross_entropy(output["classes"], batch[1]) + functional.smooth_l1_loss(output["boxes"], wanted)


KINDS: dict[str, tuple[Any, tuple[str, int]]] = {
    "cross entropy": ((lambda: nn.Linear(8, 4), (8,), lambda o, b: functional.cross_entropy(o, b[1])), ("kl", -1)),
    "a module's": (
        (lambda: nn.Linear(8, 4), (8,), lambda o, b: nn.NLLLoss()(functional.log_softmax(o, 1), b[1])),
        ("kl", -1),
    ),
    "pictures": (
        (lambda: nn.Conv2d(3, 6, 1), (3, 6, 6), lambda o, b: functional.cross_entropy(o, o.argmax(1))),
        ("kl", -3),
    ),
    "pictures as rows": (
        (
            lambda: nn.Conv2d(3, 6, 1),
            (3, 6, 6),
            lambda o, b: functional.cross_entropy(o.permute(0, 2, 3, 1).reshape(-1, 6), o.argmax(1).reshape(-1)),
        ),
        ("kl", -3),
    ),
    "the next word": (
        (
            lambda: nn.Linear(8, 6),
            (6, 8),
            lambda o, b: functional.cross_entropy(o[:, :-1].double().transpose(1, 2), o[:, 1:].argmax(-1)),
        ),
        ("kl", -1),
    ),
    "one logit": (
        (
            lambda: nn.Linear(8, 1),
            (8,),
            lambda o, b: functional.binary_cross_entropy_with_logits(o[:, 0], (b[1] > 1).float()),
        ),
        ("binary", -1),
    ),
    "one logit, by hand": ((lambda: nn.Linear(8, 1), (8,), lambda o, b: -o.sigmoid().log().mean()), ("binary", -1)),
    "regression": ((lambda: nn.Linear(8, 3), (8,), lambda o, b: nn.MSELoss()(o, o.detach() + 1)), ("r2", -1)),
    "regression, by hand": ((lambda: nn.Linear(8, 3), (8,), lambda o, b: ((o - 1) ** 2).mean()), ("r2", -1)),
    "boxes and classes in one": (
        (
            lambda: nn.Linear(8, 8),
            (8,),
            lambda o, b: (
                functional.cross_entropy(o[:, :4], b[1]) + functional.l1_loss(o[:, 4:], torch.zeros(len(o), 4))
            ),
        ),
        ("r2", -1),
    ),
    "contrast": (
        (
            lambda: nn.Linear(8, 6),
            (8,),
            lambda o, b: functional.cross_entropy(
                functional.normalize(o, dim=-1) @ functional.normalize(o, dim=-1).T, torch.arange(len(o))
            ),
        ),
        ("cosine", -1),
    ),
    "similarities without a norm": (
        (lambda: nn.Linear(8, 6), (8,), lambda o, b: functional.cross_entropy(o @ o.T, torch.arange(len(o)))),
        ("cosine", -1),
    ),
    "the metrics tell": (
        (
            lambda: nn.Linear(8, 4),
            (8,),
            lambda o, b: o.sum(),
            lambda o, b: {"accuracy": (o.argmax(1) == b[1]).float().mean()},
        ),
        ("kl", -1),
    ),
    "softmax by hand": (
        (lambda: nn.Linear(8, 4), (8,), lambda o, b: (o.logsumexp(1) - o.gather(1, b[1][:, None])[:, 0]).mean()),
        ("kl", -1),
    ),
    "a distribution": (
        (lambda: nn.Linear(8, 4), (8,), lambda o, b: -torch.distributions.Categorical(logits=o).log_prob(b[1]).mean()),
        ("kl", -1),
    ),
    "a metric in NumPy": (
        (
            lambda: nn.Linear(8, 4),
            (8,),
            lambda o, b: o.sum(),
            lambda o, b: {"accuracy": float((o.detach().numpy().argmax(1) == b[1].numpy()).mean())},
        ),
        ("kl", -1),
    ),
    "a correlation": (
        (lambda: nn.Linear(8, 6), (8,), lambda o, b: 1 - correlations(o, torch.linspace(0, 1, 6) ** 2).mean()),
        ("cosine", -1),
    ),
    "probabilities and a squared error": (
        (
            lambda: nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)),
            (8,),
            lambda o, b: functional.mse_loss(o, functional.one_hot(b[1], 4).float()),
        ),
        ("kl", -1),
    ),
    "log-probabilities, gathered": (
        (
            lambda: nn.Sequential(nn.Linear(8, 4), nn.LogSoftmax(-1)),
            (8,),
            lambda o, b: -o.gather(1, b[1][:, None]).mean(),
        ),
        ("kl", -1),
    ),
    "margins": (
        (lambda: nn.Linear(8, 1), (8,), lambda o, b: torch.relu(1 - o[:, 0] * signs(b)).mean()),
        ("binary", -1),
    ),
    "logistic by hand": (
        (lambda: nn.Linear(8, 1), (8,), lambda o, b: torch.log1p(torch.exp(-o[:, 0] * signs(b))).mean()),
        ("binary", -1),
    ),
    "likelihood of a sigmoid, by hand": (
        (
            lambda: nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()),
            (8,),
            lambda o, b: -torch.where(b[1] > 1, o[:, 0].log(), (1 - o[:, 0]).log()).mean(),
        ),
        ("binary", -1),
    ),
    "quantiles": ((lambda: nn.Linear(8, 3), (8,), lambda o, b: pinball(b[1].float()[:, None] - o)), ("r2", -1)),
    "lengths of differences": (
        (lambda: nn.Linear(8, 3), (8,), lambda o, b: torch.linalg.vector_norm(o - 1000, dim=1).mean()),
        ("r2", -1),
    ),
    "a product with itself": ((lambda: nn.Linear(8, 3), (8,), lambda o, b: ((o - 1) * (o - 1)).mean()), ("r2", -1)),
    "lengths that do not count": (
        (
            lambda: nn.Linear(8, 6),
            (8,),
            lambda o, b: functional.cross_entropy(unit(o) @ unit(o).T, torch.arange(len(o))),
        ),
        ("cosine", -1),
    ),
    "nothing tells, single numbers": ((lambda: nn.Linear(8, 1), (8,), lambda o, b: o.sum()), ("r2", -1)),
    "nothing tells, an offset": (
        (lambda: nn.Sequential(nn.Linear(8, 6), Far()), (8,), lambda o, b: o.sum()),
        ("r2", -1),
    ),
    "nothing tells, vectors": ((lambda: nn.Linear(8, 6), (8,), lambda o, b: o.sum()), ("cosine", -1)),
    "a loss that fails": ((lambda: nn.Linear(8, 6), (8,), lambda o, b: b["labels"]), ("cosine", -1)),
    "probabilities": ((lambda: nn.Sequential(nn.Linear(8, 6), nn.Softmax(-1)), (8,), lambda o, b: o.sum()), ("kl", -1)),
}


def signs(batch: Any) -> Tensor:
    found: Tensor = 2 * (batch[1] > 1).float() - 1
    return found


def pinball(error: Tensor) -> Tensor:
    return torch.maximum(0.1 * error, -0.9 * error).mean()


def unit(vectors: Tensor) -> Tensor:
    found: Tensor = vectors / vectors.norm(dim=1, keepdim=True)
    return found


def correlations(vectors: Tensor, wanted: Tensor) -> Tensor:
    centred, other = vectors - vectors.mean(1, keepdim=True), wanted - wanted.mean()
    found: Tensor = (centred @ other) / (centred.norm(dim=1) * other.norm())
    return found


class Far(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 50


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_tells_what_kind_of_output_it_is(name: str) -> None:
    given, wanted = KINDS[name]
    assert kind(*given) == {"output": wanted}


@pytest.mark.parametrize("name", KINDS)
def test_large_outputs_are_watched_on_two_samples_with_the_same_result(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_kinds, "LARGE", 1)
    given, wanted = KINDS[name]
    assert kind(*given) == {"output": wanted}


def test_more_samples_are_watched_where_two_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_kinds, "LARGE", 1)
    watched: list[int] = []

    def hardest(output: Tensor, batch: Any) -> Tensor:
        watched.append(len(output))
        five = output.detach().abs().sum(1).topk(5).indices  # of two samples there are no five
        return functional.cross_entropy(output[five], batch[1][five])

    assert kind(lambda: nn.Linear(8, 4), (8,), hardest) == {"output": ("kl", -1)} and watched == [2, 8]
    watched.clear()
    monkeypatch.undo()
    assert kind(lambda: nn.Linear(8, 4), (8,), hardest) == {"output": ("kl", -1)} and watched == [8]


def test_every_output_has_its_own_figure_and_the_worst_leads(tmp_path: Path) -> None:
    """A box head of 2 bits was once told of as fidelity .9997, because the classes were compared alone."""
    job = job_of(TwoHeads, (32,), detected)
    small = shoestring.compress(job, tmp_path / "small", use=["Quantize(bits=3)"], samples=96)
    told = {one["name"]: one for one in small.report["fidelity"]["outputs"]}
    assert {name: one["by"] for name, one in told.items()} == {"classes": "kl", "boxes": "r2"}
    with torch.no_grad():
        x = torch.cat([batch[0] for batch in job.held_out()])
        wanted, found = (one.eval()(x)["boxes"] for one in (job.model(), small.model))
    r2 = 1 - float((((found - wanted) ** 2).mean(0) / wanted.var(0)).mean())
    assert told["boxes"]["mean"]["measured"] == pytest.approx(r2, abs=0.3 * (1 - r2)) and r2 < 0.999
    mean = small.report["fidelity"]["mean"]["measured"]
    assert (
        mean == min(one["mean"]["measured"] for one in told.values()) and small.report["fidelity"]["output"] == "boxes"
    )


def test_bits_go_where_the_worst_output_needs_them(tmp_path: Path) -> None:
    job = job_of(TwoHeads, (32,), detected)
    both = shoestring.compress(job, tmp_path / "both", size=6000, samples=64)
    one = shoestring.compress(job, tmp_path / "one", size=6000, samples=64, output="classes")
    bits = [{layer["name"]: layer["bits"] for layer in each.report["layers"]} for each in (both, one)]
    assert bits[0]["boxes.weight"] > bits[1]["boxes.weight"]
    assert [each["name"] for each in one.report["fidelity"]["outputs"]] == ["classes"]


def test_keep_holds_for_every_output(tmp_path: Path) -> None:
    small = shoestring.compress(job_of(TwoHeads, (32,), detected), tmp_path / "small", keep=0.99, samples=64)
    assert all(one["mean"]["measured"] > 0.985 for one in small.report["fidelity"]["outputs"])


def test_a_regression_far_from_zero_is_not_said_to_be_fine(tmp_path: Path) -> None:
    class Price(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + 1000

    job = job_of(Price, (16,), lambda o, b: functional.mse_loss(o[:, 0], b[1].float()))
    small = shoestring.compress(job, tmp_path / "small", use=["Quantize(bits=2)"], samples=96)
    assert small.report["fidelity"]["by"] == "r2" and small.report["fidelity"]["mean"]["measured"] < 0.95


def test_yes_or_no_is_compared_sample_by_sample() -> None:
    how = OutputMeasure("y", "binary")
    wanted, flipped = torch.tensor([[3.0], [-3.0], [3.0], [-3.0]]), torch.tensor([[-3.0], [-3.0], [3.0], [-3.0]])
    found = fidelity([{"y": flipped}], [{"y": wanted}], [how])
    assert 0.7 < found.mean < 0.77 and found.worst < 0.1 and found.outputs[0].samples == 4
    assert fidelity([{"y": wanted}], [{"y": wanted}], [how]).mean == 1


def test_classes_of_pixels_are_compared_along_their_axis() -> None:
    """The rows of a picture are no classes: what moves all classes of a pixel alike changes no decision."""
    wanted = made(0, 2, 5, 4, 4)
    shifted = wanted + made(1, 2, 1, 4, 4)
    assert fidelity([{"y": shifted}], [{"y": wanted}], [OutputMeasure("y", "kl", -3)]).mean == pytest.approx(1)
    assert fidelity([{"y": shifted}], [{"y": wanted}], [OutputMeasure("y", "kl", -1)]).mean < 0.9


@dataclass
class Given:
    logits: Tensor
    past_key_values: tuple[Tensor, ...]
    loss: Tensor


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


def test_names_of_outputs_follow_their_containers_and_states_are_no_outputs() -> None:
    one = torch.zeros(2, 3)
    assert [name for name, _ in named_tensors([one, Pair(one, one), {"a": (one,)}])] == [
        "0",
        "1.mean",
        "1.spread",
        "2.a.0",
    ]
    given = Given(one, (one, one), torch.tensor(1.0))
    assert compared_names(given) == ("logits",) and compared_names({"loss": torch.tensor(1.0)}) == ("loss",)
    assert compared_names(given, ["past_key_values"]) == ("past_key_values.0", "past_key_values.1")
    with pytest.raises(Mistake, match=r"--output boxes: the model returns logits, past_key_values\.0"):
        compared_names(given, ["boxes"])


def test_an_axis_and_a_measure_can_be_asked_for_and_are_checked(tmp_path: Path) -> None:
    job = job_of(lambda: nn.Conv2d(3, 4, 1), (3, 4, 4), lambda o, b: o.sum())
    model = job.model()
    assert [(one.measure, one.axis) for one in measures_of(job, model, job.data()[:1], measure="kl", axis=2)[0]] == [
        ("kl", 2)
    ]
    with pytest.raises(Mistake, match="--axis 4: the output output has 4 dimensions"):
        measures_of(job, model, job.data()[:1], axis=4)
    single = job_of(lambda: nn.Linear(3, 1), (3,), lambda o, b: o.sum())
    with pytest.raises(Mistake, match="use --fidelity r2, or binary"):
        measures_of(single, single.model(), single.data()[:1], measure="kl")


def test_watching_leaves_outputs_that_a_loss_changes_in_place_as_they_are() -> None:
    kept = made(0, 16, 3)

    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.kept = kept

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.scale * x[:, :3], self.kept

    kinds = kind(Stored, (8,), lambda o, b: ((o[0] - 1) * (o[0] - 1)).mean() + o[1][: len(o[0])].norm())
    assert kinds["0"] == ("r2", -1) and torch.equal(kept, made(0, 16, 3))
