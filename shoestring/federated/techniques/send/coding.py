"""How codecs change the cost of a round."""

from __future__ import annotations

from dataclasses import replace

from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.technique import RoundCost


def add_error_share(cost: RoundCost, share: float) -> RoundCost:
    """The cost with a further error where no updates were measured: a share of what earlier codecs left of the update."""
    return without_clip(replace(cost, error=cost.error + max(1 - cost.error, 0.0) * share))


def replace_evidence(cost: RoundCost, after: UpdateEvidence, variance: float = 0.0) -> RoundCost:
    """The cost with new evidence after a codec, and the codec's random error of the mean, `variance` = E|error|^2."""
    assert cost.evidence is not None, "there were updates to code"
    square = cost.evidence.square(cost.per_round)
    more = after.bias(cost.per_round) - cost.evidence.bias(cost.per_round) + variance
    return replace(cost, evidence=after, error=cost.error + (more / square if square else 0.0))


def without_clip(cost: RoundCost) -> RoundCost:
    """The cost without a clipping norm: decoding may lengthen an update that its device clipped."""
    return replace(cost, clip=0.0)


def device_noise_refusal(cost: RoundCost) -> str:
    """Why updates can't be compressed if devices add noise themselves; empty if they don't."""
    if not cost.noise:
        return ""
    return (
        "devices add noise, and their noise sums up as promised only if it arrives unchanged: a codec would change it; use Clip "
        "and GaussianNoise, which the server applies after decoding"
    )
