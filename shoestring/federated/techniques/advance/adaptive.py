"""FedAdagrad, FedAdam and FedYogi: adaptive server optimizers, which treat the combined update as a gradient.

    m  <-  beta1 m + (1 - beta1) d
    v  <-  v + d^2                                     FedAdagrad
    v  <-  beta2 v + (1 - beta2) d^2                   FedAdam
    v  <-  v - (1 - beta2) d^2 sign(v - d^2)           FedYogi
    w  <-  w + lr m / (sqrt(v) + tau)

    d: the combined update; m begins at 0, v at tau^2; as in the paper, there is no bias correction

A round without any update leaves w, m and v unchanged.
Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan 2021, Adaptive Federated Optimization, arXiv 2003.00295,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.advance.server_step import Moments, check_rates, with_server_optimizer

Second = Callable[[Tensor, Tensor], Tensor]  # v, d^2 -> v


@dataclass(frozen=True)
class FedAdagrad(FederatedTechnique):
    """Let the server step by Adagrad.

    Costs: two more rows of numbers on the server, and a rate to choose.

    Not for: long trainings: its rates only ever fall.
    """

    lr: float = 0.01
    beta1: float = 0.0  # as in the paper's experiments
    tau: float = 1e-3  # adaptivity: the larger, the more alike the learning rates of all weights

    why: ClassVar[str] = "Adagrad on the server: rarely updated weights get larger steps"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs("FedAdagrad", self.lr, self.tau, beta1=self.beta1)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return with_adaptive_step(round, "FedAdagrad", self.lr, self.beta1, self.tau, lambda v, square: v + square)


@dataclass(frozen=True)
class FedAdam(FederatedTechnique):
    """Let the server step by Adam.

    Costs: two more rows of numbers on the server, and a rate to choose.

    Not for: jobs where plain averaging learns well and nobody tunes `lr`: it depends on the scale of the updates.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    why: ClassVar[str] = "Adam on the server: every weight has its own learning rate"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs("FedAdam", self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return with_adaptive_step(
            round,
            "FedAdam",
            self.lr,
            self.beta1,
            self.tau,
            lambda v, square: self.beta2 * v + (1 - self.beta2) * square,
        )


@dataclass(frozen=True)
class FedYogi(FederatedTechnique):
    """Let the server step by Yogi.

    Costs: two more rows of numbers on the server, and a rate to choose.

    Not for: jobs where plain averaging learns well and nobody tunes `lr`: it depends on the scale of the updates.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    why: ClassVar[str] = "Yogi on the server: like Adam, with learning rates that rise slowly"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs("FedYogi", self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return with_adaptive_step(
            round,
            "FedYogi",
            self.lr,
            self.beta1,
            self.tau,
            lambda v, square: v - (1 - self.beta2) * square * (v - square).sign(),
        )


def with_adaptive_step(round: Round, name: str, lr: float, beta1: float, tau: float, second: Second) -> Round:
    def step(update: Tensor, before: Moments) -> tuple[Tensor, Moments]:
        m = beta1 * before["m"] + (1 - beta1) * update
        v = second(before["v"], update.square())
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return with_server_optimizer(
        round, name, step, lambda weights: {"m": torch.zeros_like(weights), "v": torch.full_like(weights, tau**2)}
    )


def check_knobs(name: str, lr: float, tau: float, **betas: float) -> None:
    check_rates(name, lr=lr, tau=tau)
    for knob, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise Mistake(
                f"{name}({knob}={value}): it is the decay of a moving average; give a number from 0 to less than 1"
            )
