"""Which simulation method is chosen, and the reason that is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.clients.local import Local
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort import Engine, MethodChoice, choose_method
from tests.federated.simulation.cohort.cases import (
    Transformer,
    cnn,
    devices_of,
    job_of,
    mlp,
    of_tokens,
    started,
    tokens,
)


def how(model: Callable[[], nn.Module], local: Local | None = None, data: Any = None, **more: Any) -> MethodChoice:
    job = job_of(model, local or Local(batch=6), **more)
    return choose_method(job, started(job)[0], devices_of(job, **({"data": data} if data else {})))


class Own(nn.Module):
    """A model whose forward keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inside(x) * (1 + 0.01 * (self.calls % 7))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [
        (mlp, "fused", ""),
        (cnn, "stacked", "not fused: it has a Conv2d"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)),
            "sequential",
            "statistics",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.Dropout(0.5), nn.Linear(6, 5)),
            "stacked",
            "other numbers",
        ),
        (Own, "sequential", "keeps state from one call to the next"),
    ],
)
def test_the_fastest_way_that_is_right_is_chosen_and_said(model: Callable[[], nn.Module], kind: str, said: str) -> None:
    found = how(model)
    assert found.kind == kind and said in found.why and found.chunk >= 1


def test_a_tiny_rate_whose_updates_drown_in_the_rounding_of_weights_is_no_reason_against_a_way() -> None:
    assert how(mlp, Local(batch=6, lr=1e-6)).kind == "fused"


def test_a_transformer_is_stacked() -> None:
    assert how(Transformer, data=tokens, loss=of_tokens).kind == "stacked"


def test_a_loss_that_sees_all_samples_of_a_batch_at_once_is_not_filled_up() -> None:
    def spread(output: Tensor, batch: Any) -> Tensor:
        return output.std(0).sum() if len(output) > 1 else output.sum()

    assert how(cnn).masks and not how(cnn, loss=spread).masks


def frozen_cnn() -> nn.Module:
    made = cnn()
    made[0].requires_grad_(False)
    return made


def cnn_with_a_convolution_twice() -> nn.Module:
    again = nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), again, nn.ReLU(), again, nn.Flatten(), nn.Linear(400, 5))


def cnn_with_an_activation_twice() -> nn.Module:
    again = nn.ReLU()
    return nn.Sequential(nn.Conv2d(1, 4, 3), again, nn.Conv2d(4, 4, 3), again, nn.Flatten(), nn.Linear(256, 5))


@pytest.mark.parametrize("model", [frozen_cnn, cnn_with_a_convolution_twice, cnn_with_an_activation_twice])
def test_convolutions_that_are_frozen_or_called_twice_are_stacked_too(model: Callable[[], nn.Module]) -> None:
    assert how(model).kind == "stacked"


def test_an_optimizer_that_looks_at_whole_weights_is_not_stacked() -> None:
    found = how(mlp, Local(optimizer=torch.optim.Adafactor))
    assert found.kind == "sequential" and "Adafactor" in found.why


def test_records_of_different_lengths_work_one_after_the_other() -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1, keepdim=True))

    def ragged(count: int, generator: torch.Generator) -> list[tuple[Tensor, int]]:
        return [(torch.randn(1 + place % 3, generator=generator), place % 2) for place in range(count)]

    def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True), torch.tensor(
            [kind for _, kind in samples]
        )

    found = how(lambda: Mean(1, 2), data=ragged, collate=padded)
    assert found.kind == "sequential" and "lengths" in found.why


def test_a_device_that_does_not_suit_the_way_works_plainly_and_the_others_are_not_disturbed() -> None:
    job = job_of(mlp, Local(batch=5))
    records, (layout, row) = devices_of(job), started(job)
    records[2].whole[1][0] = -100  # type: ignore[index]  # a sample that cross entropy leaves out
    start, objective = row.expand(5, -1), Objective(job.local)
    found, plain = (
        Engine(job, layout, MethodChoice(kind, 8, "")).train_weights(start, records, objective, range(5))
        for kind in ("fused", "sequential")
    )
    assert torch.equal(found.rows[2], plain.rows[2])
    assert torch.allclose(found.rows, plain.rows, atol=1e-6)


def test_an_objective_with_an_optimizer_of_its_own_is_not_trained_by_plain_sgd() -> None:
    job = job_of(mlp, Local(batch=5))
    records, (layout, row) = devices_of(job, (12, 5)), started(job)
    objective = Objective(Local(batch=5, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)))
    found, plain = (
        Engine(job, layout, MethodChoice(kind, 8, ""))
        .train_weights(row.expand(2, -1), records, objective, range(2))
        .rows
        for kind in ("fused", "sequential")
    )
    assert torch.equal(found, plain)


def test_a_language_model_of_transformers_is_stacked_although_it_gives_a_cache() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    job = job_of(
        lambda: GPT2LMHeadModel(config),
        Local(batch=5),
        forward=lambda model, batch: model(input_ids=batch[0], labels=batch[0]),
        loss=lambda output, batch: output.loss,
    )
    found = choose_method(job, started(job)[0], devices_of(job, data=tokens))
    assert found.kind == "stacked" and not found.masks, found.why


def test_what_settles_in_the_first_call_does_not_count_as_kept() -> None:
    class Settling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.kind = mlp(), ""

        def forward(self, x: Tensor) -> Tensor:
            self.kind = self.kind or "classes"
            return self.inside(x)  # type: ignore[no-any-return]

    assert how(Settling).kind == "stacked"


def test_torchs_warnings_of_slow_operations_are_not_the_users_to_read() -> None:
    job = job_of(
        lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(144, 5))), Local(batch=6)
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert choose_method(job, started(job)[0], devices_of(job)).kind == "stacked"
        assert not [one for one in found if "performance drop" in str(one.message)]
        torch.func.vmap(lambda v, g: torch._weight_norm(v, g, 0))(torch.randn(3, 4, 5), torch.randn(3, 4, 1))
        assert len(found) == 1, "the user's own calls are told as before"
