"""Randomness for privacy: numbers can't be drawn again, and Gaussians are normally distributed."""

from __future__ import annotations

from math import erfc, sqrt

import pytest
import torch

from shoestring.federated.playing.randomness import (
    AT_ONCE,
    SYSTEM,
    Randomness,
    SeededRandomness,
    add_noise,
    normals,
    uniform_from_bytes,
)


@pytest.mark.parametrize("source", [SYSTEM, SeededRandomness(3)])
def test_normals_have_the_moments_and_the_tails_of_the_normal_distribution(source: Randomness) -> None:
    drawn, count = normals(source, 400_000, "test"), 400_000
    assert drawn.dtype == torch.float64 and len(drawn) == count
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float((drawn**power).mean()) - expected) < 6 * sqrt(105 / count)
    for beyond in (1.0, 2.0, 3.0):
        share, expected_share = float((drawn.abs() > beyond).double().mean()), erfc(beyond / sqrt(2))
        assert abs(share - expected_share) < 6 * sqrt(expected_share / count), beyond
    halves = drawn.view(2, -1)  # the cosines and the sines of the same draws
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 6 / sqrt(count / 2)


def test_uniform_numbers_are_never_0_or_1() -> None:
    assert float(uniform_from_bytes(bytes(8))) > 0 and float(uniform_from_bytes(b"\xff" * 8)) < 1
    assert float(normals(SYSTEM, 10_001).abs().max()) < 8.7


def test_more_numbers_than_are_asked_for_at_once_all_differ() -> None:
    drawn = SYSTEM.uniforms(AT_ONCE + 3)
    assert len(drawn) == AT_ONCE + 3 and len(drawn.unique()) > len(drawn) - 3
    assert len(SYSTEM.uniforms(0)) == 0


def test_what_follows_from_a_seed_follows_from_its_purpose_too() -> None:
    source = SeededRandomness(3)
    assert torch.equal(source.uniforms(5, "noise", 1), source.uniforms(5, "noise", 1))
    assert not torch.equal(source.uniforms(5, "noise", 1), source.uniforms(5, "noise", 2))
    assert not torch.equal(SYSTEM.uniforms(5, "noise", 1), SYSTEM.uniforms(5, "noise", 1))


@pytest.mark.parametrize("deviation", [3e-5, 1.0, 7.7, 1e6])
def test_noise_is_added_on_a_grid_finer_than_anybody_needs(deviation: float) -> None:
    values = torch.linspace(-5, 5, 1001) * deviation
    found = add_noise(values, deviation, SeededRandomness(1), "test")
    exact = values.double() + normals(SeededRandomness(1), 1001, "test") * deviation
    assert float((found - exact).abs().max()) <= deviation * 2**-20
    assert not torch.equal(found, exact)
