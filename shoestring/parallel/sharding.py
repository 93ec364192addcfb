"""The engine of Shard: every worker owns a part of each unit of weights, and of all that goes with it.

A unit is a block, or a bucket of the weights outside of all blocks. Its weights lie one after the other in a stretch that is cut into
`world` equal parts, padded at the end. The optimizer steps pieces: what of each weight lies in this worker's part.

    stage 1, 2    the whole stretch is here; after the update everybody sends its part round
    stage 3       only this worker's part is here; the whole comes before a block's forward and backward and goes after them.
                  Its storage is emptied and filled again, so what autograd saved of it is right again in time
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.link import Done, Link, Sending
from shoestring.core.private import resize_storage, storage_id, storage_id_of, tree_leaves
from shoestring.core.run import Part, Run
from shoestring.measure.interception import Guard, patched
from shoestring.parallel.reducer import Bucket, Reducer, bucketed, part_of

VECTOR = 16        # numbers: parts begin at a multiple of it
CHUNK = 1 << 22    # bytes that are gathered at once for a checkpoint


class Unit(Bucket):
    """Weights that are cut together."""

    def __init__(self, members: Sequence[nn.Parameter], link: Link, block: nn.Module | None, parted: bool) -> None:
        super().__init__(members, link.world * VECTOR)
        self.link, self.block, self.parted = link, block, parted
        self.part = self.size // link.world
        self.begin = link.rank * self.part
        first = members[0]
        self.whole = first.data.new_empty(self.size)
        with torch.no_grad():
            for parameter in members:
                view = part_of(self.whole, self.offsets[parameter], parameter)
                view.copy_(parameter)
                parameter.data = view
            self.whole[sum(parameter.numel() for parameter in members):].zero_()
        self.mine = self.whole[self.begin:self.begin + self.part]
        self.present = True
        if parted:
            self.mine = self.mine.clone()
            self.leave()
        self.pieces = {parameter: nn.Parameter(self.mine[start - self.begin:stop - self.begin]) for parameter in members
                       for start, stop in [self.span(parameter)] if start < stop}
        self.gradient: Tensor | None = None   # of this worker's part

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Where in the stretch this worker's piece of a weight begins and ends."""
        start = self.offsets[parameter]
        return max(start, self.begin), min(start + parameter.numel(), self.begin + self.part)

    def come(self) -> None:
        """Bring the whole here."""
        if not self.present:
            resize_storage(self.whole, self.size)
            self.link.gather(self.mine, self.whole).wait()
            self.present = True

    def leave(self) -> None:
        """Keep only this worker's part."""
        if self.present and self.parted:
            resize_storage(self.whole, 0)
            self.present = False


