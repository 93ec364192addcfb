"""CompressGradients: workers send compressed gradients; what a message leaves out is added to the next one (error
feedback).

    kind        bytes sent per step (g: bytes of gradients, w: workers)  stated error
    fp16 bf16   (w - 1) / w  g                                         2^-11 2^-8 of each number
    int8        (w - 1) / w  g / 2                                     1/254 of the largest of 1,024 numbers
    topk        (w - 1)  share g                                       all but the largest `share` of the updates waits
    powersgd    2 (w - 1) / w  r (rows + columns) of each matrix       all but r directions of each matrix wait

With fp16, bf16 and int8 each worker sums one part of the gradients, and messages are compressed on the way there and
back. With powersgd two thin matrices are summed. With topk every worker steps on its own and all get the largest parts
of everybody's updates. Each kind keeps 4 bytes a weight for what messages left out. Weights that several workers of one
model replica hold alike (norms under TensorParallel, tied embeddings under Pipeline) are summed uncompressed.
Sources: gradient_codecs, error_feedback, local_updates and power_sgd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.core.workers.link import Link, Sending
from shoestring.training.data_parallel.data_parallel import (
    data_parallel_refusal,
    mixed_drift,
    sum_gradients,
    with_buckets,
    with_traffic,
)
from shoestring.training.data_parallel.gradient_compression.error_feedback import ErrorFeedback
from shoestring.training.data_parallel.gradient_compression.gradient_codecs import CODECS, Codec, TopKCodec
from shoestring.training.data_parallel.gradient_compression.power_sgd import PowerSGD, check_rank
from shoestring.training.data_parallel.local_updates import sharing_updates
from shoestring.training.data_parallel.reducer import BUCKET, Bucket
from shoestring.training.group_technique import GroupTechnique

KINDS = (*CODECS, "powersgd")
VECTOR = 16  # numbers: a worker's part of a bucket is a multiple of this


@dataclass(frozen=True)
class CompressGradients(GroupTechnique):
    """Send gradients in fewer bits, or only their largest parts.

    Costs: 4 bytes a weight for what is left out and sent later, time to compress, and some of what the model
    learns.

    Not for: fast links, such as memory shared by workers of one machine, where compressing takes longer than
    sending.
    """

    kind: str = "int8"  # "fp16", "bf16", "int8", "topk" or "powersgd"
    share: float = 0.01  # fraction of the numbers that topk sends
    rank: int = 4  # rank of the matrices that powersgd sends

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = False
    unites: ClassVar[str] = "data"
    why: ClassVar[str] = "gradients are summed as shorter messages; what one leaves out is added to the next"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"CompressGradients(kind={self.kind!r}): there are {', '.join(KINDS)}")
        TopKCodec(self.share)
        check_rank(self.rank)

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[CompressGradients, ...]:
        return tuple(
            map(cls, ("fp16", "int8"))
        )  # the effect of topk and powersgd on the loss can't be predicted: used only when asked for

    @property
    def label(self) -> str:
        return f"CompressGradients({self.kind})"

    @property
    def codec(self) -> Codec:
        return TopKCodec(self.share) if self.kind == "topk" else CODECS[self.kind]

    @property
    def error(self) -> float:
        """What a message may leave out, in the codec's own measure."""
        return PowerSGD.error if self.kind == "powersgd" else self.codec.error

    def refusal(self, ledger: Ledger) -> str:
        return data_parallel_refusal(ledger)

    def drift(self, ledger: Ledger) -> float:
        return {"topk": 0.8, "powersgd": 0.5}.get(self.kind, 0.01) + mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        held, world = ledger.all_gradients, ledger.workers.world
        if self.kind == "powersgd":
            sent = (
                2 * (world - 1) / world * min(4 * 2 * self.rank * (held / 4) ** 0.5 * len(ledger.blocks) ** 0.5, held)
            )
        else:
            sent = (world - 1) * self.codec.size(int(held / 4)) * (1 if self.kind == "topk" else 2 / world)
        kept_back = held * (1 if self.kind in ("topk", "powersgd") else 1 + 1 / world)
        made = replace(ledger, standing=replace(ledger.standing, gradients=ledger.standing.gradients + kept_back))
        made = made.with_update_rise(2 * min(BUCKET, held)) if self.kind == "topk" else with_buckets(made)
        return with_traffic(made, sent, 2 * held / BUCKET + 3)

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        if self.kind == "topk":
            return sharing_updates(run, link, self.codec)
        feedback = ErrorFeedback(run.team.mesh)
        parts: dict[str, RunState] = {"feedback": feedback}
        if self.kind == "powersgd":
            factors = LowRankFactors(self.rank)
            parts["powers"] = factors
            made = sum_gradients(run, link, lambda bucket: LowRankSum(bucket, factors.of(bucket), feedback, link))
        else:
            made = sum_gradients(
                run,
                link,
                lambda bucket: CompressedSum(bucket, self.codec, feedback, link),
                link.world * VECTOR,
                alike=lambda bucket: link.sum(bucket.buffer),
            )
        return replace(made, state={**run.state, **parts})


