"""What codecs have in common."""

from __future__ import annotations

from dataclasses import replace

from shoestring.federated.evidence import UpdateEvidence
from shoestring.federated.technique import RoundCost


def coded(cost: RoundCost, share: float) -> RoundCost:
    """The cost with a further error, where no device's work is known: a share of what the codecs before left of the update."""
    return unlimited(replace(cost, error=cost.error + max(1 - cost.error, 0.0) * share))


def recoded(cost: RoundCost, after: UpdateEvidence, variance: float = 0.0) -> RoundCost:
    """The cost with what codecs now make of devices' updates, and a further random error of the mean, `variance` = E|error|^2."""
    assert cost.evidence is not None, "there were updates to code"
    square = cost.evidence.square(cost.per_round)
    more = after.bias(cost.per_round) - cost.evidence.bias(cost.per_round) + variance
    return replace(cost, evidence=after, error=cost.error + (more / square if square else 0.0))


def unlimited(cost: RoundCost) -> RoundCost:
    """What arrives has no largest norm any more, however short a device made its update: coding may lengthen it."""
    return replace(cost, clip=0.0)


def device_noise(cost: RoundCost) -> str:
    """Why what devices send can't be coded, if they add noise themselves; empty if they don't."""
    if not cost.noise:
        return ""
    return (
        "devices add noise, and what they add sums up to the promised noise only if it arrives as it is: coded, every device's is "
        "changed on its own; use Clip and GaussianNoise, which the server does after decoding"
    )