class Sharding(Part):
    """A run's weights in units, and what a run says of them."""

    def __init__(self, run: Run, link: Link, stage: int) -> None:
        self.run, self.stage, self.link = run, stage, link
        self.names = {parameter: name for name, parameter in reversed(list(run.model.named_parameters(remove_duplicate=False)))}
        self.units = [Unit(members, link, block, stage == 3) for block, members in cut_up(run, stage)]
        self.frozen = [unit for unit in self.units if not unit.members[0].requires_grad]
        moving = [unit for unit in self.units if unit.members[0].requires_grad]
        self.unit_of = {parameter: unit for unit in self.units for parameter in unit.members}
        self.of_block: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            if unit.block is not None:
                self.of_block.setdefault(unit.block, []).append(unit)
        self.reducer = Reducer(moving, link, self.send, stays=False)
        self.sending: Sending = Done()
        self.backing = False       # backward runs
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["params"] = [piece for parameter in group["params"] for piece in self.pieces_of(parameter)]

    def pieces_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        unit = self.unit_of.get(parameter)
        return [parameter] if unit is None else [unit.pieces[parameter]] if parameter in unit.pieces else []

    # The step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While inside, blocks find their weights, in forward and when they are computed again."""
        if self.stage < 3:
            yield
            return
        with patched({block: self.wrapped(units, block.forward) for block, units in self.of_block.items()}), self.guard():
            yield

    def guard(self) -> AbstractContextManager[object]:
        """In a rehearsal, a weight that is used while it is not there is found."""
        storages = {storage_id_of(unit.whole): self.names[unit.members[0]] for unit in self.units if unit.parted}

        def absent(leaf: Tensor) -> str:
            storage = leaf.untyped_storage()
            return "" if storage.nbytes() or not leaf.numel() else storages.get(storage_id(storage), "")

        rehearsed = self.link.imagined and self.link.world > 1
        return Guard(absent, "use Shard(stage=1) or Shard(stage=2)") if rehearsed and storages else nullcontext()

    def wrapped(self, units: list[Unit], inner: Any) -> Any:
        def come(gradient: Tensor | None = None) -> None:
            for unit in units:
                unit.come()

        def forward(*args: Any, **kwargs: Any) -> Any:
            come()
            output = inner(*args, **kwargs)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(come)
            if not self.backing:
                for unit in units:
                    unit.leave()
            return output

        return forward

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """While inside, gradients that arrive go to their owners. In stage 1 they stay until the last piece of the batch."""
        self.backing = True
        try:
            if self.stage == 1 and not last:
                yield
                return
            with self.guard(), self.reducer.listening():
                yield
            self.sending.wait()
            self.sending = Done()
        finally:
            self.backing = False
            for unit in self.units:
                if unit.block is not None:
                    unit.leave()

    def send(self, bucket: Bucket) -> Sending:
        """One unit's gradients on the way at a time: what they need is there once."""
        assert isinstance(bucket, Unit), "these are the units"
        self.sending.wait()
        self.sending = Arriving(bucket, self.link)
        if bucket.block is not None and not self.frozen:
            bucket.leave()
        return self.sending

    def come(self) -> None:
        """Bring what lies outside of all blocks, for the time of a step."""
        for unit in self.units:
            if unit.block is None:
                unit.come()

    def leave(self) -> None:
        for unit in self.units:
            unit.leave()

    def hand_out(self, unused: set[nn.Parameter]) -> None:
        """Give the pieces their gradients."""
        for unit in self.reducer.buckets:
            assert isinstance(unit, Unit), "these are the units"
            for parameter, piece in unit.pieces.items():
                start, stop = unit.span(parameter)
                whole = unit.gradient
                piece.grad = None if whole is None or parameter in unused else whole[start - unit.begin:stop - unit.begin]
            unit.gradient = None

    def clip(self, most: float, optimizer: Any) -> None:
        """Scale gradients down to a global norm, which is that of all workers' pieces."""
        found = [piece.grad for group in optimizer.param_groups for piece in group["params"] if piece.grad is not None]
        square = self.units[0].mine.new_zeros(1, dtype=torch.float32)
        for gradient in found:
            square += gradient.float().square().sum()
        self.link.sum(square).wait()
        factor = torch.clamp(most / (square.sqrt() + 1e-6), max=1.0)
        for gradient in found:
            gradient.mul_(factor.to(gradient.dtype))

    def spread(self) -> None:
        """After the update: everybody's parts to everybody, where the whole stays here."""
        if self.stage < 3:
            for sending in [unit.link.gather(unit.mine, unit.whole) for unit in self.units if unit not in self.frozen]:
                sending.wait()

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, all weights are here."""
        for unit in self.units:
            unit.come()
        try:
            yield
        finally:
            self.leave()

    # What survives a restart: the same as in one process, so that any number of workers can go on from it

    @property
    def kept(self) -> dict[str, Parted]:
        if self.stage < 3:
            return {}
        return {name: Parted(self, parameter, lambda parameter=parameter: self.unit_of[parameter].pieces.get(parameter))
                for name, parameter in self.run.model.named_parameters(remove_duplicate=False) if parameter in self.unit_of}

    def whole_optimizer(self) -> dict[str, Any]:
        """The optimizer's state as one process would have it; what is parted is gathered when it is written."""
        optimizer = self.run.optimizer
        known = [next(map(self.known, self.pieces_of(parameter)), {}) for parameter in self.all_weights()]
        told = self.link.objects(known)
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self.all_weights()):
            found = next((one[number] for one in told if one[number]), None)
            if found:
                state[number] = {key: self.parted(parameter, key, dtype) if dtype is not None else value
                                 for key, (dtype, value) in found.items()}
        numbers = iter(range(len(state) + 10**9))
        groups = [{key: value for key, value in group.items() if key != "params"} | {"params": [next(numbers) for _ in members]}
                  for group, members in zip(optimizer.param_groups, self.groups, strict=True)]
        return {"state": state, "param_groups": groups}

    def all_weights(self) -> list[nn.Parameter]:
        return [parameter for members in self.groups for parameter in members]

    def known(self, piece: nn.Parameter) -> dict[str, tuple[Any, Any]]:
        """What a piece's state has: of a tensor as long as the piece its dtype, of anything else the value."""
        state = self.run.optimizer.state.get(piece, {})
        return {key: (value.dtype, None) if isinstance(value, Tensor) and value.shape == piece.shape else (None, value)
                for key, value in state.items()}

    def parted(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Any:
        optimizer = self.run.optimizer
        if parameter not in self.unit_of:
            return optimizer.state[parameter][key]
        return Parted(self, parameter, lambda: next(
            (optimizer.state[piece][key] for piece in self.pieces_of(parameter)), None), dtype)

    def put_optimizer(self, whole: dict[str, Any]) -> bool:
        """Take this worker's pieces of a whole state."""
        state: dict[int, dict[str, Any]] = {}
        groups, local, number = [], 0, 0
        for group, members in zip(whole["param_groups"], self.groups, strict=True):
            own = []
            for parameter in members:
                for _ in self.pieces_of(parameter):
                    if number in whole["state"]:
                        state[local] = {key: self.piece_of(value, parameter) for key, value in whole["state"][number].items()}
                    own.append(local)
                    local += 1
                number += 1
            groups.append(group | {"params": own})
        self.run.optimizer.load_state_dict({"state": state, "param_groups": groups})
        return True

    def piece_of(self, value: Any, parameter: nn.Parameter) -> Any:
        """This worker's piece of a tensor of a weight's shape."""
        unit = self.unit_of.get(parameter)
        if unit is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        start, stop = unit.span(parameter)
        first = unit.offsets[parameter]
        return value.reshape(-1)[start - first:stop - first].clone()


class Arriving:
    """A unit's gradients on their way to their owners."""

    def __init__(self, unit: Unit, link: Link) -> None:
        self.unit: Unit | None = unit
        self.flat: Tensor | None = unit.filled      # until it is sent
        self.part = unit.filled.new_empty(unit.part)
        self.sending: Sending | None = link.scatter(unit.filled, self.part)

    def wait(self) -> None:
        if self.unit is None or self.sending is None:
            return
        self.sending.wait()
        if self.unit.gradient is None:
            self.unit.gradient = self.part
        else:
            self.unit.gradient += self.part
        self.unit = self.sending = self.flat = None


class Parted:
    """A tensor of a weight's shape of which every worker holds a piece. All of them must ask for it."""

    def __init__(self, sharding: Sharding, parameter: nn.Parameter, piece: Any, dtype: torch.dtype | None = None) -> None:
        self.sharding, self.parameter, self.piece = sharding, parameter, piece
        self.dtype, self.shape = dtype or parameter.dtype, parameter.shape
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order: workers put theirs into zeros and add up bytes, which changes none."""
        self.gathered = True
        unit, own = self.sharding.unit_of[self.parameter], self.piece()
        start, stop = (place - unit.offsets[self.parameter] for place in unit.span(self.parameter))
        count, step = prod(self.shape), CHUNK // self.dtype.itemsize
        for begin in range(0, count, step):
            end = min(begin + step, count)
            numbers = unit.mine.new_zeros(end - begin, dtype=self.dtype)
            first, last = max(begin, start), min(end, stop)
            if own is not None and first < last:
                numbers[first - begin:last - begin] = own.detach().reshape(-1)[first - start:last - start]
            self.sharding.link.sum(numbers.view(torch.uint8)).wait()
            yield numbers

    def take(self, whole: Tensor) -> None:
        """Take this worker's piece of a whole."""
        own = self.piece()
        if own is not None:
            own.data.copy_(self.sharding.piece_of(whole, self.parameter))


def cut_up(run: Run, stage: int) -> list[tuple[nn.Module | None, list[nn.Parameter]]]:
    """The members of every unit, with its block, in the order in which backward comes to them."""
    count: dict[nn.Parameter, int] = {}
    for block in run.blocks.values():
        for parameter in block.parameters():
            count[parameter] = count.get(parameter, 0) + 1
    inside: list[tuple[nn.Module | None, list[nn.Parameter]]] = []
    for block in reversed(list(run.blocks.values())):
        own = [parameter for parameter in block.parameters() if count[parameter] == 1 and (stage == 3 or parameter.requires_grad)]
        inside += [(block, members) for members in alike(own)]
    outside = [parameter for parameter in run.model.parameters()
               if count.get(parameter, 0) != 1 and (stage == 3 or parameter.requires_grad)]
    return [*inside, *((None, members) for kind in alike(outside) for members in bucketed(kind))]


def alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights that can lie in one stretch: of one dtype and device, all trained or all not."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return list(kinds.values())
