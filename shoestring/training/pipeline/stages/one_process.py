"""All stages of a pipeline in one process, one action after the other: trials compare this with plain training.

The engine is the one real workers use (training/pipeline/stages/stages.py). Messages stay in memory and nobody waits: an
action runs only when everything that it needs is done, so a missing message is an error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.workers.actions import Action
from shoestring.core.workers.link import CompletedWork, Link, Sending
from shoestring.core.workers.mesh import Mesh
from shoestring.training.pipeline.schedule import action_text, needs
from shoestring.training.pipeline.stages.stages import Stages

Mail = dict[tuple[int, int, int], deque[Tensor]]  # by (sender, receiver, tag)


class MailLink(Link):
    """A stage's link to the other stages of the same process."""

    imagined = False

    def __init__(self, rank: int, world: int, mail: Mail) -> None:
        super().__init__(rank, world)
        self.mail = mail

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        self.mail[self.rank, to, tag].append(tensor.detach().clone())
        return CompletedWork()

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        assert source is not None, "a stage knows whom it receives from"
        waiting = self.mail[source, self.rank, tag]
        if not waiting or waiting[0].shape != tensor.shape or waiting[0].dtype != tensor.dtype:
            sent = f"something of shape {tuple(waiting[0].shape)} and {waiting[0].dtype}" if waiting else "nothing"
            raise Mistake(
                f"stage {self.rank} awaits something of shape {tuple(tensor.shape)} and {tensor.dtype} from stage {source}, "
                f"which sent {sent}"
            )
        with torch.no_grad():
            tensor.copy_(waiting.popleft())
        return source


def mail_meshes(stages: int) -> list[Mesh]:
    """The meshes of stages that send each other messages within one process."""
    mail: Mail = defaultdict(deque)
    links = [MailLink(rank, stages, mail) for rank in range(stages)]
    return [Mesh(link, {"data": Link(), "stage": link, "tensor": Link()}) for link in links]


@dataclass
class StagesHere:
    """A `StageLine` that uses the real engine; `runs` are the stages' runs, in order."""

    runs: Sequence[Run]
    engines: list[Stages] = field(init=False)

    def __post_init__(self) -> None:
        parts = [run.state["stages"] for run in self.runs]
        self.engines = [part for part in parts if isinstance(part, Stages)]

    def gradients(self, batch: Batch) -> float:
        doing = [engine.passes(run, batch) for engine, run in zip(self.engines, self.runs, strict=True)]
        turn: list[Action | None] = [next(one, None) for one in doing]
        ended: set[Action] = set()
        last = len(self.engines[0].ranges) - 1
        while any(turn):
            ready = [
                (rank, action)
                for rank, action in enumerate(turn)
                if action is not None and all(one in ended for one in needs(action, last, ended))
            ]
            if not ready:
                raise Mistake(
                    f"the stages wait for each other: {', '.join(action_text(one) for one in turn if one is not None)}"
                )
            for rank, action in ready:
                turn[rank] = next(doing[rank], None)
                ended.add(action)
        for engine in self.engines:
            engine.wait_for_sends()
        return sum(float(engine.taken_total()) for engine in self.engines)

    def weight_gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, users in self.engines[0].weights.users.items():
            own = [grad for user in users if (grad := self.engines[user].weights.by_name[name].grad) is not None]
            if own:
                found[name] = sum(own[1:], own[0])
        return found

    def weights(self) -> dict[str, Tensor]:
        return {
            name: self.engines[users[0]].weights.by_name[name].detach()
            for name, users in self.engines[0].weights.users.items()
        }

    def buffers(self) -> dict[str, Tensor]:
        own = [dict(engine.run.model.named_buffers()) for engine in self.engines]
        return {name: own[users[0]][name] for name, users in self.engines[0].weights.buffer_users.items()}
