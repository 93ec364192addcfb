"""A pipeline worker's part of a model, and how the parts are put together into a checkpoint, which equals that of one
process.

Every weight has the workers that use it; the first of them is its owner. A worker keeps weights that it does not use as
empty storage, and its optimizer knows only the weights that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.private import number_of, resize_storage, without_modes
from shoestring.core.running.run import AddUp, Run
from shoestring.core.running.run_state import KeepsWeights, StoredTensor
from shoestring.core.workers.link import Link

CHUNK = 1 << 22  # bytes sent at once for a checkpoint


class StageWeights:
    """The weights, buffers and optimizer state that one worker of a pipeline has."""

    def __init__(
        self, run: Run, link: Link, weights: Mapping[str, tuple[int, ...]], buffers: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`weights` and `buffers`: the workers that use each of them."""
        self.run, self.link = run, link
        self.names = dict(run.model.named_parameters(remove_duplicate=False))  # a shared weight: all its names
        self.by_name = dict(run.model.named_parameters())
        self.first: dict[Tensor, str] = {one: name for name, one in self.by_name.items()}
        self.users = {name: weights.get(name, (0,)) for name in self.by_name}  # unused: the first worker's
        self.buffer_users = {name: buffers.get(name, (0,)) for name, _ in run.model.named_buffers()}
        self.tied = {
            name: users for name, users in self.users.items() if len(users) > 1 and self.by_name[name].requires_grad
        }
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if self.uses(self.first[one])]
        self.own_weights = [one for group in run.optimizer.param_groups for one in group["params"] if one.requires_grad]
        self.elsewhere = frozenset(one for name, one in self.by_name.items() if not self.uses(name))
        self.release()

    def uses(self, name: str) -> bool:
        return self.link.rank in self.users[name]

    def one_of_them(self) -> Tensor:
        """A weight that this worker uses; any weight, if it uses none."""
        return next((one for name, one in self.by_name.items() if self.uses(name)), next(iter(self.by_name.values())))

    def counts_for(self, parameter: Tensor) -> bool:
        """Whether this worker counts a weight where all workers sum something up."""
        return self.users[self.first[parameter]][0] == self.link.rank

    @property
    def sums_of_tied(self) -> dict[nn.Parameter, AddUp]:
        """The weights that this worker shares with others, in the same order everywhere, each with a function that sums
        its gradients."""
        return {
            self.by_name[name]: partial(self.add_up_used, users)
            for name, users in sorted(self.tied.items())
            if self.link.rank in users
        }

    def add_up_used(self, users: tuple[int, ...], gradient: Tensor, used: bool) -> bool:
        """Sum a gradient over these workers if one of them has it; in a rehearsal one does."""
        count = torch.tensor([float(used)])
        self.add_up(users, count)
        if not self.link.imagined and not number_of(count):
            return False
        self.add_up(users, gradient)
        return True

    def add_up(self, users: tuple[int, ...], numbers: Tensor) -> None:
        """Sum numbers over these workers, in place: the first worker adds them in the order of workers."""
        first, *others = users
        if self.link.rank == first:
            arrived = torch.empty_like(numbers)
            for other in others:
                self.link.receive(arrived, other)
                numbers += arrived
            for other in others:
                self.link.send(numbers, other)
        else:
            self.link.send(numbers, first)
            self.link.receive(numbers, first)

    def release(self) -> None:
        """Free the weights that only other workers use."""
        with (
            without_modes()
        ):  # core/model/swap.py must not restore weights that are empty now; their swapped copies are dropped
            for one in self.elsewhere:
                hollow = one.detach().new_empty_strided(one.shape, one.stride())
                resize_storage(hollow, 0)
                one.data = hollow

    def gather(self) -> None:
        """Gather all weights here."""
        for name, one in self.by_name.items():
            users = self.users[name]
            if len(users) == self.link.world:
                continue
            whole = one.data if self.uses(name) else one.detach().new_zeros(one.shape)
            total = whole.clone() if self.counts_for(one) else torch.zeros_like(whole)
            self.link.sum(total.reshape(-1).view(torch.uint8)).wait()
            if not self.uses(name):
                one.data = total

    # Checkpoint state

    def tensors(self) -> Mapping[str, StoredTensor]:
        """All weights and buffers that not every worker has, by name."""
        inside = {
            name: one for part in self.run.state_that(KeepsWeights) for name, one in part.weights_elsewhere.items()
        }  # if another technique divides them further
        found: dict[str, StoredTensor] = {}
        for name, one in self.names.items():
            users = self.users[self.first[one]]
            if len(users) < self.link.world:
                here = self.link.rank in users
                # Weights that are not here are not read: a view of an empty storage may allocate it again
                value = (
                    inside[name]
                    if name in inside
                    else one.data
                    if here
                    else torch.empty(one.shape, dtype=one.dtype, device="meta")
                )
                found[name] = StagedTensor(self.link, users[0], value, one, here)
        for name, buffer in self.run.model.named_buffers():
            found[name] = StagedTensor(self.link, self.buffer_users[name][0], buffer, buffer)
        return found

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of all weights; each weight's comes from its owner."""
        mine = self.numbered_weights()
        known = {
            number: {key: describe_entry(value, parameter) for key, value in own["state"].get(local, {}).items()}
            for local, (number, parameter) in enumerate(mine)
            if self.counts_for(parameter)
        }
        local_of = {number: local for local, (number, _) in enumerate(mine)}
        state: dict[int, dict[str, Any]] = {}
        for worker, told in enumerate(self.link.objects(known)):
            for number, entries in told.items():
                if entries:
                    state[number] = {
                        key: self.part(own, local_of.get(number), key, worker, *entry)
                        if entry[0] is not None
                        else entry[2]
                        for key, entry in entries.items()
                    }
        numbers = iter(range(sum(map(len, self.groups))))
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [next(numbers) for _ in members]}
            for group, members in zip(own["param_groups"], self.groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def part(
        self,
        own: dict[str, Any],
        local: int | None,
        key: str,
        owner: int,
        dtype: torch.dtype,
        shape: torch.Size,
        _: Any,
    ) -> Any:
        here = owner == self.link.rank and local is not None
        value = own["state"][local][key] if here else torch.empty(shape, dtype=dtype, device="meta")
        return StagedTensor(self.link, owner, value)

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any]:
        mine = self.numbered_weights()
        local_of = {number: local for local, (number, _) in enumerate(mine)}
        state = {local_of[number]: entries for number, entries in whole["state"].items() if number in local_of}
        groups, before, local = [], 0, 0
        for group, members in zip(whole["param_groups"], self.groups, strict=True):
            count = sum(number in local_of for number in range(before, before + len(members)))
            groups.append(group | {"params": list(range(local, local + count))})
            before, local = before + len(members), local + count
        return {"state": state, "param_groups": groups}

    def numbered_weights(self) -> list[tuple[int, nn.Parameter]]:
        """The weights of this worker's optimizer, with their numbers among all weights."""
        everyone = [parameter for members in self.groups for parameter in members]
        return [(number, one) for number, one in enumerate(everyone) if self.uses(self.first[one])]


