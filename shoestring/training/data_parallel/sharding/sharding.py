"""The engine of Shard: every worker owns a shard of each unit of weights, with its gradients and optimizer state.

stage 1, 2    all weights are here; after the update every worker sends its shard to the others
stage 3       only this worker's shard is here; a block's weights are gathered before its forward and backward and freed afterwards.
              Their storage is emptied and refilled in place, so that tensors saved by autograd are valid again in time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.private import storage_id, storage_id_of, tree_leaves
from shoestring.core.running.run import AddUp, Run
from shoestring.core.running.run_state import DividesOptimizer, KeepsWeights, RunState
from shoestring.core.workers.link import CompletedWork, Link, Sending
from shoestring.measure.interception import Guard, patch_forwards
from shoestring.training.data_parallel.reducer import Bucket, Reducer
from shoestring.training.data_parallel.sharding.shard_units import ShardUnit, cut_up

CHUNK = 1 << 22  # bytes gathered at once for a checkpoint


class Sharding(RunState, KeepsWeights, DividesOptimizer):
    """A run's weights in units, and the run state that goes with them."""

    def __init__(self, run: Run, link: Link, stage: int) -> None:
        self.run, self.stage, self.link = run, stage, link
        self.names = {
            parameter: name for name, parameter in reversed(list(run.model.named_parameters(remove_duplicate=False)))
        }
        self.units = [ShardUnit(members, link, block, stage == 3) for block, members in cut_up(run, stage)]
        self.frozen = [unit for unit in self.units if not unit.members[0].requires_grad]
        moving = [unit for unit in self.units if unit.members[0].requires_grad]
        self.unit_of = {parameter: unit for unit in self.units for parameter in unit.members}
        self.of_block: dict[nn.Module, list[ShardUnit]] = {}
        for unit in self.units:
            if unit.block is not None:
                self.of_block.setdefault(unit.block, []).append(unit)
        self.reducer = Reducer(moving, link, self.send, keeps_gradients=False)
        self.sending: Sending = CompletedWork()
        self.in_backward = False  # whether backward is running
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["params"] = [piece for parameter in group["params"] for piece in self.pieces_of(parameter)]

    def pieces_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        unit = self.unit_of.get(parameter)
        return [parameter] if unit is None else [unit.pieces[parameter]] if parameter in unit.pieces else []

    # One step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While inside, blocks find their weights, in forward and when they are recomputed."""
        if self.stage < 3:
            yield
            return
        with (
            patch_forwards(
                {block: self.with_gathering(units, block.forward) for block, units in self.of_block.items()}
            ),
            self.guard(),
        ):
            yield

    def guard(self) -> AbstractContextManager[object]:
        """In a rehearsal, detect a weight that is used while it is not gathered."""
        storages = {storage_id_of(unit.whole): self.names[unit.members[0]] for unit in self.units if unit.parted}

        def absent(leaf: Tensor) -> str:
            storage = leaf.untyped_storage()
            return "" if storage.nbytes() or not leaf.numel() else storages.get(storage_id(storage), "")

        rehearsed = self.link.imagined and self.link.world > 1
        return Guard(absent, "use Shard(stage=1) or Shard(stage=2)") if rehearsed and storages else nullcontext()

    def with_gathering(self, units: list[ShardUnit], inner: Any) -> Any:
        def gather(gradient: Tensor | None = None) -> None:
            for unit in units:
                unit.gather()

        def forward(*args: Any, **kwargs: Any) -> Any:
            gather()
            output = inner(*args, **kwargs)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(gather)
            if not self.in_backward:
                for unit in units:
                    unit.release()
            return output

        return forward

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """While inside, gradients are sent to their owners as they arrive. In stage 1 they stay until the last
        micro-batch."""
        self.in_backward = True
        try:
            if self.stage == 1 and not last:
                yield
                return
            with self.guard(), self.reducer.listening():
                yield
            self.sending.wait()
            self.sending = CompletedWork()
        finally:
            self.in_backward = False
            for unit in self.units:
                if unit.block is not None:
                    unit.release()

    def send(self, bucket: Bucket) -> Sending:
        """Send one unit's gradients; waits for the previous unit's, so that buffers exist once."""
        assert isinstance(bucket, ShardUnit), "these are the units"
        self.sending.wait()
        self.sending = GradientsInFlight(bucket, self.link)
        if bucket.block is not None and not self.frozen:
            bucket.release()
        return self.sending

    def gather_outside(self) -> None:
        """Gather the weights outside of all blocks for the time of a step."""
        for unit in self.units:
            if unit.block is None:
                unit.gather()

    def release(self) -> None:
        for unit in self.units:
            unit.release()

    def add_up_parts(self, shared: Mapping[nn.Parameter, AddUp], unused: set[nn.Parameter]) -> set[nn.Parameter]:
        """Sum this worker's shard of the gradients of weights that several stages use; the workers of those stages hold
        the same shard. Of the weights that no replica of this stage used, return those that no other stage used
        either."""
        for parameter, add_up in shared.items():
            unit = self.unit_of[parameter]
            unit.gradient = unit.gradient if unit.gradient is not None else unit.own.new_zeros(unit.part)
            if add_up(unit.gradient, parameter not in unused):
                unused = unused - {parameter}
        return unused

    def set_gradients(self, unused: set[nn.Parameter]) -> None:
        """Give the pieces their gradients."""
        for unit in self.reducer.buckets:
            assert isinstance(unit, ShardUnit), "these are the units"
            for parameter, piece in unit.pieces.items():
                start, stop = unit.span(parameter)
                whole = unit.gradient
                piece.grad = (
                    None if whole is None or parameter in unused else whole[start - unit.begin : stop - unit.begin]
                )
            unit.gradient = None

    def clip(self, most: float, optimizer: Any) -> None:
        """Scale gradients down to a global norm of `most`, computed over all workers' pieces."""
        found = [piece.grad for group in optimizer.param_groups for piece in group["params"] if piece.grad is not None]
        weights = {piece: weight for unit in self.units for weight, piece in unit.pieces.items()}
        square = self.units[0].own.new_zeros(1, dtype=torch.float32)
        for group in optimizer.param_groups:
            for piece in group["params"]:
                if piece.grad is not None:
                    square += self.run.held.share(weights.get(piece, piece)) * piece.grad.float().square().sum()
        self.link.sum(square).wait()
        self.run.held.summed(square)
        norm = square.sqrt_()
        self.run.noted.note_norm(norm)
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in found:
            gradient.mul_(factor.to(gradient.dtype))

    def gather_weights(self) -> None:
        """After the update: all-gather the weights where they stay whole."""
        if self.stage < 3:
            for sending in [unit.link.gather(unit.own, unit.whole) for unit in self.units if unit not in self.frozen]:
                sending.wait()

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, all weights are gathered."""
        for unit in self.units:
            unit.gather()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def together(self) -> Iterator[None]:
        """While inside, all workers may call the model at the same time: blocks gather their weights when they are
        called."""
        self.gather_outside()
        try:
            with patch_forwards(
                {block: self.with_gathering(units, block.forward) for block, units in self.of_block.items()}
                if self.stage == 3
                else {}
            ):
                yield
        finally:
            self.release()

    # Checkpoint state: the same as for one process, so that any number of workers can resume from it

    @property
    def weights_elsewhere(self) -> dict[str, ShardedTensor]:
        if self.stage < 3:
            return {}
        return {
            name: ShardedTensor(
                self, parameter, lambda parameter=parameter: self.unit_of[parameter].pieces.get(parameter)
            )
            for name, parameter in self.run.model.named_parameters(remove_duplicate=False)
            if parameter in self.unit_of
        }

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict with sharded tensors whole; each is gathered when it is written."""
        optimizer = self.run.optimizer
        known = [next(map(self.piece_state, self.pieces_of(parameter)), {}) for parameter in self.all_weights()]
        told = self.link.objects(known)
        whole: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self.all_weights()):
            found = next((one[number] for one in told if one[number]), None)
            if found:
                whole[number] = {
                    key: self.state_entry(parameter, key, dtype) if dtype is not None else value
                    for key, (dtype, value) in found.items()
                }
        numbers = iter(range(len(whole) + 10**9))
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [next(numbers) for _ in members]}
            for group, members in zip(optimizer.param_groups, self.groups, strict=True)
        ]
        return {"state": whole, "param_groups": groups}

    def all_weights(self) -> list[nn.Parameter]:
        return [parameter for members in self.groups for parameter in members]

    def piece_state(self, piece: nn.Parameter) -> dict[str, tuple[Any, Any]]:
        """A piece's optimizer state: the dtype of every tensor as long as the piece, and the value of anything else."""
        state = self.run.optimizer.state.get(piece, {})
        return {
            key: (value.dtype, None) if isinstance(value, Tensor) and value.shape == piece.shape else (None, value)
            for key, value in state.items()
        }

    def state_entry(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Any:
        optimizer = self.run.optimizer
        if parameter not in self.unit_of:
            return optimizer.state[parameter][key]
        return ShardedTensor(
            self,
            parameter,
            lambda: next((optimizer.state[piece][key] for piece in self.pieces_of(parameter)), None),
            dtype,
        )

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This worker's pieces of a whole optimizer state."""
        state: dict[int, dict[str, Any]] = {}
        groups, local, number = [], 0, 0
        for group, members in zip(whole["param_groups"], self.groups, strict=True):
            own = []
            for parameter in members:
                for _ in self.pieces_of(parameter):
                    if number in whole["state"]:
                        state[local] = {
                            key: self.piece_of(value, parameter) for key, value in whole["state"][number].items()
                        }
                    own.append(local)
                    local += 1
                number += 1
            groups.append(group | {"params": own})
        return {"state": state, "param_groups": groups}

    def piece_of(self, value: Any, parameter: nn.Parameter) -> Any:
        """This worker's piece of a tensor of a weight's shape."""
        unit = self.unit_of.get(parameter)
        if unit is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        start, stop = unit.span(parameter)
        first = unit.offsets[parameter]
        return value.reshape(-1)[start - first : stop - first].clone()


class GradientsInFlight:
    """A unit's gradients on the way to their owners."""

    def __init__(self, unit: ShardUnit, link: Link) -> None:
        self.unit: ShardUnit | None = unit
        self.flat: Tensor | None = unit.buffer  # until it is sent
        self.part = unit.buffer.new_empty(unit.part)
        self.sending: Sending | None = link.scatter(unit.buffer, self.part)

    def wait(self) -> None:
        if self.unit is None or self.sending is None:
            return
        self.sending.wait()
        if self.unit.gradient is None:
            self.unit.gradient = self.part
        else:
            self.unit.gradient += self.part
        self.unit = self.sending = self.flat = None


class ShardedTensor:
    """A tensor of a weight's shape, of which every worker holds a piece. All workers must read it together."""

    def __init__(
        self, sharding: Sharding, parameter: nn.Parameter, piece: Any, dtype: torch.dtype | None = None
    ) -> None:
        self.sharding, self.parameter, self.piece = sharding, parameter, piece
        self.dtype, self.shape = dtype or parameter.dtype, parameter.shape
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order: workers put their pieces into zeros and sum the bytes, which changes no bit."""
        self.gathered = True
        unit, own = self.sharding.unit_of[self.parameter], self.piece()
        start, stop = (place - unit.offsets[self.parameter] for place in unit.span(self.parameter))
        count, step = prod(self.shape), CHUNK // self.dtype.itemsize
        for begin in range(0, count, step):
            end = min(begin + step, count)
            numbers = unit.own.new_zeros(end - begin, dtype=self.dtype)
            first, last = max(begin, start), min(end, stop)
            if own is not None and first < last:
                numbers[first - begin : last - begin] = own.detach().reshape(-1)[first - start : last - start]
            self.sharding.link.sum(numbers.view(torch.uint8)).wait()
            yield numbers

    def take(self, whole: Tensor) -> None:
        """Take this worker's piece of a whole tensor."""
        own = self.piece()
        if own is not None:
            own.data.copy_(self.sharding.piece_of(whole, self.parameter))
