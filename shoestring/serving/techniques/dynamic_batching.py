"""Compute several requests together, as many as a budget of positions allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.serving.batching.policy import Batching
from shoestring.serving.technique import Deployment, ServingCost, ServingTechnique

STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # times the longest request


@dataclass(frozen=True)
class TokenBudget(ServingTechnique, ABC):
    """A batch of as many requests as a budget of positions allows."""

    tokens: int = 512

    order: ClassVar[int] = 20

    @property
    @abstractmethod
    def batching(self) -> Batching:
        """How requests are batched."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise Mistake(
                f"{type(self).__name__}(tokens={self.tokens}): it is the most positions in a batch; give the length of a request or more"
            )

    @classmethod
    def choices(cls, cost: ServingCost) -> tuple[TokenBudget, ...]:
        longest = max(cost.evidence.lengths)
        return tuple(cls(tokens=count * longest) for count in STEPS)

    def exactness(self, cost: ServingCost) -> Exactness:
        return Exactness.ROUNDING

    @property
    def family(self) -> str:
        return "DynamicBatching"

    def changes(self, deployment: Deployment) -> Mapping[str, object]:
        return {"batching": self.batching}


@dataclass(frozen=True)
class DynamicBatching(TokenBudget):
    """Requests of similar length are padded to the longest and computed together, oldest first.

        rows x longest  <=  tokens

    A free replica takes what waits; nothing waits for a batch to fill.

    Costs: a request waits for all of its batch; padding wastes up to a quarter of what is computed.

    Not for: models whose rows influence each other (BatchNorm in training mode); they are refused.
    """

    tokens: int = 512

    why: ClassVar[str] = "what a batch costs is shared"

    @property
    def batching(self) -> Batching:
        return Batching(tokens=self.tokens)


@dataclass(frozen=True)
class PackedBatching(TokenBudget):
    """Requests of any length are computed together without padding: what each position computes alone runs over all of
    them in one row, and attention runs for each request by itself.

        sum of lengths  <=  tokens

    Costs: copies at the entry and exit of the blocks, and attention in as many calls as there are lengths.

    Not for: models whose blocks mix positions otherwise than by scaled dot product attention.
    """

    tokens: int = 512

    why: ClassVar[str] = "no padding is computed"

    @property
    def batching(self) -> Batching:
        return Batching(tokens=self.tokens, packed=True)

    def refusal(self, cost: ServingCost) -> str:
        return "" if cost.engine.packed is not None else cost.engine.why_not_packed
