"""Clipping and noise, against their papers' equations, on devices of uneven weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, inf, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.technique import parse_technique, text, total_cost
from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.playing.randomness import SYSTEM, SeededRandomness, normals
from shoestring.federated.round import DeviceResults, Order, Population, ServerState
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.adaptive_clip import AdaptiveClip
from shoestring.federated.techniques.private.clip import NORM, Clip, DeviceClip
from shoestring.federated.techniques.private.device_noise import DeviceNoise
from shoestring.federated.techniques.private.gaussian_noise import GaussianNoise, update_multiplier
from shoestring.federated.techniques.private.norms import clip_to_norm, norms
from shoestring.federated.techniques.private.sampling import choose, draw_participants
from shoestring.federated.techniques.send.quantize import QuantizeUpdates
from shoestring.federated.techniques.send.top_k import TopK
from shoestring.privacy.account import epsilon_of
from tests.federated.techniques.send.made_up import SEED, MadeUp, plain_cost

pytest.importorskip("dp_accounting")
KINDS = (Clip, DeviceClip, AdaptiveClip, GaussianNoise, DeviceNoise)


class Chunks:
    """Devices that work in chunks of three; those in `away` never answer."""

    def __init__(self, made: MadeUp, away: Sequence[str] = ()) -> None:
        self.made, self.away, self.orders = made, away, list[Order]()

    def work(self, order: Order, names: Sequence[str]) -> Iterator[DeviceResults]:
        from shoestring.core.clients.local import Local
        from shoestring.federated.round import Objective

        self.orders.append(order)
        there = [name for name in names if name not in self.away]
        for start in range(0, len(there), 3):
            devices = self.made.devices(there[start : start + 3])
            parts = self.made.parts
            yield DeviceResults(parts.encode(order, devices, parts.work(order, devices, Objective(Local()))))


def rows(count: int, size: int = 40, scale: float = 1.0) -> dict[str, Tensor]:
    return {
        f"d{one}": torch.randn(size, generator=torch.Generator().manual_seed(one)) * scale * (1 + one % 4)
        for one in range(count)
    }


def played(made: MadeUp, per_round: int, server: ServerState | None = None, away: Sequence[str] = ()) -> RoundResult:
    population = Population(len(made.rows), list(made.rows).__getitem__, per_round)
    parts = made.parts
    return play(parts, server or parts.initial(made.server()), Chunks(made, away), population)


def sampled(made: MadeUp, per_round: int, number: int = 0) -> list[str]:
    population = Population(len(made.rows), list(made.rows).__getitem__, per_round)
    return [
        name
        for group in choose(draw_participants(made.server(number), population, made.randomness), population)
        for name in group.names
    ]


# Clipping


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    count=st.integers(1, 4),
    exponent=st.integers(-30, 37),
    norm=st.floats(1e-6, 1e6),
    seed=st.integers(0, 9),
)
def test_a_clipped_update_is_never_longer_and_points_the_same_way(
    size: int, count: int, exponent: int, norm: float, seed: int
) -> None:
    found = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3) * 10.0**exponent
    after, within = clip_to_norm(found, norm)
    assert bool((after.double().norm(dim=1) <= norm).all())
    for before, row, inside in zip(found, after, within, strict=True):
        own = float(before.double().norm())
        if inside:
            assert torch.equal(before, row)
        elif norm > 1e-30:
            assert torch.allclose(row.double(), before.double() * (norm / own), rtol=1e-5, atol=1e-37)


def test_a_row_of_zeros_and_one_of_exactly_the_norm_stay_as_they_are() -> None:
    found = torch.tensor([[0.0, 0.0], [0.6, 0.8], [3.0, 4.0]], dtype=torch.float64).float()
    after, within = clip_to_norm(found, 5.0)
    assert torch.equal(after, found) and bool(within.all())
    assert torch.equal(clip_to_norm(found, 1e-3)[0][0], torch.zeros(2))


def test_a_norm_has_the_same_bits_among_others_and_with_any_number_of_threads() -> None:
    found = torch.randn(5, 70_001, generator=torch.Generator().manual_seed(0))
    together, threads = norms(found), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(torch.cat([norms(one[None]) for one in found]), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(together, found.double().norm(dim=1), rtol=1e-12)


@pytest.mark.parametrize("kind", [Clip, DeviceClip])
def test_the_mean_of_clipped_updates_is_by_samples(kind: type[Clip] | type[DeviceClip]) -> None:
    made = MadeUp(rows(5), (kind(norm=6.0),))
    expected, weight = torch.zeros(40), 0.0
    for start in (0, 3):  # chunks of three, in which MadeUp counts 1, 2, 3 samples
        for samples, row in enumerate(list(made.rows.values())[start : start + 3], 1):
            expected += samples * row * min(1.0, 6.0 / float(row.norm()))
            weight += samples
    result = played(made, 5)
    assert torch.allclose(result.server.weights, expected / weight, atol=1e-5)
    assert float(result.server.state[NORM]) == 6.0


# Who takes part


def test_every_device_takes_part_by_a_draw_of_its_own() -> None:
    made = MadeUp(rows(50, 2))
    drawn = [set(sampled(made, 10, number)) for number in range(400)]
    sizes = torch.tensor([float(len(one)) for one in drawn])
    assert abs(float(sizes.mean()) - 10) < 0.6 and abs(float(sizes.var()) - 50 * 0.2 * 0.8) < 2.5
    shares = torch.tensor([sum(name in one for one in drawn) / 400 for name in made.rows])
    assert float((shares - 0.2).abs().max()) < 5 * sqrt(0.16 / 400)


def test_all_devices_take_part_at_the_rate_one() -> None:
    made = MadeUp(rows(7, 2))
    assert sampled(made, 7) == list(made.rows)


# Noise


def test_the_update_is_the_sum_by_the_expected_number_plus_noise() -> None:
    """The estimator of McMahan et al. 2018, equal weights, with the noise drawn again by hand."""
    made = MadeUp(rows(20), (Clip(4.0), GaussianNoise(0.5)))
    names = sampled(made, 6)
    total = sum((made.rows[name] * min(1.0, 4.0 / float(made.rows[name].norm())) for name in names), torch.zeros(40))
    noise = normals(SeededRandomness(SEED), 40, "noise", 0).float() * 0.5 * 4.0
    result = played(made, 6)
    assert len(names) != 6, "so that dividing by the number that came would be seen"
    assert set(result.participants) == set(names)
    assert torch.allclose(result.server.weights, (total + noise) / 6, atol=1e-5)


def test_the_noise_has_the_stated_deviation_and_is_another_in_every_round() -> None:
    made = MadeUp(rows(4, 20_000, scale=0.0), (Clip(2.0), GaussianNoise(1.5)))
    first = played(made, 2)
    second = played(made, 2, first.server)
    one, two = first.server.weights * 2, (second.server.weights - first.server.weights) * 2
    assert float(one.std()) == pytest.approx(3.0, rel=0.03) and float(two.std()) == pytest.approx(3.0, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.05
    assert torch.equal(played(made, 2).server.weights, first.server.weights), "from a seed, for tests, the same again"


@pytest.mark.parametrize("techniques", [(Clip(2.0), GaussianNoise(1.5)), (DeviceClip(2.0), DeviceNoise(1.5))])
def test_the_same_round_again_draws_other_noise_of_the_same_deviation(
    techniques: tuple[FederatedTechnique, ...],
) -> None:
    """With the same seed of the job, the same sum: whoever knows all of it but the noise can't subtract that."""
    made = MadeUp(rows(4, 20_000, scale=0.0), techniques, SYSTEM)
    one, two = (played(made, 4).server.weights * 4 for _ in range(2))
    assert float(one.std()) == pytest.approx(3.0, rel=0.03) and float(two.std()) == pytest.approx(3.0, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.05


def test_who_takes_part_is_drawn_anew_and_no_state_keeps_it() -> None:
    made = MadeUp(rows(60, 2), (Clip(2.0), GaussianNoise(1.5)), SYSTEM)
    results = [played(made, 20) for _ in range(5)]
    assert len({one.participants for one in results}) > 1
    for one in results:
        assert not one.server.drawn and all(value.numel() == 1 for value in one.server.state.values()), (
            "no list of devices"
        )


def test_the_count_of_an_adaptive_clip_has_other_noise_every_time() -> None:
    made = MadeUp(rows(30), (AdaptiveClip(quantile=0.7, start=9.0),), SYSTEM)
    assert len({float(played(made, 30).server.state["AdaptiveClip.norm"]) for _ in range(5)}) > 1


def test_every_noisy_sum_is_a_point_of_a_grid_that_knows_no_device() -> None:
    """Else the low bits of a sum tell which sums it can be of (Mironov 2012)."""
    for values in (rows(4, 5000), rows(4, 5000, scale=0.0)):
        found = (
            played(MadeUp(values, (Clip(2.0), GaussianNoise(1.5)), SYSTEM), 4).server.weights.double() * 4
        )  # 4: dividing is exact
        cells = found / (2.0 * 2.0**-20)
        assert bool((cells == cells.round()).all()) and float(found.std()) > 2


def test_a_round_of_nobody_is_noise_alone() -> None:
    made = MadeUp(rows(50), (Clip(2.0), GaussianNoise(1.0)))
    number = next(number for number in range(1000) if not sampled(made, 1, number))
    result = played(made, 1, made.server(number))
    assert result.participants == () and float(result.server.weights.std()) == pytest.approx(2.0, rel=0.4)


def test_one_device_more_changes_the_sum_by_no_more_than_the_norm() -> None:
    """However long its update is, and through a codec."""
    for extra in ((), (QuantizeUpdates(4),), (TopK(0.3),)):
        found = rows(12)
        found["d3"] = found["d3"] * 1e6
        techniques: tuple[FederatedTechnique, ...] = (*extra, Clip(2.0), GaussianNoise(1.0))
        whole = played(MadeUp(found, techniques), 12).server.weights
        without = played(MadeUp(found, techniques), 12, away=("d3",)).server.weights
        assert float((whole - without).norm()) * 12 <= 2.0 * (1 + 1e-4)


def test_devices_noise_sums_up_to_the_stated_whoever_answers() -> None:
    for away in ((), ("d0",), ("d0", "d1", "d2"), tuple(f"d{one}" for one in range(6))):
        made = MadeUp(rows(6, 20_000, scale=0.0), (DeviceClip(2.0), DeviceNoise(1.5)))
        result = played(made, 6, away=away)
        assert float((result.server.weights * 6).std()) == pytest.approx(3.0, rel=0.03), away


def test_a_devices_own_noise_is_its_share_and_the_same_alone() -> None:
    from shoestring.core.clients.local import Local
    from shoestring.federated.round import DeviceGroup, Objective

    made = MadeUp(rows(9, 20_000), (DeviceClip(2.0), DeviceNoise(1.5)))
    parts = made.parts
    server = parts.begin(made.server(), Population(9, list(made.rows).__getitem__, 9))
    order = parts.order(server, DeviceGroup(tuple(made.rows)))
    together = parts.work(order, made.devices(list(made.rows)), Objective(Local())).rows
    alone = parts.work(order, made.devices(["d4"]), Objective(Local())).rows
    assert torch.equal(alone[0], together[4])
    own = together[4] - clip_to_norm(made.rows["d4"][None], 2.0)[0][0]
    assert float(own.std()) == pytest.approx(1.5 * 2.0 / 3, rel=0.03)


# The clipping norm that follows


def test_the_norm_follows_the_equation_of_andrew_et_al() -> None:
    made = MadeUp(rows(30), (AdaptiveClip(quantile=0.7, start=9.0, rate=0.3, noise=0.1),))
    server, norm = made.server(), 9.0
    for number in range(4):
        result = played(made, 30, server)
        server = result.server
        halves = sum((float(row.norm()) <= norm) - 0.5 for row in made.rows.values())
        drawn = float(normals(SeededRandomness(SEED), 1, "count noise", number))
        share = (halves + 3.0 * drawn) / 30 + 0.5
        assert float(server.state[NORM]) == pytest.approx(norm)
        norm *= exp(-0.3 * (share - 0.7))
        assert float(server.state["AdaptiveClip.norm"]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("start", [0.01, 1000.0])
def test_the_norm_comes_to_the_stated_quantile(start: float) -> None:
    made = MadeUp(rows(40), (AdaptiveClip(start=start), GaussianNoise(1.0)))
    server = made.server()
    for _ in range(120):
        server = played(made, 40, server).server
    found = sum(float(row.norm()) <= float(server.state[NORM]) for row in made.rows.values()) / 40
    assert 0.3 <= found <= 0.7


def test_noise_is_split_between_count_and_updates() -> None:
    """Andrew et al. 2021, theorem 1: z = (z_u^-2 + (2 s)^-2)^-1/2."""
    z = update_multiplier(0.8, 3.0)
    assert (z**-2 + 6.0**-2) ** -0.5 == pytest.approx(0.8) and z > 0.8
    made = MadeUp(rows(4, 20_000, scale=0.0), (AdaptiveClip(start=2.0, noise=0.5), GaussianNoise(0.8)))
    assert float((played(made, 4).server.weights * 4).std()) == pytest.approx(
        2.0 * update_multiplier(0.8, 2.0), rel=0.03
    )


# Cost and refusals

COST = replace(plain_cost(torch.ones(40), per_round=10), delta=1e-6)


def test_the_stated_error_of_noise_is_the_measured_one() -> None:
    row = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 0.01
    made = MadeUp({f"d{one}": row for one in range(10)}, (Clip(0.5), GaussianNoise(2.0)))
    cost = replace(plain_cost(row, per_round=10), delta=1e-6, clients=10)
    shorter = row * 0.5 / row.norm()
    found = float((played(made, 10).server.weights - shorter).square().sum() / row.square().sum())
    clip_error, stated = Clip(0.5).cost(cost).error, total_cost((Clip(0.5), GaussianNoise(2.0)), cost).error
    assert clip_error == pytest.approx(float((shorter - row).square().sum() / row.square().sum()), rel=1e-3)
    assert stated - clip_error == pytest.approx(found, rel=0.1)


def test_epsilon_is_that_of_all_rounds() -> None:
    for plan in (
        (Clip(1.0), GaussianNoise(3.0)),
        (DeviceClip(1.0), DeviceNoise(3.0)),
        (AdaptiveClip(noise=0.5), GaussianNoise(3.0)),
    ):
        cost = total_cost(plan, COST)
        assert cost.epsilon == epsilon_of(3.0, 0.1, 10, 1e-6) and cost.noise == 3.0 and cost.error > 0


def test_the_chooser_is_given_noise_for_the_epsilon_that_was_asked_for() -> None:
    wanted = replace(COST, wanted=2.0)
    (clip,) = Clip.choices(wanted)
    assert clip.norm == 6.325  # of forty ones
    (noise,) = GaussianNoise.choices(clip.cost(wanted))
    cost = noise.cost(clip.cost(wanted))
    assert 1.98 < cost.epsilon <= 2.0 and parse_technique(text(noise), KINDS) == noise
    assert Clip.choices(COST) == GaussianNoise.choices(Clip(1.0).cost(COST)) == GaussianNoise.choices(wanted) == ()
    assert GaussianNoise.choices(replace(clip.cost(wanted), wanted=1e-9)) == ()
    assert all(kind.choices(wanted) == () for kind in (DeviceClip, AdaptiveClip, DeviceNoise))


def test_leaving_some_of_an_update_out_never_looks_like_less_noise() -> None:
    """However a clip is rounded, and however much larger noise is than updates."""
    for seed in range(40):
        found = torch.randn(3, 60, generator=torch.Generator().manual_seed(seed)).pow(3) * 0.01
        cost = replace(plain_cost(found[0], per_round=3), delta=1e-6, wanted=2.0, evidence=UpdateEvidence.of(found))
        for share in (0.05, 0.3, 0.9):
            sparse = TopK(share).cost(cost)
            less, whole = (total_cost((*Clip.choices(one), GaussianNoise(500.0)), one).error for one in (sparse, cost))
            assert whole > 1e4 and less > whole - 1e-3


def test_what_keeps_no_promise_is_refused() -> None:
    assert "Clip" in GaussianNoise().refusal(COST)
    assert "Clip" in GaussianNoise().refusal(QuantizeUpdates(8).cost(DeviceClip().cost(COST))), (
        "coding may lengthen what a device shortened"
    )
    assert "--delta" in GaussianNoise().refusal(replace(COST, clip=1.0, delta=0.0))
    assert "DeviceClip" in DeviceNoise().refusal(COST)
    assert "count" in GaussianNoise(2.0).refusal(AdaptiveClip(noise=0.05).cost(COST))
    assert GaussianNoise(2.0).refusal(AdaptiveClip(noise=0.15).cost(COST)) == ""
    assert "noise" in QuantizeUpdates().refusal(DeviceNoise().cost(DeviceClip().cost(COST)))


def test_what_devices_send_beside_their_updates_is_refused_under_noise() -> None:
    made = MadeUp(rows(3), (Clip(), GaussianNoise()))
    parts = made.parts

    def told(order: Order, sent: object) -> object:
        found = parts.decode(order, sent)  # type: ignore[arg-type]
        return replace(found, extras={"Scaffold.control": found.rows})

    population = Population(3, list(made.rows).__getitem__, 3)
    with pytest.raises(Mistake, match=r"Scaffold\.control"):
        play(parts.with_(decode=told), made.server(), Chunks(made), population)


def test_bytes_are_those_predicted() -> None:
    for plan in (
        (DeviceClip(1.0), DeviceNoise(3.0)),
        (Clip(1.0), GaussianNoise(3.0)),
        (AdaptiveClip(noise=0.5), GaussianNoise(3.0)),
    ):
        made, cost = MadeUp(rows(10), plan), total_cost(plan, COST)
        result = played(made, 10)
        assert (result.up, result.down) == (10 * cost.up, 10 * cost.down)


@pytest.mark.parametrize(
    "written",
    [
        "Clip(norm=0.0)",
        "Clip(norm=-1.0)",
        "DeviceClip(norm=0.0)",
        "AdaptiveClip(quantile=1.0)",
        "AdaptiveClip(noise=0.0)",
        "AdaptiveClip(rate=0.0)",
        "GaussianNoise(multiplier=0.0)",
        "DeviceNoise(multiplier=-1.0)",
    ],
)
def test_knobs_that_make_no_sense_are_refused(written: str) -> None:
    with pytest.raises(Mistake, match="give"):
        parse_technique(written, KINDS)


def test_infinite_knobs_are_refused() -> None:
    for kind, knob in ((Clip, "norm"), (GaussianNoise, "multiplier"), (AdaptiveClip, "start")):
        with pytest.raises(Mistake):
            kind(**{knob: inf})
