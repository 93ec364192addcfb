"""The job's optimizer: of parameters or of names too; groups are the model's weights, each once, or it is told why not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake, decay_groups
from shoestring.core.costs.hardware import Hardware
from shoestring.core.optimization.optimizer import make_optimizer
from shoestring.training.evidence.sample import sample_blocks
from shoestring.training.planning.planner import Planner
from tests.interrupted import trained

SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.plane_norm = nn.LayerNorm([1, 4])
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.plane_norm(x.unsqueeze(1)).squeeze(1))


def job(optimizer: Callable[..., Any], **more: Any) -> Job:
    return Job(
        **{"model": Net, "data": lambda: [(torch.arange(6), torch.arange(6))] * 4, "optimizer": optimizer, "steps": 2}
        | more
    )


def test_an_argument_that_is_called_named_is_given_pairs_of_what_is_trained() -> None:
    seen: list[Any] = []

    def optimizer(named_parameters: Any) -> torch.optim.Optimizer:
        seen.extend(named_parameters)
        return SGD(named_parameters)

    model = Net()
    made = make_optimizer(job(optimizer), model)
    expected = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name, _ in seen] == [name for name, _ in expected] and all(
        a[1] is b[1] for a, b in zip(seen, expected, strict=True)
    )
    assert not any(name.startswith("blocks.0") for name, _ in seen)
    assert made.param_groups[0]["param_names"] == [name for name, _ in expected]
    for plain in (SGD, lambda parameters: SGD(list(parameters)), lambda named, lr=0.1: SGD(named)):
        assert len(make_optimizer(job(plain), Net()).param_groups[0]["params"]) == len(expected)


def test_norms_biases_and_what_is_spared_are_not_decayed_in_one_call() -> None:
    model = Net()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for spare, more in (((), {"embed.weight"}), (("embed",), set[str]())):
        decayed, not_decayed = decay_groups(model.named_parameters(), 0.1, spare)
        matrices = {f"blocks.{block}.{layer}.weight" for block in range(3) for layer in (0, 2)}
        assert {names[parameter] for parameter in decayed["params"]} == matrices | more and decayed[
            "weight_decay"
        ] == 0.1
        assert (
            "plane_norm.weight" in {names[parameter] for parameter in not_decayed["params"]}
            and not_decayed["weight_decay"] == 0.0
        )
        assert len(decayed["params"]) + len(not_decayed["params"]) == len(names)
    assert len(decay_groups([("bias", nn.Parameter(torch.zeros(2)))])) == 1, "no group is empty"
    with pytest.raises(Mistake, match="begins with 'named'"):
        decay_groups(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(Mistake, match="several parts of names"):
        decay_groups(model.named_parameters(), spare="embed")


def test_groups_by_name_are_planned_and_trained() -> None:
    made = job(
        lambda named: torch.optim.AdamW(decay_groups(named, 0.1), lr=torch.tensor(0.01)),
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    )
    outcome = Planner(made, Hardware()).outcome(None)
    assert outcome.chosen.predicted["peak_bytes"] > 0
    assert len(list(shoestring.train(made, outcome))) == 2
    picky = job(
        lambda named: SGD(
            [
                {"params": [dict(named)["embed.weight"]]},
                {"params": [parameter for name, parameter in named if name != "embed.weight"]},
            ]
        )
    )
    assert sample_blocks(picky)["update"] > 0, "the optimizer is only ever made of the model's own weights"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            lambda named: SGD([parameter for name, parameter in named if "bias" not in name]),
            r"\d parameters \('blocks.1.0.bias', .* are in no group .*requires_grad_\(False\)",
        ),
        (lambda parameters: SGD([*parameters, parameters[0]]), "the parameter 'embed.weight' more than once"),
        (
            lambda parameters: SGD([*parameters, nn.Parameter(torch.zeros(3, 5))]),
            r"shape \(3, 5\) that is not the model's",
        ),
        (lambda parameters: None, "gave a NoneType"),
    ],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_groups_that_are_not_the_models_weights_each_once_are_told(optimizer: Callable[..., Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        make_optimizer(job(optimizer), Net())


def test_a_run_goes_on_with_the_groups_that_it_was_begun_with_or_says_why_not(tmp_path: Path) -> None:
    def one(named: Any) -> Any:
        return SGD([parameter for _, parameter in named])

    def two(named: Any) -> Any:
        return SGD([{"params": [parameter for _, parameter in part]} for part in (named[:2], named[2:])])

    def three_and_rest(named: Any) -> Any:
        return SGD([{"params": [parameter for _, parameter in part]} for part in (named[:3], named[3:])])

    for number, (first, then, said) in enumerate(
        ((one, two, "1 groups of weights.*has 2 now"), (two, three_and_rest, "does not fit the job's optimizer now"))
    ):
        makers = iter([first, then])
        with pytest.raises(Mistake, match=said):
            trained(job(lambda named, makers=makers: next(makers)(named)), (), tmp_path / str(number), stops=(1,))
