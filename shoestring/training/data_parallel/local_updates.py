"""Local updates: every worker steps on its own samples with its own optimizer, and sends the others the largest parts
of its updates.

    own weights    x_r = y + d_r                 y: the shared weights; d_r: worker r's updates that it has not sent yet
    a step         d_r = d_r + its optimizer's step        m_r = codec(d_r)
                   y = y + s / w  sum_r m_r                d_r = d_r - m_r

What a message leaves out is kept, as in error feedback for gradients, but here it already counts for the worker that
found it: with one percent sent per step, a gradient would reach the optimizer a hundred steps late. After the last step
every worker has y, the trained model. s is 1 where a step is proportional to its gradient (SGD). Adam and similar
optimizers divide by the gradient's size, and a worker's share of the batch has more noise: where noise dominates, their
steps are sqrt(w) times shorter than the whole batch's, so s = sqrt(w).
Basu et al.: Qsparse-local-SGD, 2019, arXiv 1906.02367; Xie et al.: CSER, 2020, arXiv 2007.13221; Malladi et al.: On the
SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022, arXiv 2205.10287 (the square root). What else was tried:
decisions/010.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.running.run import Run, weighted_loss
from shoestring.core.running.run_state import RunState
from shoestring.core.workers.link import Link
from shoestring.numerics.error_feedback import encode_and_keep
from shoestring.training.data_parallel.data_parallel import Statistics, share_of, trained_parameters
from shoestring.training.data_parallel.gradient_compression.gradient_codecs import Codec
from shoestring.training.data_parallel.reducer import make_buckets
from shoestring.training.links.process_link import Rows, own_row


def sharing_updates(run: Run, link: Link, codec: Codec) -> Run:
    """The run in which workers step on their own and send each other their updates, as messages of a codec."""
    updates = LocalUpdates(run, link, codec)
    statistics = Statistics(run.model, link)

    def gradients(now: Run, batch: Batch) -> Tensor:
        share = share_of(now, link, batch)
        statistics.begin()
        loss = own_gradients(run, now, batch) * share()
        total = loss.detach().reshape(1).float()
        link.sum(total).wait()
        return total[0]

    def update(now: Run) -> None:
        run.update(now)
        updates.share()
        statistics.average()

    return replace(run, gradients=gradients, update=update, state={**run.state, "moves": updates})


def own_gradients(run: Run, now: Run, batch: Batch) -> Tensor:
    """The loss and the gradients of a worker's own samples; zero where it has none."""
    idle = (
        replace(now, loss=lambda output, part: weighted_loss(now.loss(output, part), 0.0))
        if now.team.assignment.idle
        else now
    )
    return run.gradients(replace(idle, backward=run.backward), batch)


class LocalUpdates(RunState):
    """One worker's copy of the shared weights, in buckets: 4 bytes a weight."""

    def __init__(self, run: Run, link: Link, codec: Codec) -> None:
        self.run, self.link, self.codec = run, link, codec
        self.step = 0
        self.groups = make_buckets(trained_parameters(run))
        self.shared = [flat_weights(members).float() for members in self.groups]
        self.weight = (sqrt(self.link.world) if normalizes(run.optimizer) else 1.0) / self.link.world

    @torch.no_grad()
    def share(self) -> None:
        """After the worker's own step: send its updates, and apply the others'."""
        self.step += 1
        for members, shared in zip(self.groups, self.shared, strict=True):
            own = flat_weights(members).float().sub_(shared)
            message = own.new_empty(self.codec.size(len(own)), dtype=torch.uint8)
            encode_and_keep(self.codec, own, message)
            received = message.new_empty(len(message) * self.link.world)
            self.link.gather(message, received).wait()
            for update in received.split(len(message)):
                self.codec.add(update, shared, times=self.weight)
            unflatten_into(members, shared if self.step >= self.run.settings.steps else own.add_(shared))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "shared": self.shared,
            "weights": [Rows(self.link, flat_weights(members)) for members in self.groups],
            "own": own_state(self.run, self.link),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With another number of workers, unsent updates are lost: all begin from the shared weights."""
        self.step = state["step"]
        for members, shared, saved, rows in zip(
            self.groups, self.shared, state["shared"], state["weights"], strict=True
        ):
            shared.copy_(saved)
            own = own_row(rows, self.link)
            unflatten_into(members, shared if own is None else own)
        load_own_state(self.run, self.link, state["own"])


def normalizes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step sizes do not grow with gradients: Adam and every optimizer with betas, RMSprop, Adagrad."""
    return "betas" in optimizer.defaults or isinstance(optimizer, (torch.optim.RMSprop, torch.optim.Adagrad))


def flat_weights(members: Iterable[nn.Parameter]) -> Tensor:
    """Weights as one flat tensor."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in members])


@torch.no_grad()
def unflatten_into(members: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Set weights from such a flat tensor."""
    start = 0
    for parameter in members:
        parameter.copy_(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()


def own_state(run: Run, link: Link) -> dict[int, dict[str, Rows]]:
    """For every weight, the state in this worker's optimizer."""
    states = [run.optimizer.state.get(parameter, {}) for parameter in trained_parameters(run)]
    return {
        number: {key: Rows(link, value) for key, value in state.items() if isinstance(value, Tensor)}
        for number, state in enumerate(states)
    }


def load_own_state(run: Run, link: Link, state: dict[int, dict[str, Any]]) -> None:
    for number, parameter in enumerate(trained_parameters(run)):
        for key, rows in state[number].items():
            row = own_row(rows, link)
            if row is not None:
                run.optimizer.state[parameter][key].copy_(row)
