"""Fake tensors: construct and run a model of any size without its memory.

Weights, and all tensors computed from them, are fake: they have shapes and no data. Tensors that depend on no weight
(the batch, masks, positions, a coin tossed for layer drop) stay real while they are small, so that code which reads
values still works. Where torch has no meta function for an operation, MISSING has one; where torch's does not know the
true size of a result (workspaces of a library, lengths taken from labels), PROBED operations run once on zeros.

A value that depends on weights is unknown here and never invented: code that reads one gets `LooksAtValues`. The same
holds for real tensors (a buffer) once something fake was written to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.model.missing import grouped_mm
from shoestring.core.optimization.stepping import parameter_like
from shoestring.core.private import (
    CTC_LOSSES,
    GROUPED_PRODUCT,
    READ_NUMBER,
    UNTRACEABLE,
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    Unlogged,
    arguments_of,
    own_parameters,
    results_of,
    storage_id,
    storage_id_of,
    tree_leaves,
    tree_map,
)
from shoestring.core.user_code.foreign import copy_module
from shoestring.measure.layouts import WRONG, correct_layout

REAL_LIMIT = 1 << 24  # bytes: a larger result is fake even if it depends on no weight

# Results of calls by signature: models repeat themselves, and so do the rehearsals of a planning
SEEN: dict[Any, tuple[type, list[Any]]] = {}  # calls that return new tensors
VIEWS: dict[Any, tuple[Any, ...]] = {}
SMALL: set[Any] = set()  # calls whose results stay real


@dataclass
class FakeWrite:
    """A storage to which something fake was written."""

    storage: Any  # a weak reference
    times: int = 0
    unknown: bool = True  # whether it has not been overwritten completely with known values since


WRITTEN: dict[int, FakeWrite] = {}  # by address of the storage

aten = torch.ops.aten


class LooksAtValues(RuntimeError):
    """The job reads the value of a tensor that depends on weights, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__("the job looks at a value that depends on weights (item, bool or a comparison in an if)")


def fake_write_of(tensor: Tensor) -> FakeWrite | None:
    return WRITTEN.get(storage_id_of(tensor)) if WRITTEN and tensor.layout is torch.strided else None


def unseen_writes(tensor: Tensor) -> int:
    """How often something fake was written to a tensor; its own version counter misses writes through .data."""
    found = fake_write_of(tensor)
    return 0 if found is None else found.times


def note_write(tensor: Any) -> None:
    if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in WRITTEN:
            WRITTEN[address] = FakeWrite(weakref.ref(storage, lambda _: WRITTEN.pop(address, None)))
        WRITTEN[address].times += 1
        WRITTEN[address].unknown = True


