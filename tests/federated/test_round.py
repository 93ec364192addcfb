"""A single round: what is counted, what is rejected, and what a row contains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.federated.model.layout import layout_of
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import prepare_federation
from shoestring.federated.playing.plain import mean
from shoestring.federated.playing.play import play, update_problems
from shoestring.federated.playing.round_events import round_warnings
from shoestring.federated.playing.seeds import generator_of, seed_of
from shoestring.federated.round import ServerState, Updates
from tests.federated.toys import records, toy, toy_job


def updates(rows: torch.Tensor, **changes: object) -> Updates:
    count = len(rows)
    made = Updates(
        tuple(f"d{number}" for number in range(count)),
        rows,
        torch.arange(1, count + 1, dtype=torch.float64),
        torch.ones(count, dtype=torch.float64),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_plain_round_is_federated_averaging() -> None:
    """w + sum n_i d_i / sum n_i, on uneven counts, whatever the chunks."""
    rows = torch.randn(5, 7, generator=generator_of("rows"), dtype=torch.float32)
    whole = updates(rows)
    expected = (whole.counts[:, None] * rows).sum(0) / whole.counts.sum()
    server = ServerState(0, 0, torch.zeros(7))
    for parts in ([whole], [whole.select([0, 1]), whole.select([2]), whole.select([3, 4])]):
        assert torch.allclose(mean(server, parts).update.double(), expected, atol=1e-6)
    assert torch.equal(mean(server, []).update, torch.zeros(7)), "nobody came: nothing moves"


def test_every_byte_is_counted() -> None:
    given = toy()
    parts = given.plain
    devices = given.devices(parts)
    played = play(parts, given.server(parts), devices, given.population)
    size = given.layout.size * 4
    assert (played.up, played.down) == (6 * (size + 16), 6 * size) and played.senders == played.ordered == 6


def test_what_can_not_be_used_is_said_of_each() -> None:
    rows = torch.zeros(5, 3)
    rows[1, 2] = float("nan")
    found = update_problems(
        updates(
            rows,
            counts=torch.tensor([1.0, 1, 0, 1, 1]).double(),
            losses=torch.tensor([1, 1, 1, float("nan"), 1]).double(),
            extras={"c": torch.tensor([[0.0], [0], [0], [0], [float("inf")]])},
        ),
        3,
    )
    assert [bool(one) for one in found] == [False, True, True, False, True], "a loss moves no weight"
    assert "shape (3,), not (4,)" in update_problems(updates(rows), 4)[0]


def test_a_loss_that_is_not_finite_is_told_and_is_in_no_mean() -> None:
    def clients() -> dict[str, object]:
        unlabelled = [(inputs, torch.tensor(-100)) for inputs, _ in records(2)]
        return {"a": records(1), "b": records(3), "unlabelled": unlabelled}

    given, whole = (
        toy(toy_job(clients=made), per_round=len(made()))
        for made in (clients, lambda: dict(list(clients().items())[:2]))
    )
    played, right = (
        play(one.plain, one.server(one.plain), one.devices(one.plain), one.population) for one in (given, whole)
    )
    assert (set(played.participants), played.rejected, played.without_loss) == ({"a", "b", "unlabelled"}, (), 1)
    assert played.loss == pytest.approx(right.loss) and "1 device was not finite" in round_warnings(played, True, {})[0]


def test_a_device_is_chosen_at_most_once_and_the_choice_follows_from_the_seed() -> None:
    given = toy()
    for number in range(20):
        server = ServerState(1, number, given.row)
        names = given.plain.choose(server, given.population)[0].names
        assert len(set(names)) == 6 and given.plain.choose(server, given.population)[0].names == names
    assert (
        len({given.plain.choose(ServerState(1, number, given.row), given.population)[0].names for number in range(20)})
        > 10
    )


def test_more_a_round_than_clients_is_refused_with_both_numbers() -> None:
    with pytest.raises(Mistake, match="--per-round 13 and there are 12 clients"):
        prepare_federation(toy_job(), FederateOptions(per_round=13))


def test_a_row_has_weights_first_and_statistics_after_them_and_nothing_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    layout = layout_of(model)
    assert [entry.name for entry in layout.entries] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "2.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert layout.trained_count == 12 + 4 + 4 + 4 + 2 and layout.size == layout.trained_count + 9
    row = layout.row(model)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout.load(other, row * 2)
    assert torch.equal(layout.row(other), row * 2) and torch.equal(other[1].running_var, 2 * torch.ones(4))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(2, 2).double(), "torch.float64"),
        (nn.Linear(2, 2).requires_grad_(False), "no weight that needs a gradient"),
    ],
)
def test_a_model_that_devices_can_not_train_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(Mistake, match=why):
        layout_of(model)


def test_a_seed_follows_from_every_word() -> None:
    words = [(1, "a"), (1, "b"), (2, "a"), ("1", "a"), (1, "a", ""), ("1a",), (12, 3), (1, 23)]
    assert len({seed_of(*one) for one in words}) == len(words)
