"""The formulas of sparse training beside references of a few lines."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shoestring import Mistake
from shoestring.compression.sparse.hard_concrete import HardConcrete, open_probability, sampled_gate, settled_gate
from shoestring.compression.sparse.masks import kept_masks, lowest, seed_mask, seed_scores, zeros_of
from shoestring.compression.sparse.schedule import scheduled
from shoestring.compression.sparse.variational import Variational, kl


def test_the_cubic_schedule_is_the_papers_table() -> None:
    schedule = scheduled(0.9, steps=200, begin=0.1, end=0.7, every=30)
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
        scheduled(**{"share": 0.9, "steps": 100, "begin": 0.1, "end": 0.7, "every": 0, **knobs})  # type: ignore[arg-type]


def test_masks_have_exactly_as_many_zeros_as_asked_for_also_where_weights_are_equal() -> None:
    for weight in (torch.zeros(7, 13), torch.randn(7, 13), torch.randint(3, (7, 13)).float()):
        for share in (0.0, 0.013, 0.5, 0.9, 0.999, 1.0):
            assert int((~kept_masks([weight.abs()], share, each=True)[0]).sum()) == zeros_of(91, share)
    weight = torch.randn(1000)
    assert torch.equal(lowest(weight.abs(), 900), weight.abs() < weight.abs().sort().values[900])


def test_all_layers_together_and_each_of_them_have_the_share() -> None:
    small, large = torch.rand(10, 10), 10 + torch.rand(10, 10)
    together = kept_masks([small, large], 0.5, each=False)
    assert not together[0].any() and together[1].all()
    assert [int(mask.sum()) for mask in kept_masks([small, large], 0.5, each=True)] == [50, 50]


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
    """P(z <= x) = sigmoid(beta logit((x - gamma) / (zeta - gamma)) - log alpha) for 0 <= x < 1, which has a jump at 0 and one at 1."""
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


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 5), nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)], ids=["linear", "conv"]
)
def test_local_noise_has_the_mean_and_variance_of_noisy_weights(layer: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 6) if isinstance(layer, nn.Linear) else torch.randn(1, 4, 5, 5)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    plain = layer(x).detach()
    gate = Variational(weight.detach(), 1.0, layer)
    gate.raw.data.fill_(-3.0)
    with torch.no_grad():
        local = layer(x.expand(4000, *x.shape[1:]))
        gate.leave()
        weights = weight.clone()
        drawn = []
        for _ in range(2000):
            weight.copy_(weights + math.exp(-1.5) * torch.randn_like(weights))
            drawn.append(layer(x))
    assert (local.mean(0) - plain[0]).abs().max() < 0.1
    assert torch.allclose(local.var(0), torch.cat(drawn).var(0), rtol=0.2)


def test_noise_of_weights_is_drawn_where_a_layer_has_no_local_one() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 4)
    gate = Variational(weight, 1.0, None)
    gate.raw.data.fill_(math.log(0.04))

    def drawn() -> torch.Tensor:
        gate.draw()
        found: torch.Tensor = gate(weight)
        return found.detach()

    found = torch.stack([drawn() for _ in range(2000)])
    assert torch.allclose(found.mean(0), weight, atol=0.02) and torch.allclose(
        found.std(0), torch.tensor(0.2), atol=0.02
    )
    gate.raw.data.copy_(torch.log(weight**2) + torch.where(weight > 0, 2.9, 3.1))
    assert torch.equal(gate.eval()(weight) != 0, weight > 0), "log alpha of 3 is where weights end"


def test_a_gates_penalty_moves_it_as_many_times_as_fast_as_its_pace() -> None:
    gate = HardConcrete(torch.ones(4), pace=20.0)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.01)
    before = gate.trained.detach().clone()
    gate.penalty(torch.ones(4)).backward()
    optimizer.step()
    assert torch.allclose(before - gate.trained.detach(), torch.tensor(0.2), atol=1e-3)
