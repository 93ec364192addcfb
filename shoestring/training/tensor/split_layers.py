"""The engine of TensorParallel: every worker has its part of each split layer, and the model's own forward runs on it.

During a forward or backward, layers split by outputs copy their input (and sum its gradient), layers split by inputs
sum their results, and a module's counts (its heads) are this worker's share. Afterwards the model is as before, except
that the weights are parts; `usable` and the end of the run put whole weights in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.errors import Mistake
from shoestring.core.private import storage_id_of, tree_map, unseen_functions, without_modes
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import DividesOptimizer, KeepsWeights, RunState
from shoestring.core.user_code.seams import calls_user
from shoestring.core.workers.link import Link
from shoestring.measure.calls import attributes
from shoestring.measure.interception import Guard
from shoestring.training.tensor.collectives import (
    all_gather,
    all_reduce,
    copy_in,
    gather_in,
    keep_own_slice,
    reduce_scatter,
)
from shoestring.training.tensor.layer_kinds import (
    SplitLayers,
    bias_of,
    child,
    is_transposed,
    recognise_layers,
    weight_of,
)
from shoestring.training.tensor.split_vocabulary import SplitLogits, embed_split
from shoestring.training.tensor.splits import Split, SplitTensor

WORTH_TELLING = 0.1  # remark on unsplit layers if they hold more than this fraction of all weights
SEQUENCE = 1  # the token dimension of activations between blocks: (sample, token, width)
Forward = Callable[..., Any]


class TensorParts(RunState, KeepsWeights, DividesOptimizer):
    """A run's weights in parts, and the run state that goes with them."""

    def __init__(self, run: Run, link: Link, sequence: bool) -> None:
        self.run, self.link, self.sequence = run, link, sequence
        self.found = recognise_layers(run.model, run.blocks, link.world)
        self.splits = dict(self.found.splits)
        self.shapes = {weight: weight.shape for weight in self.splits}  # of the whole weights
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        self.names = {
            weight: name for name, weight in reversed(list(run.model.named_parameters(remove_duplicate=False)))
        }
        self.draws = Draws(run, link)
        self.entered = self.in_layer = False
        blocks = {weight for block in run.blocks.values() for weight in block.parameters()} if sequence else set()
        # Held whole by all workers, but each uses them for its part only: their gradients must be summed
        self.partial = [
            weight
            for weight in self.names
            if weight not in self.splits and (weight in blocks or weight in set(self.found.whole_inside))
        ]
        with torch.no_grad():
            for weight, split in self.splits.items():
                weight.data = split.own(weight.data, link)

    # One step

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While inside, the model's modules compute with this worker's parts."""
        if self.entered:
            yield
            return
        self.entered = True
        try:
            with attributes(self.changes()):
                yield
        finally:
            self.entered = False
            self.draws.before = None

    def changes(self) -> dict[nn.Module, dict[str, Any]]:
        """The attributes that modules have while they compute with parts."""
        found: dict[nn.Module, dict[str, Any]] = {}
        for module, layers in self.found.modules.items():
            own = {name: getattr(module, name) // self.link.world for name in layers.divided}
            if layers.shared:
                own["forward"] = self.entering(module)
            found[module] = own
            found |= {child(module, name): {"forward": forward} for name, forward in self.forwards(module, layers)}
        if self.sequence:
            for number, block in enumerate(blocks := list(self.run.blocks.values())):
                around = self.along_sequence(block, number == 0, number == len(blocks) - 1)
                found[block] = {**found.get(block, {}), "forward": around}
        return found

    def forwards(self, module: nn.Module, layers: SplitLayers) -> Iterator[tuple[str, Forward]]:
        for name in layers.columns:
            yield name, self.column(module, name, layers.shared)
        for name in layers.rows:
            yield name, self.row(child(module, name))
        for name in layers.embeddings:
            yield name, self.embedding(child(module, name))
        for name in layers.heads:
            yield name, self.head(child(module, name))

    def entering(self, module: nn.Module) -> Forward:
        """The forward of a module whose columns all take the module's own input."""
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.sequence:
                self.draws.part(module)
            tokens = next(
                one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)
            )  # then masks and positions, which cover all tokens
            args, kwargs = tree_map(
                lambda one: (
                    self.entrance(one) if one is tokens else copy_in(one, self.link) if isinstance(one, Tensor) else one
                ),
                (args, kwargs),
            )
            return inner(*args, **kwargs)

        return forward

    def entrance(self, x: Tensor) -> Tensor:
        return gather_in(x, self.link, SEQUENCE) if self.sequence else copy_in(x, self.link)

    def column(self, module: nn.Module, name: str, shared: bool) -> Forward:
        layer = child(module, name)

        def forward(x: Tensor) -> Tensor:
            if not self.sequence and not shared:
                self.draws.part(module, name)
            if not shared:
                x = self.entrance(x)
            with self.using():
                return product(layer, x, layer.bias)

        return forward

    def row(self, layer: nn.Module) -> Forward:
        def forward(x: Tensor) -> Tensor:
            with self.using():
                flat = product(layer, x, None)
            found = reduce_scatter(flat, self.link, SEQUENCE) if self.sequence else all_reduce(flat, self.link)
            if not self.sequence:
                self.draws.rejoin()
            return found if layer.bias is None else found.add_(bias_of(layer))

        return forward

    def embedding(self, layer: nn.Module) -> Forward:
        assert isinstance(layer, nn.Embedding), "that was checked"
        words = self.shapes[weight_of(layer)][0]

        def forward(input: Tensor) -> Tensor:
            with self.using():
                return all_reduce(embed_split(layer, input, words, self.link), self.link)

        return forward

    def head(self, layer: nn.Module) -> Forward:
        words = self.shapes[weight_of(layer)][self.splits[weight_of(layer)].dim]

        def forward(x: Tensor) -> Tensor:
            with self.using():
                return SplitLogits.of(product(layer, copy_in(x, self.link), layer.bias), words, self.link)

        return forward

    def along_sequence(self, block: nn.Module, first: bool, last: bool) -> Forward:
        """The forward of a block in which every worker has its part of the tokens between split layers."""
        inner = block.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if first:
                if x.shape[SEQUENCE] % self.link.world:
                    raise Mistake(
                        f"TensorParallel(sequence=True): {x.shape[SEQUENCE]} tokens can't be divided by {self.link.world} "
                        f"workers: give sequences of a multiple of {self.link.world}, or sequence=False"
                    )
                x = keep_own_slice(x, self.link, SEQUENCE)
            self.draws.part(block)
            found = inner(x, *args, **kwargs)
            self.draws.rejoin()
            if not last:
                return found
            if isinstance(found, tuple):
                return (all_gather(found[0], self.link, SEQUENCE), *found[1:])
            return all_gather(found, self.link, SEQUENCE)

        return forward

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """While inside, gradients of weights that all hold whole, but use in part, are summed."""

        def total(gradient: Tensor) -> Tensor:
            whole = gradient.contiguous().clone()
            self.link.sum(whole.view(-1)).wait()
            return whole

        hooks = [weight.register_hook(total) for weight in self.partial if weight.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def using(self) -> Iterator[None]:
        self.in_layer = True
        try:
            yield
        finally:
            self.in_layer = False

    def guard(self) -> AbstractContextManager[object]:
        """In a rehearsal, detect a part of a weight that is used as if it were the whole."""
        if not self.link.imagined or self.link.world == 1:
            return nullcontext()
        places: dict[
            int, list[tuple[int, int, str]]
        ] = {}  # by storage, which may hold several weights: (begin, end, name)
        for weight in self.splits:
            begin = int(weight.storage_offset())
            places.setdefault(storage_id_of(weight), []).append((begin, begin + weight.numel(), self.names[weight]))

        def misuse(leaf: Tensor) -> str:
            near = [] if self.in_layer else places.get(storage_id_of(leaf), [])
            return next((name for begin, end, name in near if begin <= leaf.storage_offset() < end), "")

        return Guard(misuse, "with TensorParallel every worker has a part of it; leave TensorParallel out")

    # Outside of a step

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, all weights are whole."""
        parts = {weight: weight.data for weight in self.splits}
        with torch.no_grad():
            for weight, tensor in self.tensors().items():
                weight.data = torch.cat([piece.clone() for piece in tensor.pieces()]).view(tensor.shape)
        try:
            yield
        finally:
            for weight, part in parts.items():
                weight.data = part

    def share(self, weight: Tensor) -> float:
        """The fraction of a weight's gradient that this worker adds to a sum over all parts of all weights."""
        return 1.0 if weight in self.splits else 1.0 / self.link.world

    @property
    def remark(self) -> str:
        whole = sum(prod(shape) for shape in self.shapes.values())
        rest = sum(weight.numel() for weight in self.names if weight not in self.splits)
        if rest <= WORTH_TELLING * (whole + rest):
            return ""
        return f"TensorParallel splits {whole:,} numbers of the weights; the other {rest:,} are held and computed by every worker"

    # Checkpoint state: the same as for one process, so that any number of workers can resume from it

    def tensors(self) -> dict[nn.Parameter, SplitTensor]:
        return {
            weight: SplitTensor(weight, split, self.shapes[weight], self.link, weight)
            for weight, split in self.splits.items()
        }

    @property
    def weights_elsewhere(self) -> dict[str, SplitTensor]:
        tensors = self.tensors()
        return {
            name: tensors[weight]
            for name, weight in self.run.model.named_parameters(remove_duplicate=False)
            if weight in tensors
        }

    def whole_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state for whole weights, from that of their parts; each tensor is gathered when it is
        written."""
        return {
            **state,
            "state": {
                number: {key: self.widen(self.weights()[number], value) for key, value in found.items()}
                for number, found in state["state"].items()
            },
        }

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any] | None:
        return {
            **whole,
            "state": {
                number: {key: self.narrow(self.weights()[number], value) for key, value in found.items()}
                for number, found in whole["state"].items()
            },
        }

    def weights(self) -> list[nn.Parameter]:
        return [weight for members in self.groups for weight in members]

    def widen(self, weight: nn.Parameter, value: Any) -> Any:
        split = self.splits.get(weight)
        if split is None or getattr(value, "shape", None) != weight.shape:
            return value
        return SplitTensor(weight, split, self.shapes[weight], self.link, value)

    def narrow(self, weight: nn.Parameter, value: Any) -> Any:
        split: Split | None = self.splits.get(weight)
        return (
            value
            if split is None or getattr(value, "shape", None) != self.shapes[weight]
            else split.own(value, self.link)
        )


@calls_user("model")
def product(layer: nn.Module, x: Tensor, bias: Any) -> Tensor:
    """A linear layer's result with its present weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor), "a layer has a weight"
    if not is_transposed(layer):
        return functional.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class Draws:
    """Random numbers: outside of split layers the same on all workers of a line, inside them different ones on each.

    A number that all draw alike, combined with the worker's position, seeds the generator inside; so a recomputed
    block, which starts from the saved random state, draws the same again. A rehearsal has no values and skips this.

    Recomputation stops as soon as everything wanted is there, perhaps inside a layer, and restores the random state
    itself. So a column that is called a second time starts a new pass, and nothing is restored at the end of a pass.
    """

    def __init__(self, run: Run, link: Link) -> None:
        self.link, self.model = link, run.model
        self.before: list[Tensor] | None = None  # the random states outside, while inside
        self.module: nn.Module | None = None  # the module that is inside
        self.columns: set[str] = set()  # its columns called so far

    def part(self, module: nn.Module, column: str = "") -> None:
        """From here on every worker draws its own numbers."""
        if self.link.imagined or not self.model.training:
            return
        if self.before is not None and self.module is module and column not in self.columns:
            self.columns.add(column)
            return
        self.module, self.columns = module, {column}
        with without_modes(), unseen_functions():
            number = int(torch.empty((), dtype=torch.int64).random_())
            self.before = [
                torch.get_rng_state(),
                *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()),
            ]
            torch.manual_seed(hash((number, self.link.rank)) % 2**63)

    def rejoin(self) -> None:
        """From here on all workers draw the same numbers."""
        if self.before is None:
            return
        with without_modes():
            torch.set_rng_state(self.before[0])
            if self.before[1:]:
                torch.cuda.set_rng_state_all(self.before[1:])
        self.before = None
