"""The formulas of sparse training beside references of a few lines."""

from __future__ import annotations

import math

import pytest
import torch

from shoestring import Mistake
from shoestring.core.model.masks import lowest, seed_mask, seed_scores, zero_masks, zeros_of
from shoestring.training.sparse.hard_concrete import open_probability, sampled_gate, settled_gate
from shoestring.training.sparse.schedule import make_schedule
from shoestring.training.sparse.variational import VARIATIONAL, kl
from shoestring.training.sparse.weights import Units


def test_the_cubic_schedule_is_the_papers_table() -> None:
    schedule = make_schedule(0.9, steps=200, begin=0.1, end=0.7, every=30)
    assert (schedule.begin, schedule.every, schedule.updates, schedule.end) == (20, 30, 4, 140)
    table = {t: 0.9 * (1 - (1 - (t - 20) / (4 * 30)) ** 3) for t in (20, 50, 80, 110, 140)}
    assert {t: schedule.share_at(t) for t in table} == pytest.approx(table)
    assert [t for t in range(201) if schedule.due(t)] == [50, 80, 110, 140]
    assert schedule.share_at(5) == 0 and schedule.share_at(200) == schedule.share_at(140) == 0.9


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"share": 1.0}, "share=1.0"),
        ({"share": 0.0}, "share=0.0"),
        ({"begin": 0.7, "end": 0.7}, "begin=0.7, end=0.7"),
        ({"steps": 1}, "no mask would ever change"),
        ({"every": 100}, "no mask would ever change"),
        ({"every": -1}, "every=-1"),
    ],
)
def test_a_schedule_that_can_not_be_is_refused(knobs: dict[str, float], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        make_schedule(**{"share": 0.9, "steps": 100, "begin": 0.1, "end": 0.7, "every": 0, **knobs})  # type: ignore[arg-type]


def test_masks_have_exactly_as_many_zeros_as_asked_for_also_where_weights_are_equal() -> None:
    for weight in (torch.zeros(7, 13), torch.randn(7, 13), torch.randint(3, (7, 13)).float()):
        for share in (0.0, 0.013, 0.5, 0.9, 0.999, 1.0):
            assert int(zero_masks([weight.abs()], share, each=True)[0].sum()) == zeros_of(91, share)
    weight = torch.randn(1000)
    assert torch.equal(lowest(weight.abs(), 900), weight.abs() < weight.abs().sort().values[900])


def test_all_layers_together_and_each_of_them_have_the_share() -> None:
    small, large = torch.rand(10, 10), 10 + torch.rand(10, 10)
    together = zero_masks([small, large], 0.5, each=False)
    assert together[0].all() and not together[1].any()
    assert [int(mask.sum()) for mask in zero_masks([small, large], 0.5, each=True)] == [50, 50]


def test_seeds_give_the_published_sequence_and_masks_that_lie_in_one_another() -> None:
    published = [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]  # SplitMix64 from 0, of its reference program
    assert [one + 2**63 for one in seed_scores(3, 0).tolist()] == published
    assert len(set(seed_scores(100_000, -5).tolist())) == 100_000
    few, many = seed_mask((30, 40), 0.5, 7), seed_mask((30, 40), 0.9, 7)
    assert int(many.sum()) == 120 and not (many & ~few).any()
    overlap = float((few & seed_mask((30, 40), 0.5, 8)).float().mean())
    assert overlap == pytest.approx(0.25, abs=0.05), "masks of two seeds are independent"


def test_the_hard_concrete_gate_has_the_papers_distribution() -> None:
    """P(z <= x) = sigmoid(beta logit((x - gamma) / (zeta - gamma)) - log alpha) for 0 <= x < 1, which has a jump at 0
    and one at 1."""
    beta, gamma, zeta = 2 / 3, -0.1, 1.1
    u = (torch.arange(20_000) + 0.5) / 20_000
    for log_alpha in (-3.0, -0.5, 0.0, 2.0):
        z = sampled_gate(torch.full_like(u, log_alpha), u)
        for x in (0.0, 0.2, 0.7, 0.99):
            inside = (x - gamma) / (zeta - gamma)
            cdf = 1 / (1 + math.exp(-(beta * math.log(inside / (1 - inside)) - log_alpha)))
            assert float((z <= x).float().mean()) == pytest.approx(cdf, abs=2e-4)
        assert float(open_probability(torch.tensor(log_alpha))) == pytest.approx(
            float((z > 0).float().mean()), abs=2e-4
        )
    expected = [min(1.0, max(0.0, 1.2 / (1 + math.exp(-x)) - 0.1)) for x in (-3.0, -2.39, 0.0, 1.0, 4.0)]
    assert settled_gate(torch.tensor([-3.0, -2.39, 0.0, 1.0, 4.0])).tolist() == pytest.approx(expected, abs=1e-6)
    assert (
        float(settled_gate(torch.tensor(math.log(1 / 11) - 1e-3)))
        == 0
        < float(settled_gate(torch.tensor(math.log(1 / 11) + 1e-3)))
    )


def test_the_kl_is_the_papers_approximation_and_near_the_true_one() -> None:
    def reference(log_alpha: float) -> float:
        k1, k2, k3 = 0.63576, 1.87320, 1.48695
        return -(k1 / (1 + math.exp(-(k2 + k3 * log_alpha))) - 0.5 * math.log(1 + math.exp(-log_alpha)) - k1)

    points = [-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0]
    assert kl(torch.tensor(points)).tolist() == pytest.approx([reference(x) for x in points], abs=1e-5)
    # The true one, up to a constant: E log|1 + sqrt(alpha) e| - log(alpha) / 2 for normal e; by the sum over a grid
    e = torch.linspace(-9, 9, 2_000_001, dtype=torch.float64)
    density = torch.exp(-(e**2) / 2) / math.sqrt(2 * math.pi) * (e[1] - e[0])

    def true(x: float) -> float:
        return float((torch.log((1 + math.exp(x / 2) * e).abs() + 1e-30) * density).sum() - x / 2)

    for low, high in ((-3.0, 0.0), (0.0, 2.0), (-1.0, 3.0)):
        assert true(low) - true(high) == pytest.approx(reference(low) - reference(high), abs=0.02)


def test_noise_of_weights_has_the_trained_variance_and_ends_where_it_is_most_of_a_weight() -> None:
    torch.manual_seed(0)
    weight, gate = torch.randn(3, 4), torch.full((3, 4), math.log(0.04))
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([VARIATIONAL.used(weight, gate, VARIATIONAL.draw(gate, generator)) for _ in range(2000)])
    assert torch.allclose(found.mean(0), weight, atol=0.02) and torch.allclose(
        found.std(0), torch.tensor(0.2), atol=0.02
    )
    gate = torch.log(weight**2) + torch.where(weight > 0, 2.9, 3.1)
    assert torch.equal(VARIATIONAL.factor(weight, gate) != 0, weight > 0), "log alpha of 3 is where weights end"


def test_units_are_spread_over_what_they_close() -> None:
    weight = torch.arange(24.0).view(4, 6)
    for of, group, closed in (
        ("rows", 1, weight[1]),
        ("columns", 1, weight[:, 1]),
        ("columns", 3, weight[:, 3:]),
        ("matrices", 1, weight),
    ):
        units, copy = Units(of, group), weight.clone()
        view = units.view("w", copy)
        mask = torch.zeros(units.shape(view), dtype=torch.bool)
        mask.view(-1)[1 if mask.numel() > 1 else 0] = True
        view.masked_fill_(mask, -1)
        assert sorted(weight[copy == -1].tolist()) == sorted(closed.reshape(-1).tolist()), of
    with pytest.raises(Mistake, match="no groups of 4"):
        Units("columns", 4).view("w", weight)
