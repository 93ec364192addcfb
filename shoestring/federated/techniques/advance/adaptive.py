"""FedAdagrad, FedAdam and FedYogi: the server takes the combined update for a gradient, and every weight has a rate of its own.

    m  <-  beta1 m + (1 - beta1) d
    v  <-  v + d^2                                     FedAdagrad
    v  <-  beta2 v + (1 - beta2) d^2                   FedAdam
    v  <-  v - (1 - beta2) d^2 sign(v - d^2)           FedYogi
    w  <-  w + lr m / (sqrt(v) + tau)

    d: the combined update; m begins at 0, v at tau^2; there is no correction of the moments' bias, as in the paper

A round into which nothing came leaves w, m and v alone.
Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan 2021, Adaptive Federated Optimization, arXiv 2003.00295, algorithm 2.
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
from shoestring.federated.techniques.advance.stepping import Moments, check_rates, stepping

Second = Callable[[Tensor, Tensor], Tensor]  # v, d^2 -> v


@dataclass(frozen=True)
class FedAdagrad(FederatedTechnique):
    """Let the server step by Adagrad.

    Costs: two more rows of numbers on the server, and a rate to choose.

    Not for: long trainings: its rates only ever fall.
    """

    lr: float = 0.01
    beta1: float = 0.0  # as in the paper's experiments
    tau: float = 1e-3  # the larger, the less the rates of weights differ

    why: ClassVar[str] = "Adagrad on the server: weights that rarely move, move more"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70

    def __post_init__(self) -> None:
        check("FedAdagrad", self.lr, self.tau, beta1=self.beta1)

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[FedAdagrad, ...]:
        return ()

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return adaptive(round, "FedAdagrad", self.lr, self.beta1, self.tau, lambda v, square: v + square)


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

    why: ClassVar[str] = "Adam on the server: every weight has its own rate"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70

    def __post_init__(self) -> None:
        check("FedAdam", self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[FedAdam, ...]:
        return ()

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return adaptive(
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

    why: ClassVar[str] = "Yogi on the server: as Adam, with rates that rise slowly"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70

    def __post_init__(self) -> None:
        check("FedYogi", self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[FedYogi, ...]:
        return ()

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return adaptive(
            round,
            "FedYogi",
            self.lr,
            self.beta1,
            self.tau,
            lambda v, square: v - (1 - self.beta2) * square * (v - square).sign(),
        )


def adaptive(round: Round, name: str, lr: float, beta1: float, tau: float, second: Second) -> Round:
    def step(update: Tensor, before: Moments) -> tuple[Tensor, Moments]:
        m = beta1 * before["m"] + (1 - beta1) * update
        v = second(before["v"], update.square())
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return stepping(
        round, name, step, lambda weights: {"m": torch.zeros_like(weights), "v": torch.full_like(weights, tau**2)}
    )


def check(name: str, lr: float, tau: float, **betas: float) -> None:
    check_rates(name, lr=lr, tau=tau)
    for knob, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise Mistake(
                f"{name}({knob}={value}): it is the share of the past that is kept; give a number from 0 to less than 1"
            )
