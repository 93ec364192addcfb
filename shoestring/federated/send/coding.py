"""What codecs have in common."""
from __future__ import annotations

from dataclasses import replace

from shoestring.federated.technique import RoundCost


def coded(cost: RoundCost, share: float) -> RoundCost:
    """The cost with a further error, which is a share of what the codecs before left of the update. What arrives has no largest norm any
    more, however short a device made its update: coding may lengthen it."""
    return replace(cost, error=cost.error + max(1 - cost.error, 0.0) * share, clip=0.0)


def device_noise(cost: RoundCost) -> str:
    """Why what devices send can't be coded, if they add noise themselves; empty if they don't."""
    if not cost.noise:
        return ""
    return ("devices add noise, and what they add sums up to the promised noise only if it arrives as it is: coded, every device's is "
            "changed on its own; use Clip and GaussianNoise, which the server does after decoding")