class Stage(DispatchMode):
    """While active, operations that touch a fake tensor are faked, and others run for real if their result is small."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.building = False
        self.tossed = False  # whether a real random number was read (layer drop): control flow depends on the generator
        self.faithful = (
            False  # whether to draw exactly as the real step does, so that later random decisions are the same
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.perform(func, args, kwargs or {})

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, fake or real."""
        if has_fake(args) or (kwargs and has_fake(tuple(kwargs.values()))):
            return self.run_fake(func, args, kwargs)
        if WRITTEN and not func.is_view and is_unknown((*args, *kwargs.values())):
            if func not in OVERWRITES or is_unknown(args[1:]) or args[0].nbytes < args[0].untyped_storage().nbytes():
                return self.run_fake(func, args, kwargs)
            WRITTEN[storage_id_of(args[0])].unknown = False
        if self.building and func in RESERVE:
            with self.fake:
                return func(*args, **kwargs)
        self.tossed |= torch.Tag.nondeterministic_seeded in func.tags
        if func in IN_PLACE or func is READ_NUMBER:  # no new tensor
            return func(*args, **kwargs)
        key = signature(func, args, kwargs, lone=True) if is_settled(func) else None
        if key is None or key not in SMALL:
            with suppress(*UNTRACEABLE):
                with self.fake, Unlogged():
                    sketch = func(*args, **kwargs)
                if storage_bytes(sketch) > REAL_LIMIT:
                    return sketch
                SMALL.add(key)
        return func(*args, **kwargs)

    def run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is READ_NUMBER:
            raise LooksAtValues
        if self.faithful and torch.Tag.nondeterministic_seeded in func.tags:
            real = tree_map(zeros_for_fake, (args, kwargs))
            func(*real[0], **real[1])
        if func in PROBED:
            return self.probe(func, args, kwargs)
        for position in written_arguments(func):
            note_write(args[position] if position < len(args) else None)
        if func in IN_PLACE:
            return args[0]
        key = signature(func, args, kwargs) if is_settled(func) else None
        if key is not None and key in SEEN:
            return self.again(SEEN[key])
        if key is not None and key in VIEWS:
            return self.view_again(VIEWS[key], args[0])
        with self.fake, Unlogged():
            out = MISSING[func](*args, **kwargs) if func in MISSING else func(*args, **kwargs)
            out = correct_layout(func, out, args) if func in WRONG else out
        if key is None:
            return out
        if is_view(out, args[0] if args else None):
            VIEWS[key] = (tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.fake_device)
        elif plain_results(out) and not share_storage(out, (args, kwargs)):
            SEEN[key] = (
                type(out),
                [
                    (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.fake_device) if leaf is not None else None
                    for leaf in results_in(out)
                ],
            )
        return out

    def view_again(self, known: tuple[Any, ...], base: Tensor) -> Tensor:
        """The view of a fake tensor, as the same call returned it before."""
        shape, stride, offset, dtype, device = known
        bare = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(self.fake, bare, device)

    def again(self, known: tuple[type, list[Any]]) -> Any:
        """New fake tensors with the shapes that the same call returned before; models repeat themselves."""
        kind, shapes = known
        made = [
            None
            if shape is None
            else FakeTensor(self.fake, torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta"), shape[3])
            for shape in shapes
        ]
        return made[0] if issubclass(kind, Tensor) else made if kind is list else tuple(made)

    def probe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result for zeros, as fake tensors: the true sizes where torch's meta function guesses
        wrong."""
        real = tree_map(zeros_for_fake, (args, kwargs))
        return tree_map(
            lambda leaf: self.fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, func(*real[0], **real[1])
        )

    def model(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """The factory's model with fake weights; its small buffers are real."""
        self.building = True
        with self, converting_in_place():
            model = factory()
        self.building = False
        swapped: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(own_parameters(module).items()):
                if parameter is not None:
                    own_parameters(module)[name] = swapped.setdefault(id(parameter), self.weight(parameter))
        return model

    def copy(self, model: nn.Module) -> nn.Module:
        """A copy of a real model with fake weights; the model itself is not changed."""
        return copy_module(model, {id(parameter): self.weight(parameter) for parameter in model.parameters()})

    def weight(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device.type == "meta":  # constructed there, to become real elsewhere
            with self.fake:
                value = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            return parameter_like(parameter, value)
        if isinstance(parameter.data, FakeTensor):
            return parameter
        return parameter_like(parameter, self.fake.from_tensor(parameter.data))


@contextmanager
def converting_in_place() -> Iterator[None]:
    """While inside, `module.to(dtype)` converts a fake parameter in place, as it does a real one.

    torch swaps the old and the new one, which fails where the fake mode refers to one of them, and leaves hooks behind.
    """
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def convert(old: Tensor, new: Tensor) -> None:
        if isinstance(old, FakeTensor) and isinstance(new, FakeTensor) and old.device == new.device:
            old.data = new.data
        else:
            swap(old, new)

    torch.utils.swap_tensors = convert
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def has_fake(args: Any) -> bool:
    return any(isinstance(arg, FakeTensor) or (isinstance(arg, (tuple, list)) and has_fake(arg)) for arg in args)


def is_unknown(args: Iterable[Any]) -> bool:
    """Whether an argument is a real tensor to which something fake was written."""
    for arg in args:
        if isinstance(arg, Tensor):
            found = fake_write_of(arg)
            if found is not None and found.unknown:
                return True
        elif isinstance(arg, (tuple, list)) and is_unknown(arg):
            return True
    return False


@cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operation changes. Batch norm changes its statistics without declaring it."""
    if func is aten.native_batch_norm.default:
        return 3, 4
    return tuple(
        position
        for position, part in enumerate(arguments_of(func))
        if part.alias_info is not None and part.alias_info.is_write
    )


@cache
def is_settled(func: Any) -> bool:
    """Whether an operation writes to no argument, and its output shapes depend on its input shapes alone."""
    return not any(
        part.alias_info is not None and part.alias_info.is_write for part in (*arguments_of(func), *results_of(func))
    ) and not set(func.tags) & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def signature(func: Any, args: Any, kwargs: Any, lone: bool = False) -> Any:
    """The key of everything that a result's shapes depend on; None if that can't be told.

    A 0-dimensional tensor affects the result's dtype in its own way: it is treated as a tensor only if `lone` says so.
    """
    key: list[Any] = [func]
    for arg in (*args, *kwargs.items()):
        if isinstance(arg, FakeTensor):
            key.append((arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device))
        elif isinstance(arg, (tuple, list)):
            inner = signature(len(arg), arg, {}, lone)
            if inner is None:
                return None
            key.append(inner)
        elif isinstance(arg, Tensor):
            if arg.dim() == 0 and not lone:
                return None
            key.append((arg.dtype, arg.shape, arg.stride(), arg.device))
        else:
            key.append((type(arg), arg))
    return tuple(key)


def is_view(out: Any, base: Any) -> bool:
    """Whether a result is a view of the first argument and of nothing else."""
    return (
        isinstance(out, FakeTensor)
        and isinstance(base, FakeTensor)
        and out is not base
        and out.layout is torch.strided
        and not out.is_conj()
        and not out.is_neg()
        and storage_id_of(out) == storage_id_of(base)
    )


def results_in(out: Any) -> Any:
    return [out] if isinstance(out, Tensor) else out


def plain_results(out: Any) -> bool:
    """Whether results are new tensors that each fill a storage of their own."""
    found = results_in(out)
    return (
        isinstance(found, (tuple, list))
        and all(
            leaf is None
            or (
                isinstance(leaf, FakeTensor)
                and leaf.layout is torch.strided
                and leaf.storage_offset() == 0
                and leaf.untyped_storage().nbytes() == span(leaf)
            )
            for leaf in found
        )
        and len({storage_id_of(leaf) for leaf in found if leaf is not None}) == sum(leaf is not None for leaf in found)
    )


def share_storage(out: Any, given: Any) -> bool:
    """Whether a result is a view of an argument, which not every schema declares."""
    held = {storage_id_of(leaf) for leaf in tree_leaves(given) if isinstance(leaf, FakeTensor)}
    return any(storage_id_of(leaf) in held for leaf in results_in(out) if leaf is not None)


def span(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def storage_bytes(results: Any) -> int:
    return sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(results) if isinstance(leaf, Tensor))


def zeros_for_fake(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()


IN_PLACE = {  # operations that return their first argument with new values
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.lerp_.Scalar,
    aten.addcmul_.default,
    aten.addcdiv_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.sqrt_.default,
    aten.copy_.default,
    aten.uniform_.default,
    aten.normal_.default,
}
OVERWRITES = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar}  # replace all of the first argument
RESERVE = {aten.empty.memory_format, aten.empty_strided.default}


MISSING: dict[Any, Callable[..., Any]] = {GROUPED_PRODUCT: grouped_mm}


PROBED = CTC_LOSSES | {aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default}
WORKSPACES = {
    aten.mkldnn_rnn_layer.default: 3
}  # index of the result that is a library's workspace, which may not be filled completely
