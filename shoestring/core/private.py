"""The one file that uses private names of torch (and of NumPy and transformers), so that a new version has one place to
break.

tests/core/test_private.py checks that it is the only one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format as memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shoestring.core.imports import WithoutGarbageCollection

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# torch 2.13 renamed it
all_gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor

# Every kind of batch norm; and every norm with running statistics (batch and instance norm)
BATCH_NORMS = nn.modules.batchnorm._BatchNorm
RUNNING_NORMS = nn.modules.batchnorm._NormBase

# Operations whose names begin with an underscore. item(), bool() and float() of a tensor call the first.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
CTC_LOSSES = {torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor}
SOFTMAX_BACKWARDS = {torch.ops.aten._softmax_backward_data.default, torch.ops.aten._log_softmax_backward_data.default}
TRAINING_BATCH_NORMS = {
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
}

int8_product: Any = torch._int_mm  # int8 matrix product with an int32 result

# Methods that return the dense tensors which a sparse tensor consists of (indices() refuses uncoalesced tensors,
# _indices() does not)
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

LOADER_ITERATORS = (_MultiProcessingDataLoaderIter,)  # iterators of a DataLoader with worker processes
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # classes that wrap no other tensor

WRITE_COUNT: Any = Tensor._version  # see write_count
FAKE_LOG = logging.getLogger(FakeTensorMode.__module__)
unseen_functions: Any = torch._C.DisableTorchFunction  # while inside, torch function modes see no calls
NO_OVERRIDE: Any = torch._C._disabled_torch_function_impl  # as a subclass's __torch_function__: functions run unchanged

__all__ = [
    "BATCH_NORMS",
    "CTC_LOSSES",
    "GROUPED_PRODUCT",
    "LOADER_ITERATORS",
    "NO_OVERRIDE",
    "READ_NUMBER",
    "RUNNING_NORMS",
    "SOFTMAX_BACKWARDS",
    "TRAINING_BATCH_NORMS",
    "UNTRACEABLE",
    "WATCHING",
    "WRITE_COUNT",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "Unlogged",
    "all_gather",
    "arguments_of",
    "bit_generator",
    "dense_parts",
    "has_backward_hooks",
    "has_forward_hooks",
    "has_gradient_hooks",
    "has_memory",
    "has_schedule",
    "is_onednn_convolution",
    "memory_format",
    "next_node_number",
    "node_number",
    "note_step_called",
    "number_of",
    "operation_of",
    "own_buffers",
    "own_parameters",
    "resize_storage",
    "results_of",
    "sequence_number",
    "step_hooks",
    "storage_address",
    "storage_id",
    "storage_id_of",
    "transformers_initialiser",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unseen_functions",
    "unwatched_by",
    "without_modes",
    "without_numbers",
    "write_count",
    "writes_unseen",
]


class Unlogged:
    """While inside, torch logs no traceback for an operation that fails on fake tensors: the caller gets the exception
    and reports it in a sentence, or does without fake tensors."""

    def __enter__(self) -> None:
        self.before, FAKE_LOG.disabled = FAKE_LOG.disabled, True

    def __exit__(self, *raised: object) -> None:
        FAKE_LOG.disabled = self.before


@contextmanager
def unwatched_by(mode: TorchFunctionMode) -> Iterator[None]:
    """While inside, a mode does not see calls, if it is the innermost."""
    if _get_current_function_mode() is not mode:
        yield
        return
    with _pop_mode_temporarily():
        yield


class DispatchMode(TorchDispatchMode):
    """Sees every operation. Nothing is compiled inside it, so torch need not guard it against the compiler at each
    call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


WATCHING: list[Callable[[torch.Tensor], object]] = []  # listeners for storages that are resized, which no mode sees


def resize_storage(tensor: torch.Tensor, count: int) -> None:
    """Give a tensor's storage room for so many of its numbers; their values are undefined."""
    tensor.untyped_storage().resize_(count * tensor.element_size())
    for see in WATCHING:
        see(tensor)


def number_of(value: torch.Tensor) -> float:
    """The number in a tensor; 0 in a rehearsal, which has no numbers and only passes it on."""
    return 0.0 if isinstance(value, FakeTensor) else float(value)


def next_node_number() -> int:
    """The number that the next autograd node made in this thread will carry."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number() -> int | None:
    """The number of the autograd node that is running backward now; None outside backward and for leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = sequence_number(node)
    return None if number < 0 or number >= 2**62 else number


def sequence_number(node: Any) -> int:
    """The sequence number of an autograd node: rises within a thread as nodes are made. Leaves' nodes have a huge one,
    or -1."""
    return int(node._sequence_nr())


def is_onednn_convolution(*convolution: Any) -> bool:
    """Whether oneDNN computes a convolution, given torch.convolution's arguments and the bias's shape. Of torch's two
    names for it, Python does not know the one for transposed convolutions; it follows the other."""
    torch_c: Any = torch._C
    by_onednn = int(torch_c._ConvBackend.Mkldnn)
    return int(torch_c._select_conv_backend(*convolution)) in (by_onednn, by_onednn + 1)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identifies a storage among all that are alive; a later one may get the same id after this one is freed."""
    return int(storage._cdata)


def marks_of(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes that somebody has set on a parameter."""
    own = fake_attributes() if isinstance(parameter, FakeTensor) else frozenset()
    return {name: value for name, value in vars(parameter).items() if name not in own}