def describe_entry(value: Any, parameter: nn.Parameter) -> tuple[Any, Any, Any]:
    """An entry of an optimizer's state: dtype and shape of a tensor as large as the weight, the value of anything
    else."""
    if isinstance(value, StoredTensor) or (isinstance(value, Tensor) and value.numel() > 1):
        return value.dtype, value.shape, None
    return None, None, value


class StagedTensor:
    """A tensor that one worker of a pipeline has. All workers must read it together."""

    def __init__(
        self, link: Link, owner: int, value: Tensor | StoredTensor, parameter: Any = None, here: bool = True
    ) -> None:
        self.link, self.owner, self.value, self.parameter = link, owner, value, parameter
        self.here = here  # whether this worker uses it
        self.dtype, self.shape = value.dtype, value.shape
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order: the other workers add zeros to the bytes of its owner."""
        self.gathered = True
        mine = self.link.rank == self.owner
        own = self.numbers() if mine else iter(())
        step, count = max(CHUNK // self.dtype.itemsize, 1), prod(self.shape)
        for begin in range(0, count, step):
            size = min(step, count - begin)
            numbers = next(own).clone() if mine else torch.zeros(size, dtype=self.dtype)
            self.link.sum(numbers.reshape(-1).view(torch.uint8)).wait()
            yield numbers

    def numbers(self) -> Iterator[Tensor]:
        """The owner's numbers, in portions of one size, even if a tensor that is divided further comes in others."""
        step = max(CHUNK // self.dtype.itemsize, 1)
        if isinstance(self.value, Tensor):
            yield from self.value.detach().reshape(-1).split(step)
            return
        waiting: list[Tensor] = []
        for piece in self.value.pieces():
            waiting.append(piece.clone())
            while sum(map(len, waiting)) >= step:
                whole = torch.cat(waiting)
                yield whole[:step]
                waiting = [whole[step:]]
        if sum(map(len, waiting)):
            yield torch.cat(waiting)

    def take(self, whole: Tensor) -> None:
        """Take over a whole tensor where it is used."""
        if not self.here:
            return
        if isinstance(self.value, Tensor):
            self.value.data.copy_(whole)
        else:
            self.value.take(whole)  # type: ignore[attr-defined]
