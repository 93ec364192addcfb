"""Every technique of the catalogue and every allowed combination of work x send x combine x private: it runs, it is predicted to the byte,
it is the same bits in two processes, and what is not allowed says why.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from math import inf

import pytest
import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.technique import drift, in_order, parse_technique
from shoestring.federated.catalogue import CATALOGUE, clash, incomplete_reason
from shoestring.federated.planning.prepare import Prepared, parts_of, plain_cost
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.room import FederatedRoom
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.planning.choose import requested_candidate
from tests.federated.toys import toy

WORK = ("", "FedSGD()", "FedProx(mu=0.1)", "Scaffold()", "FedPer()", "Ditto()", "FineTune()")
SEND = (
    "",
    "TopK(share=0.2)",
    "TopK(share=0.2) + QuantizeUpdates()",
    "Sketch(share=0.3)",
    "QuantizeUpdates(bits=4)",
    "Rotate() + QuantizeUpdates()",
    "QuantizeDown()",
    "TopK(share=0.1) + QuantizeDown(bits=4)",
)
COMBINE = (
    "",
    "QFedAvg()",
    "CoordinateMedian()",
    "TrimmedMean(share=0.2)",
    "Krum(malicious=1)",
    "MultiKrum(malicious=1)",
    "NormBound(norm=0.1)",
    "FedAvgM()",
    "FedAdam()",
    "FedYogi()",
    "FedAdagrad()",
    "FedBuff(buffer=3, concurrency=6)",
)
PRIVATE = (
    "",
    "Clip(norm=0.1)",  # updates of the first round are longer: .07 to .27
    "Clip(norm=0.1) + GaussianNoise(multiplier=1.0)",
    "DeviceClip(norm=0.1) + DeviceNoise(multiplier=1.0)",
    "AdaptiveClip(noise=1.0) + GaussianNoise(multiplier=1.0)",
)
DEVICES = ("Malicious(share=0.3)", "DropOut(rate=0.3)", "Slow(deadline=2.0)")
ONCE_EACH = tuple(
    dict.fromkeys(
        one for row in (WORK, SEND, COMBINE, PRIVATE, DEVICES) for text in row for one in text.split(" + ") if one
    )
)


@cache
def given() -> Prepared:
    return toy(per_round=8, insecure_seed=5)  # so that noise can be compared


@cache
def cost(private: bool) -> RoundCost:
    """Of a federation that asks for privacy, and of one that does not: some techniques are refused in the first."""
    return plain_cost(toy(per_round=8, delta=1e-3, epsilon=50.0) if private else given())


def made(*rows: str) -> tuple[FederatedTechnique, ...]:
    return in_order(parse_technique(one, CATALOGUE) for row in rows for one in row.split(" + ") if one)


def why_not(techniques: tuple[FederatedTechnique, ...], private: bool) -> str:
    """Why a combination is not allowed; empty if it is."""
    found = next(
        filter(None, (clash(one, other) for one, other in combinations(techniques, 2))), ""
    ) or incomplete_reason(techniques)
    if found:
        return found
    try:
        requested_candidate(techniques, cost(private))
    except Mistake as error:
        return str(error)
    return ""


def rounds(techniques: tuple[FederatedTechnique, ...], count: int = 2, processes: int = 1) -> list[RoundResult]:
    from dataclasses import replace

    here = replace(given(), processes=processes)
    parts = parts_of(here, techniques)
    server, devices, found = here.server(parts), here.devices(parts), []
    try:
        for number in range(count):
            found.append(play(parts, server, devices, here.population, judges=number == count - 1))
            server = found[-1].server
    finally:
        devices.close()
    return found


def check(techniques: tuple[FederatedTechnique, ...], private: bool) -> Tensor:
    """It runs, nobody is rejected, and every byte is predicted."""
    candidate = requested_candidate(techniques, cost(private))
    predicted, confirmed = candidate.cost, FederatedRoom(given(), cost(private)).confirm(candidate).predicted
    assert (confirmed["up_bytes"], confirmed["down_bytes"]) == (predicted.up, predicted.down), techniques
    for played in rounds(techniques):
        assert not played.rejected, (techniques, played.rejected)
        assert played.up == predicted.up * played.senders, (
            techniques,
            played.up / max(played.senders, 1),
            predicted.up,
        )
        assert played.down == predicted.down * played.ordered, (
            techniques,
            played.down / max(played.ordered, 1),
            predicted.down,
        )
        assert bool(played.server.weights.isfinite().all())
    return played.server.weights


def test_the_matrix_has_every_technique_of_the_catalogue() -> None:
    assert {one.partition("(")[0] for one in ONCE_EACH} == {kind.__name__ for kind in CATALOGUE}


@pytest.mark.parametrize("written", [*WORK, *SEND, *COMBINE, *PRIVATE, *DEVICES])
def test_every_technique_is_predicted_to_the_byte_and_keeps_what_it_states(written: str) -> None:
    techniques, private = made(written), "Noise" in written
    weights = check(techniques, private)
    level = max((one.exactness(cost(private)) for one in techniques), default=Exactness.BITS)
    plain = rounds(())[-1].server.weights
    if level is Exactness.BITS:
        assert torch.equal(weights, plain), f"{written} states same bits"
    elif level is Exactness.ROUNDING:
        assert torch.allclose(weights, plain, atol=1e-5)
    else:
        assert not torch.equal(weights, plain), f"{written} states that it changes the result, and does nothing"
        least, most = stated_error(techniques, private)
        assert least <= error_of_first_round(techniques) <= most, f"{written} states another error of the first round"


def stated_error(techniques: tuple[FederatedTechnique, ...], private: bool) -> tuple[float, float]:
    """Between which the squared error of the first round's step must lie, as a share of the step. No limits: one states nothing.

    What is stated is a mean over draws (noise, rounding) and, of QuantizeDown, over weights of a normal distribution.
    """
    now, drifts = cost(private), []
    for one in techniques:
        drifts.append(drift(one, now))
        now = one.cost(now)
    return (0.0, inf) if inf in drifts else (sum(drifts) / 3, 1.5 * sum(drifts))


def error_of_first_round(techniques: tuple[FederatedTechnique, ...]) -> float:
    begun = given().server(parts_of(given(), ())).weights.double()
    plain, found = (rounds(some, 1)[-1].server.weights.double() for some in ((), techniques))
    return float((found - plain).square().sum() / (plain - begun).square().sum())


def test_one_that_states_a_smaller_error_is_found() -> None:
    techniques = made("TopK(share=0.2)")
    least, most = stated_error(made("TopK(share=0.5)"), False)
    assert not least <= error_of_first_round(techniques) <= most


@pytest.mark.parametrize(
    "written",
    [
        "Scaffold()",
        "FedPer()",
        "Ditto()",
        "TopK(share=0.2)",
        "CoordinateMedian()",
        "Krum(malicious=1)",
        "FedBuff(buffer=3, concurrency=6)",
        "AdaptiveClip(noise=1.0) + GaussianNoise(multiplier=1.0)",
        "DeviceClip(norm=0.1) + DeviceNoise(multiplier=1.0)",
    ],
)
def test_what_is_kept_between_rounds_is_the_same_bits_in_two_processes(written: str) -> None:
    alone, two = (rounds(made(written), 3, processes)[-1].server for processes in (1, 2))
    assert torch.equal(alone.weights, two.weights)
    assert all(torch.equal(value, two.state[name]) for name, value in alone.state.items())


def allowed_pairs() -> list[tuple[str, str]]:
    rows = (WORK, SEND, COMBINE, PRIVATE)
    return [
        (one, other)
        for first, second in combinations(rows, 2)
        for one, other in product(first, second)
        if one and other
    ]


@pytest.mark.slow
def test_all_pairs_run_or_say_why_not() -> None:
    refused = {}
    for pair in allowed_pairs():
        techniques, private = made(*pair), any("Noise" in one for one in pair)
        if reason := why_not(techniques, private):
            refused[pair] = reason
        else:
            check(techniques, private)
    assert all(len(reason) > 20 for reason in refused.values())
    assert len(refused) < len(allowed_pairs()) / 3, "most pairs are allowed"


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("send", SEND)
def test_all_allowed_combinations_run(work: str, send: str) -> None:
    ran = 0
    for combine, private in product(COMBINE, PRIVATE):
        techniques = made(work, send, combine, private)
        if not why_not(techniques, "Noise" in private):
            check(techniques, "Noise" in private)
            ran += 1
    assert ran > 10