@cache
def fake_attributes() -> frozenset[str]:
    """The attributes of every fake parameter."""
    with without_modes():
        return frozenset(vars(nn.Parameter(FakeTensorMode().from_tensor(torch.empty(0)))))


def storage_id_of(tensor: Tensor) -> int:
    """The id of a tensor's storage; equal for two tensors exactly if they share memory."""
    return storage_id(tensor.untyped_storage())


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in this process, and the end. Two storages may be the same memory (NumPy's arrays); a
    fake one has only its identity, which stands far above all addresses."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    base = storage_address(tensor) or storage_id_of(tensor) << 64
    width = tensor.element_size()
    first = base + int(tensor.storage_offset()) * width
    return first, first + int(reach + 1) * width * bool(tensor.numel())


def write_count(tensor: Tensor) -> int:
    """How often a tensor, or a view of it, was written to in place; writes through `.data` are not counted."""
    return tensor._version


def writes_unseen(tensors: tuple[Tensor, ...]) -> AbstractContextManager[object]:
    """While inside, writes to these tensors are not counted; the caller guarantees that tensors saved for backward are
    restored."""
    found: AbstractContextManager[object] = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return found


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose storages hold a tensor's numbers: itself, or the components of a sparse, nested or wrapping
    one."""
    if type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
        return tuple(part for name in tensor.__tensor_flatten__()[0] for part in dense_parts(getattr(tensor, name)))
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.func.vmap and the like
        return dense_parts(torch._C._functorch.get_unwrapped(tensor))
    if tensor.layout is torch.strided or tensor.layout not in SPARSE_PARTS:
        return (tensor,)
    return tuple(getattr(tensor, part)() for part in SPARSE_PARTS[tensor.layout])


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage in this process; 0 if it has no memory, as a fake tensor."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors, or only looks like a tensor
        return 0


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage really has the size that it reports; a fake tensor counts as the real one it stands
    for."""
    if isinstance(tensor, FakeTensor):
        return True
    return not tensor.is_meta and (type(tensor) in PLAIN_TENSORS or storage_address(tensor) != 0)


def without_numbers(kind: type[Tensor], like: Tensor, device: torch.device, gradient: bool) -> Any:
    """A tensor of a subclass that looks like another and has no memory."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
        requires_grad=gradient,
    )


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook runs with its gradient, or after that was accumulated."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's parameters without those of its submodules, by name; writing to this dict changes the module."""
    return module._parameters


def collect_recurrent(module: nn.RNNBase, keep: bool = True) -> None:
    """Make a recurrent layer, which keeps a list of its weights, look them up anew, or drop them."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names] if keep else []
    # A call compares these (if not None) with the weights that the layer has, and looks all up again if one differs
    module._flat_weight_refs = [None] * len(module._flat_weights_names)


@contextmanager
def recurrent_weights(module: nn.RNNBase) -> Iterator[None]:
    """While inside, a recurrent layer has its weights."""
    collect_recurrent(module)
    try:
        yield
    finally:
        collect_recurrent(module, keep=False)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's buffers without those of its submodules, by name; writing to this dict changes the module."""
    return module._buffers


def operation_of(func: Any) -> Any:
    """The operation (aten.add) that an overload (aten.add.Tensor) belongs to."""
    return func._overloadpacket


def arguments_of(func: Any) -> Any:
    """The declared arguments of an operation: name, default_value, and alias_info (is it written to?)."""
    return func._schema.arguments


def results_of(func: Any) -> Any:
    """The declared results of an operation, in the same form."""
    return func._schema.returns


def bit_generator(generator: np.random.Generator | np.random.RandomState) -> Any:
    """The object in which a NumPy generator, old or new, keeps its state."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def transformers_initialiser(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """The function by which a model of transformers initialises one of its modules; None for other models."""
    found: Callable[[nn.Module], object] | None = getattr(model, "_init_weights", None)
    return found


def has_schedule(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made for an optimizer: it marks the optimizer's step."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer was stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """The number of hooks before and after an optimizer's step."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def load_compiler() -> None:
    """Import what every torch optimizer and fake tensor imports on first use: earlier, and faster."""
    if "torch._dynamo" not in sys.modules:
        with WithoutGarbageCollection():
            import_module("torch._dynamo")


def operation_writes(target: object) -> bool | None:
    """Whether an operation of a recorded graph writes into its inputs; None: it is not one of torch's operations."""
    return bool(target._schema.is_mutable) if isinstance(target, torch._ops.OpOverload) else None


@contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """While inside, torch.func.vmap does not warn about operations without a batching rule, which it runs one sample at
    a time. Python's warning filter would be slower, and would make suppressed warnings appear again."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
