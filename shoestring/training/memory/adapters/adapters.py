"""Low-rank updates of a model's weights: which modules get one, how a forward adds it, and how it is merged into the
weights.

While updates are added, a module's forward returns its own result plus x A' B' times the scale. A weight that the model
uses without calling its module would miss its update; this is detected and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoestring.core.errors import Mistake
from shoestring.core.private import own_parameters, tree_leaves
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState, TrainsBeside
from shoestring.measure.interception import OnTop, patch_forwards
from shoestring.runs.weights.low_rank import merge_updates, with_update

HALVES = (torch.bfloat16, torch.float16)  # updates of weights in these dtypes are kept in float32


class AdapterUpdate(NamedTuple):
    """The update of one module's weight."""

    module: nn.Module
    a: nn.Parameter  # rank x in
    b: nn.Parameter  # out x rank
    transposed: bool  # the weight is stored in x out, as in transformers' Conv1D

    def of(self, x: Tensor, scale: float) -> Tensor:
        found = functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b)
        return found if scale == 1 else found * scale


class Adapters(RunState, TrainsBeside):
    """All updates of a run, and the weights that are trained in full beside them."""

    def __init__(self, run: Run, rank: int, where: str, also: str, alpha: float) -> None:
        self.model, self.rank, self.scale, self.alpha = run.model, rank, alpha / rank, alpha
        self.whole = also_trained(run.model, also)
        modules, self.left = choose_modules(run.model, where, set(self.whole))
        self.updates = {name: new_update(name, module, rank, run.settings.seed) for name, module in modules.items()}
        self.needed = {parameter: parameter.requires_grad for parameter in run.model.parameters()}  # before freezing
        whole = dict.fromkeys(self.whole.values())
        for parameter in run.model.parameters():
            parameter.requires_grad_(parameter in whole)
        replace_in(
            run.optimizer, {own_weight(one.module): (one.a, one.b) for one in self.updates.values()}, list(whole)
        )
        self.active, self.inside, self.watched = False, set[nn.Module](), set[str]()

    @property
    def trainable(self) -> list[nn.Parameter]:
        """All parameters that are trained."""
        model = dict(
            self.model.named_parameters(remove_duplicate=False)
        )  # another technique may have replaced some of them
        updates = [one for update in self.updates.values() for one in (update.a, update.b)]
        return list(dict.fromkeys((*updates, *(model[name] for name in self.whole))))

    # Adding the updates in a forward

    @contextmanager
    def adding_updates(self) -> Iterator[None]:
        """While inside, the model computes with the updates."""
        if self.active:
            yield
            return
        self.active = True
        try:
            with patch_forwards(
                {one.module: OnTop(one.module.forward, self.adding(one)) for one in self.updates.values()}
            ):
                yield
        finally:
            self.active = False

    def adding(self, update: AdapterUpdate) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that wraps a module's forward so that it adds the update."""

        def on_top(forward: Callable[..., Any]) -> Callable[..., Any]:
            def forward_with_update(*args: Any, **kwargs: Any) -> Tensor:
                self.inside.add(update.module)
                try:
                    plain: Tensor = forward(*args, **kwargs)
                finally:
                    self.inside.discard(update.module)
                x = args[0] if args else next(iter(kwargs.values()))
                return plain + update.of(x, self.scale).to(plain.dtype)

            return forward_with_update

        return on_top

    def usable(
        self, before: Callable[[], AbstractContextManager[object]]
    ) -> Callable[[], AbstractContextManager[object]]:
        @contextmanager
        def usable() -> Iterator[None]:
            fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(
                False
            )  # torch's encoder layers would use weights without calling their modules
            try:
                with before(), self.adding_updates(), self.watching("evaluation"):
                    yield
            finally:
                torch.backends.mha.set_fastpath_enabled(fast)

        return usable

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """In the first pass of each kind, detect weights that are used without calling their module."""
        if kind in self.watched:
            yield
            return
        with BypassGuard(self):
            yield
        self.watched.add(kind)

    # Checkpoint state and export

    def state_dict(self) -> dict[str, Any]:
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = {
            name: value
            for name, value in self.model.state_dict().items()
            if name not in weights and isinstance(value, Tensor)
        }
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "transposed": {name: one.transposed for name, one in self.updates.items()},
            "also": list(self.whole),
            "buffers": list(buffers),
            "tied": [name for name in self.whole if sum(one is weights[name] for one in weights.values()) > 1],
            "statistics": [name for name, value in buffers.items() if value.is_floating_point()],
            "A": {name: one.a.detach() for name, one in self.updates.items()},
            "B": {name: one.b.detach() for name, one in self.updates.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["A"].keys() != self.updates.keys() or state["rank"] != self.rank or state["alpha"] != self.alpha:
            raise Mistake(
                f"the checkpoint has updates of rank {state['rank']} and alpha {state['alpha']:g} for {len(state['A'])} weights, "
                f"and LowRank has {self.rank}, {self.alpha:g} and {len(self.updates)}: go on with the plan it was begun with, or "
                f"give --fresh"
            )
        with torch.no_grad():
            for name, one in self.updates.items():
                one.a.copy_(state["A"][name])
                one.b.copy_(state["B"][name])

    def merge(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return merge_updates(weights, self.state_dict())

    def digest_state(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return trained_state(weights, self.state_dict())

    def finish(self) -> None:
        with torch.no_grad():
            for one in self.updates.values():
                weight = own_weight(one.module)
                weight.copy_(with_update(weight, one.a, one.b, self.scale, one.transposed))
                one.b.zero_()
        for parameter, needed in self.needed.items():
            parameter.requires_grad_(needed)

    @property
    def remark(self) -> str:
        count = sum(parameter.numel() for parameter in self.trainable)
        whole = sum(parameter.numel() for parameter in self.needed)
        also = f" and {len(self.whole)} weights as they are" * bool(self.whole)
        left = "; ".join(f"{name} {why}" for name, why in list(self.left.items())[:3])
        left += f" and {len(self.left) - 3} more" * (len(self.left) > 3)
        return (
            f"LowRank trains updates of rank {self.rank} of {len(self.updates)} weights{also}: {count:,} numbers beside {whole:,} of "
            f"the model. {f'It leaves out: {left}. ' if left else ''}The SHA-256 of the weights is of what is trained, not of what is "
            f"frozen; shoestring export gives the weights with their updates, export --to peft the updates"
        )


class BypassGuard(TorchFunctionMode):
    """Refuses uses of an updated weight outside of its module's own forward."""

    def __init__(self, adapters: Adapters) -> None:
        super().__init__()
        self.adapters = adapters
        self.weights = {id(own_weight(one.module)): (name, one.module) for name, one in adapters.updates.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs or {})):
            found = self.weights.get(id(leaf))
            if (
                found is not None
                and found[1] not in self.adapters.inside
                and any(isinstance(one, Tensor) for one in tree_leaves(result))
            ):
                raise Mistake(
                    f"the model uses the weight of {found[0]} without calling that module, so its update would be left out: "
                    f"leave the module out of LowRank's where, or let the model call it"
                )
        return result


# Choosing the modules


def choose_modules(model: nn.Module, where: str, whole: set[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules that get an update, by name; and for other modules that match `where`, why they get none."""
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                owners[parameter] = owners.get(parameter, 0) + 1
    parts = {
        part for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.children()
    }
    found, left, there = dict[str, nn.Module](), dict[str, str](), []
    for name, module in model.named_modules():
        if not can_be_updated(module):
            continue
        there.append(name)
        if not matches(name, where):
            continue
        why = (
            "shares its weight with another module"
            if owners[own_weight(module)] > 1
            else "is used by torch's attention without being called"
            if module in parts
            else "is trained as it is"
            if f"{name}.weight".lstrip(".") in whole
            else ""
        )
        if why:
            left[name] = why
        else:
            found[name] = module
    if not found:
        names = f"{', '.join(there[:6])}{' and others' * (len(there) > 6)}"
        reason = (
            "; ".join(f"{name} {why}" for name, why in left.items())
            or f"linear layers are {names or 'not there at all'}"
        )
        raise Mistake(
            f'LowRank(where={where!r}) finds no weight to update: {reason}. A pattern is of the whole name, such as "*.q_proj"'
        )
    return found, left


def can_be_updated(module: nn.Module) -> bool:
    linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return (linear or is_conv1d(module)) and own_weight(module).is_floating_point()


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D: a linear layer whose weight is stored in x out."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def own_weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter), "linear layers have one"
    return weight


def matches(name: str, written: str) -> bool:
    return any(fnmatchcase(name, pattern.strip()) for pattern in written.split("|"))


def also_trained(model: nn.Module, also: str) -> dict[str, nn.Parameter]:
    """The weights that are trained in full: `also` names them or their module."""
    found: dict[str, nn.Parameter] = {}
    for pattern in filter(None, (one.strip() for one in also.split("|"))):
        mine = {
            name: one
            for name, one in model.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        }
        if not mine:
            names = ", ".join(list(dict(model.named_parameters()))[-4:])
            raise Mistake(
                f"LowRank(also={pattern!r}) is the name of no weight of the model, which has {names} and others"
            )
        found |= mine
    return found


def new_update(name: str, module: nn.Module, rank: int, seed: int) -> AdapterUpdate:
    """A new update, which adds zero. A depends only on the seed and the name, so every worker makes the same."""
    weight, transposed = own_weight(module), is_conv1d(module)
    width, height = weight.shape if transposed else reversed(weight.shape)
    dtype = torch.float32 if weight.dtype in HALVES else weight.dtype
    generator = torch.Generator(weight.device).manual_seed(crc32(f"{seed} {name}".encode()))
    with torch.no_grad():
        a = weight.new_empty((rank, width), dtype=dtype).uniform_(
            -1 / sqrt(width), 1 / sqrt(width), generator=generator
        )
        b = weight.new_zeros((height, rank), dtype=dtype)
    return AdapterUpdate(module, nn.Parameter(a), nn.Parameter(b), transposed)


def replace_in(
    optimizer: torch.optim.Optimizer,
    updates: Mapping[nn.Parameter, Sequence[nn.Parameter]],
    whole: Sequence[nn.Parameter],
) -> None:
    """Replace updated weights in the optimizer by their updates, and drop all other weights except `whole`."""
    kept = set(whole)
    here = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for number, group in enumerate(optimizer.param_groups):
        names = dict(zip(group["params"], group["param_names"], strict=True)) if "param_names" in group else {}
        found: list[tuple[nn.Parameter, str]] = []
        for parameter in group["params"]:
            if parameter in kept:
                found.append((parameter, names.get(parameter, "")))
            found += zip(
                updates.get(parameter, ()), (f"{names.get(parameter, '')}.lora_{one}" for one in "AB"), strict=False
            )
        if not number:  # updates of weights that were in no parameter group of the job
            found += [(one, "lora") for weight, pair in updates.items() if weight not in here for one in pair]
            found += [(one, "") for one in whole if one not in here]
        group["params"] = [one for one, _ in found]
        if names:
            group["param_names"] = [name for _, name in found]
    if optimizer.state:  # some optimizers (Adagrad) create state when they are constructed
        optimizer.state.clear()
        fresh: Any = type(optimizer)(
            [dict(group) for group in optimizer.param_groups if group["params"]], **optimizer.defaults
        )
        optimizer.state.update(fresh.state)


def trained_state(weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's weights that training changes: the updates, weights trained in full, and buffers."""
    found = {name: weights[name] for name in (*state["also"], *state["buffers"]) if name in weights}
    for kind in "AB":
        found |= {f"{name}.lora_{kind}".lstrip("."): one for name, one in state[kind].items()}
    return found