class CompressedSum:
    """A bucket being summed, compressed on the way to the workers that sum its parts and on the way back."""

    def __init__(self, bucket: Bucket, codec: Codec, feedback: ErrorFeedback, link: Link) -> None:
        self.name, self.flat, self.codec, self.feedback, self.link = bucket.name, bucket.buffer, codec, feedback, link
        self.part = len(self.flat) // link.world
        self.size = codec.size(self.part)
        outgoing = bytes_for(self.flat, self.size * link.world)
        for rank in range(link.world):
            feedback.encode(
                f"{self.name} to {rank}", self.of(self.flat, rank, self.part), codec, self.of(outgoing, rank, self.size)
            )
        self.incoming = bytes_for(self.flat, len(outgoing))
        self.sending: Sending = link.exchange(outgoing, self.incoming)
        self.outgoing = outgoing  # kept alive until it is sent

    def of(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole[rank * size : (rank + 1) * size]

    def wait(self) -> None:
        self.sending.wait()
        total = self.flat.new_zeros(self.part)
        for rank in range(self.link.world):
            self.codec.add(self.of(self.incoming, rank, self.size), total)
        mine = bytes_for(self.flat, self.size)
        self.feedback.encode(f"{self.name} sum", total, self.codec, mine)
        self.link.gather(mine, self.incoming).wait()
        self.flat.zero_()
        for rank in range(self.link.world):
            self.codec.add(self.of(self.incoming, rank, self.size), self.of(self.flat, rank, self.part))


class LowRankSum:
    """A bucket being summed as products of thin matrices."""

    def __init__(self, bucket: Bucket, power: PowerSGD, feedback: ErrorFeedback, link: Link) -> None:
        self.flat, self.power, self.link = bucket.buffer, power, link
        self.owed = feedback.amount_owed(bucket.name, self.flat)
        self.first = power.first(self.owed)
        self.sending = link.sum(self.first)

    def wait(self) -> None:
        self.sending.wait()
        second = self.power.second(self.owed, self.first)
        self.power.add(second, self.owed, -1.0)
        self.link.sum(second).wait()
        self.flat.zero_()
        self.power.add(second, self.flat)
        self.power.warm(second)


class LowRankFactors(RunState):
    """The PowerSGD matrices of every bucket."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: dict[str, PowerSGD] = {}
        self.loaded: dict[str, Any] = {}  # from a checkpoint, for buckets that do not exist yet

    def of(self, bucket: Bucket) -> PowerSGD:
        if bucket.name not in self.made:
            self.made[bucket.name] = PowerSGD([parameter.shape for parameter in bucket.members], self.rank)
            if bucket.name in self.loaded:
                self.made[bucket.name].load_state_dict(self.loaded[bucket.name])
        return self.made[bucket.name]

    def state_dict(self) -> dict[str, Any]:
        return {name: power.state_dict() for name, power in self.made.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def bytes_for(numbers: Tensor, size: int) -> Tensor:
    return numbers.new_empty(size, dtype=torch.uint8)
