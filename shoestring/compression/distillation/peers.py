"""Co-distillation: peers learn from each other's predictions and from the labels.

    loss = (1/n) sum_i [ (1 - alpha) (own loss of i) + alpha (distillation of i from the mean of the others) ]

No gradient flows through the others' predictions. All peers see the same batches and differ in initialisation and
dropout. In Anil, Pereyra, Passos, Ormandi, Dahl, Hinton: Large Scale Distributed Neural Network Training through Online
Distillation, 2018, arXiv 1804.03235, peers run on other machines and see other data and older copies of each other.
After training one peer is enough: `first_peer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from shoestring.compression.distillation.losses import TeacherOutputs, compared_tensor, distillation_loss
from shoestring.compression.distillation.method import DistillationSettings, distillation_settings
from shoestring.compression.distillation.unlabelled import Unlabelled, mix_unlabelled, unwrap
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job

FIRST = "peers.0."
V = TypeVar("V")


class PeerOutputs(NamedTuple):
    """The output of each peer."""

    each: tuple[Any, ...]


class Peers(nn.Module):
    """Several models of the same architecture; the forward pass returns the outputs of all."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.peers = nn.ModuleList(make() for _ in range(count))

    def forward(self, *words: Any, **named: Any) -> PeerOutputs:
        return PeerOutputs(tuple(peer(*words, **named) for peer in self.peers))


def codistillation_job(
    own: Job,
    peers: int,
    *,
    objective: str = "kl",
    temperature: float = 1.0,
    alpha: float = 0.5,
    axis: int = -1,
    unlabelled: Job | None = None,
    ratio: int = 1,
) -> Job:
    """A job that trains several peers of the student's architecture together."""
    plan = distillation_settings(objective, temperature, alpha, axis)
    check_peers(own, peers, plan)

    def forward(model: nn.Module, batch: Batch) -> PeerOutputs:
        assert isinstance(model, Peers), "the model that this job makes"
        return PeerOutputs(tuple(own.forward(peer, unwrap(batch)) for peer in model.peers))

    def loss(output: PeerOutputs, batch: Batch) -> Tensor:
        inner = unwrap(batch)
        told = [compared_tensor(one).detach() for one in output.each]
        total: Any = 0.0
        for number, one in enumerate(output.each):
            others = TeacherOutputs(tuple(other for place, other in enumerate(told) if place != number))
            taught = plan.alpha * distillation_loss(plan.terms, one, (), others, inner, plan.temperature, plan.axis)
            total = total + (
                taught if isinstance(batch, Unlabelled) else taught + (1 - plan.alpha) * own.loss(one, inner)
            )
        mean: Tensor = total / len(told)
        return mean

    def first(model: nn.Module) -> nn.Module:
        assert isinstance(model, Peers), "the model that this job makes"
        return model.peers[0]

    validate, metrics, show = own.validate, own.metrics, own.show
    job = replace(
        own,
        model=lambda: Peers(own.model, peers),
        forward=forward,
        loss=loss,
        metrics=metrics and (lambda output, batch: metrics(output.each[0], batch)),
        validate=validate and (lambda model: validate(first(model))),
        show=show and (lambda model: show(first(model))),
    )
    return job if unlabelled is None else mix_unlabelled(job, own, unlabelled, ratio)


def check_peers(own: Job, peers: int, plan: DistillationSettings) -> None:
    """Raise Mistake for settings that peers can't learn with."""
    if peers < 2:
        raise Mistake(f"--peers {peers}: co-distillation needs 2 or more")
    if plan.hidden_terms:
        raise Mistake("peers learn from each other's outputs: leave hidden(...) out of the objective")
    if plan.alpha == 1:
        raise Mistake(
            "--alpha 1 with peers: no peer would learn from the labels, they would only agree with each other; give less than 1"
        )
    if own.weights:
        raise Mistake(
            "the student's job loads weights from a file, so all peers would start as the same model: leave `weights` out"
        )


def first_peer(weights: Mapping[str, V]) -> dict[str, V]:
    """The first peer's weights, under the names that they have in the student's model.

    >>> first_peer({"peers.0.bias": 1, "peers.1.bias": 2})
    {'bias': 1}
    """
    return {name.removeprefix(FIRST): value for name, value in weights.items() if name.startswith(FIRST)}
