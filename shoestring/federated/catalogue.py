"""The list of all federated techniques, and the pairs that can't be combined."""

from __future__ import annotations

from collections.abc import Iterable

from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.advance.adaptive import FedAdagrad, FedAdam, FedYogi
from shoestring.federated.techniques.advance.fed_sgd import FedSGD
from shoestring.federated.techniques.advance.momentum import FedAvgM
from shoestring.federated.techniques.behaviour.dropout import DropOut
from shoestring.federated.techniques.behaviour.malicious import Malicious
from shoestring.federated.techniques.behaviour.slow import Slow
from shoestring.federated.techniques.combine.by_coordinate import CoordinateMedian, TrimmedMean
from shoestring.federated.techniques.combine.fed_buff import FedBuff
from shoestring.federated.techniques.combine.krum import Krum, MultiKrum
from shoestring.federated.techniques.combine.norm_bound import NormBound
from shoestring.federated.techniques.combine.q_fedavg import QFedAvg
from shoestring.federated.techniques.local_training.ditto import Ditto
from shoestring.federated.techniques.local_training.fedper import FedPer
from shoestring.federated.techniques.local_training.fedprox import FedProx
from shoestring.federated.techniques.local_training.finetune import FineTune
from shoestring.federated.techniques.local_training.scaffold import Scaffold
from shoestring.federated.techniques.private.adaptive_clip import AdaptiveClip
from shoestring.federated.techniques.private.clip import Clip, DeviceClip
from shoestring.federated.techniques.private.device_noise import DeviceNoise
from shoestring.federated.techniques.private.gaussian_noise import GaussianNoise
from shoestring.federated.techniques.send.quantize import QuantizeUpdates
from shoestring.federated.techniques.send.quantize_down import QuantizeDown
from shoestring.federated.techniques.send.rotate import Rotate
from shoestring.federated.techniques.send.sketch import Sketch
from shoestring.federated.techniques.send.top_k import TopK

CATALOGUE: tuple[type[FederatedTechnique], ...] = (
    FedSGD,
    FedProx,
    Scaffold,
    FedPer,
    Ditto,
    FineTune,
    Malicious,
    DropOut,
    Slow,
    TopK,
    Sketch,
    Rotate,
    QuantizeUpdates,
    QuantizeDown,
    DeviceClip,
    DeviceNoise,
    Clip,
    AdaptiveClip,
    GaussianNoise,
    QFedAvg,
    CoordinateMedian,
    TrimmedMean,
    Krum,
    MultiKrum,
    NormBound,
    FedAvgM,
    FedAdam,
    FedYogi,
    FedAdagrad,
    FedBuff,
)
SLOTS = {  # what a slot decides: a round can have one technique for each
    "work": "how devices train",
    "sparse": "which numbers are sent",
    "combine": "how updates are combined",
    "advance": "how the weights move",
    "clip": "how long an update may be",
}
ROBUST = ("CoordinateMedian", "TrimmedMean", "Krum", "MultiKrum")
NOISES = ("GaussianNoise", "DeviceNoise")
CONFLICTS: dict[frozenset[str], str] = {
    frozenset(
        {"Malicious", "DeviceNoise"}
    ): "malicious devices neither clip nor add their share of the noise, so epsilon would not "
    "hold: use Clip and GaussianNoise, which the server applies to whatever arrives",
    frozenset(
        {"NormBound", "DeviceNoise"}
    ): "the server would shorten rows and with them the noise that devices added, so its sum would have less than promised: "
    "DeviceClip bounds them before",
    frozenset(
        {"FedPer", "Ditto"}
    ): "FedPer keeps a part of the model on the device and Ditto a whole one: choose one of them",
    frozenset({"Ditto", "FineTune"}): "both decide which personal weights are evaluated: choose one of them",
    frozenset({"Slow", "FedBuff"}): "FedBuff simulates device speeds itself: give it a spread instead",
    frozenset(
        {"Scaffold", "FedBuff"}
    ): "Scaffold's correction belongs to the newest weights, and with FedBuff devices begin from older ones",
    **{
        frozenset({"Scaffold", one}): "devices that the rule leaves out would still move Scaffold's control variate"
        for one in ROBUST
    },
    **{
        frozenset(
            {"Scaffold", one}
        ): "what Scaffold sends beside the update is neither clipped nor has noise, so that it would tell of a "
        "device what epsilon does not count"
        for one in NOISES
    },
    **{
        frozenset(
            {"FedBuff", one}
        ): "epsilon is counted for devices that are drawn anew in every round; with FedBuff who is quick takes "
        "part more often"
        for one in NOISES
    },
}


def clash(one: FederatedTechnique, other: FederatedTechnique) -> str:
    """Why two techniques can't be combined; empty if they can."""
    names = type(one).__name__, type(other).__name__
    if names[0] == names[1]:
        return f"{names[0]} twice: choose one of its settings"
    if one.slot and one.slot == other.slot:
        return f"{names[0]} and {names[1]} both say {SLOTS.get(one.slot, one.slot)}: choose one of them"
    return CONFLICTS.get(frozenset(names), "")


def incomplete_reason(techniques: Iterable[FederatedTechnique]) -> str:
    """Which technique is missing before these make a plan; empty if none is."""
    found = {type(one).__name__: one for one in techniques}
    for name, one in found.items():
        if one.needs and not found.keys() & set(one.needs):
            return f"{name} is of no use without {' or '.join(one.needs)}: add it"
    return ""
