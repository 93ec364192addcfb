"""Median, trimmed mean, Krum, multi-Krum and norm bound, against their papers' definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.technique import parse_technique, text
from shoestring.federated.playing.plain import mean
from shoestring.federated.playing.play import play
from shoestring.federated.round import Updates
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.combine.by_coordinate import CoordinateMedian, TrimmedMean, median
from shoestring.federated.techniques.combine.krum import Krum, MultiKrum
from shoestring.federated.techniques.combine.norm_bound import NormBound, bound_norms
from shoestring.federated.techniques.combine.robust import column_blocks
from tests.federated.techniques.combine.toy import (
    COST,
    SIZE,
    ToyDevices,
    in_chunks,
    new_server,
    population,
    random_rows,
    round_with,
    same_state,
    saved_and_restored,
    updates_of,
)

RULES = (
    CoordinateMedian(),
    TrimmedMean(0.2),
    Krum(malicious=1),
    MultiKrum(malicious=1),
    MultiKrum(malicious=2, keep=2),
)


def combined(technique: FederatedTechnique, *chunks: Updates) -> Tensor:
    parts = round_with(technique)
    return parts.combine(new_server(parts), iter(chunks)).update


def krum_scores(rows: Tensor, malicious: int) -> list[float]:
    """Blanchard et al. 2017, section 4, word by word."""
    found = []
    for i, one in enumerate(rows.double()):
        away = sorted(float((one - other).square().sum()) for j, other in enumerate(rows.double()) if j != i)
        found.append(sum(away[: len(rows) - malicious - 2]))
    return found


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_is_that_of_every_number_and_unweighted(count: int) -> None:
    rows = random_rows(count)
    expected = torch.from_numpy(np.median(rows.double().numpy(), axis=0)).float()
    assert torch.allclose(combined(CoordinateMedian(), updates_of(rows)), expected, atol=1e-7)
    liar = updates_of(rows, [1e6] + [1.0] * (count - 1))
    assert torch.equal(combined(CoordinateMedian(), liar), combined(CoordinateMedian(), updates_of(rows)))


@pytest.mark.parametrize(
    ("count", "share", "cut"), [(7, 0.1, 1), (10, 0.1, 1), (11, 0.1, 2), (30, 0.1, 3), (5, 0.4, 2), (1, 0.0, 0)]
)
def test_the_trimmed_mean_leaves_out_as_many_at_each_end_as_were_asked_for_rounded_up(
    count: int, share: float, cut: int
) -> None:
    rows = random_rows(count)
    expected = np.sort(rows.double().numpy(), axis=0)[cut : count - cut].mean(axis=0)
    assert cut == ceil(share * count - 1e-9)
    assert torch.allclose(combined(TrimmedMean(share), updates_of(rows)), torch.from_numpy(expected).float(), atol=1e-7)


@pytest.mark.parametrize(("count", "malicious"), [(3, 0), (5, 1), (9, 3), (12, 2)])
def test_krum_takes_the_row_with_the_least_score_and_multi_krum_the_mean_of_a_few(count: int, malicious: int) -> None:
    rows = random_rows(count, seed=count)
    scores = krum_scores(rows, malicious)
    best = sorted(range(count), key=scores.__getitem__)
    assert torch.equal(combined(Krum(malicious), updates_of(rows)), rows[best[0]])
    assert torch.equal(combined(MultiKrum(malicious, keep=1), updates_of(rows)), rows[best[0]])
    most = count - malicious - 2
    assert torch.allclose(combined(MultiKrum(malicious), updates_of(rows)), rows[best[:most]].mean(0), atol=1e-6)


def test_of_equal_scores_krum_takes_the_first() -> None:
    rows = torch.zeros(5, SIZE)
    rows[3:] = torch.tensor([7.0, -7.0])[:, None]
    rows[0, 0], rows[1, 0] = 1.0, -1.0  # as far from row 2
    assert torch.equal(combined(Krum(1), updates_of(rows[[0, 2, 1, 3, 4]])), rows[2])
    assert torch.equal(combined(Krum(0), updates_of(torch.eye(SIZE)[:4])), torch.eye(SIZE)[0])


@pytest.mark.parametrize("rule", RULES, ids=text)
def test_how_updates_come_in_chunks_changes_no_bit(rule: FederatedTechnique) -> None:
    updates = updates_of(random_rows(9, seed=4))
    whole = combined(rule, updates)
    for sizes in ((1,) * 9, (4, 5), (8, 1)):
        assert torch.equal(combined(rule, *in_chunks(updates, *sizes)), whole)


@pytest.mark.parametrize("rule", RULES, ids=text)
def test_the_order_of_devices_does_not_matter_beyond_rounding(rule: FederatedTechnique) -> None:
    rows = random_rows(7, seed=5)
    whole = combined(rule, updates_of(rows))
    for order in list(permutations(range(7)))[::1009]:
        assert torch.allclose(combined(rule, updates_of(rows[list(order)])), whole, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=text)
@pytest.mark.parametrize("evil", [1e38, -3e38, 5.0])
def test_one_malicious_device_does_not_lead_away(rule: FederatedTechnique, evil: float) -> None:
    rows = 0.01 * random_rows(9, seed=6) + 1.0
    rows[2] = evil
    assert float((combined(rule, updates_of(rows)) - 1.0).abs().max()) < 0.05
    plain = mean(new_server(round_with()), [updates_of(rows)]).update
    assert float((plain - 1.0).abs().max()) > 0.05


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), width=st.integers(1, 40), block=st.integers(1, 60), seed=st.integers(0, 99))
def test_blocks_of_columns_are_all_columns(count: int, width: int, block: int, seed: int) -> None:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.federated.techniques.combine.robust.BLOCK", block)
        assert torch.equal(torch.cat(list(column_blocks(rows)), dim=1), rows)
        few = median(rows)
    assert torch.equal(few, median(rows))


@pytest.mark.parametrize(
    ("rule", "count"), [(Krum(1), 4), (MultiKrum(1, keep=3), 5), (TrimmedMean(0.1), 2), (CoordinateMedian(), 0)]
)
def test_too_few_devices_make_no_update_and_it_is_counted(rule: FederatedTechnique, count: int) -> None:
    parts = round_with(rule)
    server = new_server(parts)
    found = parts.combine(server, [updates_of(random_rows(count))] if count else [])
    after = parts.advance(server, found)
    assert found.weight == 0 and torch.equal(after.weights, server.weights)
    assert int(after.state[f"{type(rule).__name__}.skipped"]) == 1
    assert int(parts.advance(after, parts.combine(after, [])).state[f"{type(rule).__name__}.skipped"]) == 2


@pytest.mark.parametrize(
    ("rule", "per_round", "words"),
    [
        (Krum(5), 12, "needs 13"),
        (MultiKrum(1, keep=10), 12, "keep=9"),
        (TrimmedMean(0.4), 2, "leaves none"),
        (MultiKrum(5), 12, "needs 13"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_runs(
    rule: FederatedTechnique, per_round: int, words: str
) -> None:
    assert words in rule.refusal(replace(COST, per_round=per_round))
    assert not rule.refusal(replace(COST, per_round=40)) and "epsilon" in rule.refusal(
        replace(COST, per_round=40, delta=1e-6)
    )
    assert rule.cost(COST) == COST and type(rule).choices(COST) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "TrimmedMean(share=0.5)",
        "TrimmedMean(share=-0.1)",
        "Krum(malicious=-1)",
        "Krum()",
        "NormBound()",
        "MultiKrum(malicious=1, keep=-1)",
        "NormBound(norm=0.0)",
        "NormBound(norm=-1)",
    ],
)
def test_wrong_knobs_are_told(wrong: str) -> None:
    with pytest.raises(Mistake):
        parse_technique(wrong, (TrimmedMean, Krum, MultiKrum, NormBound))


def test_a_norm_bound_shrinks_what_is_longer_and_leaves_the_rest_to_the_bit() -> None:
    rows = torch.cat([random_rows(5), torch.zeros(1, SIZE), torch.full((1, SIZE), 3e38)])
    found = bound_norms(rows, 3.0)
    for one, got in zip(rows, found, strict=True):
        norm = float(one.double().norm())
        assert (
            torch.equal(one, got)
            if norm <= 3.0
            else torch.allclose(got, (one.double() * 3.0 / norm).float(), rtol=1e-6)
        )
    assert any(torch.equal(one, got) for one, got in zip(rows, found, strict=True)) and float(rows[0].norm()) > 0


def test_a_norm_bound_acts_before_the_rule_whatever_order_they_are_given_in() -> None:
    rows, counts = 4 * random_rows(6, seed=8), [1.0, 5.0, 2.0, 9.0, 4.0, 1.0]
    short = torch.stack([row * min(1.0, 2.0 / float(row.norm())) for row in rows])
    for rule in (CoordinateMedian(), Krum(1)):
        parts = round_with(NormBound(2.0), rule)
        found = parts.combine(new_server(parts), [updates_of(rows, counts)]).update
        assert torch.allclose(found, combined(rule, updates_of(short)), atol=1e-6)
    weighed = (torch.tensor(counts)[:, None] * short).sum(0) / sum(counts)
    assert torch.allclose(combined(NormBound(2.0), *in_chunks(updates_of(rows, counts), 2, 3, 1)), weighed, atol=1e-6)


@pytest.mark.parametrize("rule", (*RULES, NormBound(0.5)), ids=text)
def test_several_rounds_with_a_restart_between_them_give_the_same_bits(rule: FederatedTechnique) -> None:
    parts = round_with(rule)
    whole = killed = new_server(parts)
    for _ in range(3):
        whole = play(parts, whole, ToyDevices(parts), population()).server
        killed = play(parts, saved_and_restored(killed), ToyDevices(parts), population()).server
    assert same_state(whole, killed) and not torch.equal(whole.weights, new_server(parts).weights)
