"""The expected damage of logits from few samples, against that of many."""

from __future__ import annotations

from statistics import median

import torch

from shoestring.compression.calibration.expected_damage import LogitErrors
from shoestring.compression.calibration.fidelity import BINARY, KL, OutputFidelity, OutputMeasure, fidelity

FEW, MANY, DRAWS = 192, 100_000, 11


def estimates(
    how: OutputMeasure, classes: int, scale: float
) -> tuple[list[OutputFidelity], list[OutputFidelity], float]:
    """Plain and expected fidelities of several draws of few samples, and the damage of many. `scale`: of logits, whose
    errors have deviation 0.5."""
    generator = torch.Generator().manual_seed(0)
    wanted = scale * torch.randn(MANY, classes, generator=generator)
    found = wanted + 0.5 * torch.randn(MANY, classes, generator=generator)
    said = [
        ({"y": found[begin : begin + FEW]}, {"y": wanted[begin : begin + FEW]})
        for begin in range(0, DRAWS * 2 * FEW, 2 * FEW)
    ]
    plain, expected = [], []
    for number, (mine, theirs) in enumerate(said):
        begin = number * 2 * FEW + FEW
        errors = LogitErrors([how], {"y": wanted[begin : begin + FEW]})
        errors.add(mine, theirs)
        told = fidelity([mine], [theirs], [how])
        plain += told.outputs
        expected += errors.expected(told).outputs
    return plain, expected, fidelity([{"y": found}], [{"y": wanted}], [how]).damage


def ratio(found: list[OutputFidelity], truth: float) -> float:
    """Median factor by which estimates are off."""
    return median(max(one.damage / truth, truth / max(one.damage, 1e-300)) for one in found)


def test_the_damage_of_a_classifier_that_is_sure_is_estimated_from_more_than_its_few_ties() -> None:
    for how, classes, scale in ((OutputMeasure("y", KL), 10, 300.0), (OutputMeasure("y", BINARY), 1, 100.0)):
        plain, expected, truth = estimates(how, classes, scale)
        assert ratio(plain, truth) > 1.5 and ratio(expected, truth) < 1.35
        off = [abs(one.damage - truth) / one.standard_error for one in expected if one.standard_error]
        assert len(off) == DRAWS and median(off) < 1, "the error bar is honest"


def test_a_mean_that_is_sure_stays_as_it_was_measured() -> None:
    plain, expected, _ = estimates(OutputMeasure("y", KL), 10, scale=2.0)
    assert expected == plain
