"""The worst neighbour, on numbers: what one device can change in the sum that noise is added to, for every technique that may be combined
with noise. Epsilon counts on it being no more than the clipping norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from shoestring.core.technique import in_order
from shoestring.federated.catalogue import CATALOGUE, clash
from shoestring.federated.playing.play import play
from shoestring.federated.round import Combined, Population, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.behaviour.malicious import Malicious
from shoestring.federated.techniques.combine.krum import Krum, MultiKrum
from shoestring.federated.techniques.combine.norm_bound import NormBound
from shoestring.federated.techniques.local_training.ditto import Ditto
from shoestring.federated.techniques.local_training.fedper import FedPer
from shoestring.federated.techniques.local_training.finetune import FineTune
from shoestring.federated.techniques.private.adaptive_clip import COUNTED, AdaptiveClip
from shoestring.federated.techniques.private.clip import Clip, DeviceClip
from shoestring.federated.techniques.private.device_noise import DeviceNoise
from shoestring.federated.techniques.private.gaussian_noise import GaussianNoise
from tests.federated.techniques.private.test_private import Chunks, rows
from tests.federated.techniques.send.made_up import MadeUp, plain_cost

pytest.importorskip("dp_accounting")
NORM, DEVICES, SIZE = 2.0, 9, 64
PRIVATE: tuple[tuple[FederatedTechnique, ...], ...] = (
    (Clip(NORM), GaussianNoise(1.0)),
    (DeviceClip(NORM), GaussianNoise(1.0)),
    (AdaptiveClip(start=NORM, noise=0.5), GaussianNoise(1.0)),
    (DeviceClip(NORM), DeviceNoise(1.0)),
)
SETTINGS: dict[type[FederatedTechnique], tuple[FederatedTechnique, ...]] = {
    Krum: (Krum(1),),
    MultiKrum: (MultiKrum(1),),
    NormBound: (NormBound(0.7), NormBound(100.0)),
    Malicious: (Malicious(1.0), Malicious(1.0, "sign-flip", 10.0), Malicious(1.0, "noise", 10.0)),
}


@dataclass(frozen=True)
class NoNoise:
    """Everybody takes part, and all noise is 0."""

    secret: ClassVar[bool] = True

    def uniforms(self, count: int, *words: object) -> Tensor:
        made = torch.zeros if words[0] == "choose" else torch.ones
        return made(count, dtype=torch.float64)


def exact_sum(found: dict[str, Tensor], techniques: tuple[FederatedTechnique, ...]) -> Combined:
    """What a round adds up, without its noise."""
    made, seen = MadeUp(found, techniques, NoNoise()), list[Combined]()
    parts = made.parts

    def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
        seen.append(parts.combine(server, arriving))
        return seen[-1]

    population = Population(len(found), list(found).__getitem__, len(found))
    play(parts.with_(combine=combine), parts.initial(made.server()), Chunks(made), population, strict=False)
    return seen[-1]


def refused(techniques: tuple[FederatedTechnique, ...]) -> bool:
    cost = replace(plain_cost(torch.randn(SIZE), DEVICES), delta=1e-5, clients=100, wanted=8.0)
    for one in in_order(techniques):
        if one.refusal(cost):
            return True
        cost = one.cost(cost)
    return False


def worst_rows() -> list[Tensor]:
    """Updates that try to count for more than others."""
    one = torch.ones(SIZE)
    spike = torch.zeros(SIZE)
    spike[3] = 1.0
    return [one * 1e30, -one * 1e30, spike * 1e30, spike * NORM, one * 1e-30, one * (NORM / 8), torch.zeros(SIZE)]


@pytest.mark.parametrize("private", PRIVATE, ids=lambda some: " ".join(type(one).__name__ for one in some))
def test_one_device_changes_the_sum_by_no_more_than_the_norm_beside_any_technique(
    private: tuple[FederatedTechnique, ...],
) -> None:
    others, tried = rows(DEVICES - 1, SIZE), list[str]()
    for kind in (one for one in CATALOGUE if one not in (FedPer, Ditto, FineTune)):  # before any clip, on real models
        for extra in SETTINGS.get(kind) or (kind(),):
            techniques = (*private, extra)
            if any(clash(extra, one) for one in private) or refused(techniques):
                continue
            tried.append(type(extra).__name__)
            without = exact_sum(others, techniques)
            for row in worst_rows():
                whole = exact_sum({**others, "worst": row}, techniques)
                # the sum is divided by how many are expected, which is all here
                change = (whole.update * whole.weight - without.update * without.weight).double()
                assert float(change.norm()) <= NORM * (1 + 1e-4), (extra, row[:4])
    on_devices = any(isinstance(one, DeviceNoise) for one in private)
    assert {"FedSGD", "FedAdam", "DropOut"} <= set(tried) and ("NormBound" in tried) is not on_devices, tried


def test_one_device_changes_an_adaptive_clips_count_by_half_a_device() -> None:
    techniques = (AdaptiveClip(start=NORM, noise=0.5, rate=1e-3), GaussianNoise(1.0))
    others = rows(DEVICES - 1, SIZE)
    for row in worst_rows():
        without, whole = exact_sum(others, techniques), exact_sum({**others, "worst": row}, techniques)
        shares = [
            (NORM / float(one.state["AdaptiveClip.norm"])) for one in (without, whole)
        ]  # exp(rate (share - quantile)), both by the devices expected in the round
        counts = [
            (torch.tensor(share).log().item() / 1e-3) * devices
            for share, devices in zip(shares, (DEVICES - 1, DEVICES), strict=True)
        ]
        assert abs(counts[1] - counts[0]) <= 0.5 + 1e-3, row[:4]
        assert float(whole.state[COUNTED]) == pytest.approx(0.5 * DEVICES)
