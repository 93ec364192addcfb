"""The one file that touches private names of torch (and of NumPy and transformers), so that a new version has one place to break.

That it is the only one is checked by tests/core/test_private.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

from shoestring.core.imports import Uncollected

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# torch 2.13 renamed it
all_gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor

# Every kind of batch norm; every norm that keeps running statistics (batch and instance norm)
BATCH_NORMS = nn.modules.batchnorm._BatchNorm
RUNNING_NORMS = nn.modules.batchnorm._NormBase

# Operations whose names begin with an underscore. The first is what item(), bool() and float() of a tensor call.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
CTC_LOSSES = {torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor}
SOFTMAX_BACKWARDS = {torch.ops.aten._softmax_backward_data.default, torch.ops.aten._log_softmax_backward_data.default}
TRAINING_BATCH_NORMS = {
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
}

int8_product: Any = torch._int_mm  # of two matrices of bytes, in whole numbers of 32 bits

# Methods that give the dense tensors which a sparse tensor consists of (indices() refuses what is not coalesced, _indices() does not)
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

LOADER_ITERATORS = (_MultiProcessingDataLoaderIter,)  # of a DataLoader with processes of its own
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # which are no wrappers of others

WRITE_COUNT: Any = Tensor._version  # see write_count
FAKE_LOG = logging.getLogger(FakeTensorMode.__module__)
unseen_functions: Any = torch._C.DisableTorchFunction  # while inside, nobody who looks at functions sees them
NO_OVERRIDE: Any = torch._C._disabled_torch_function_impl  # of a subclass: functions are called as they are

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
    "convolved_by_onednn",
    "dense_parts",
    "has_backward_hooks",
    "has_forward_hooks",
    "has_gradient_hooks",
    "has_memory",
    "has_schedule",
    "made_at",
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
    """While inside, torch logs no traceback of an operation that fails on fake tensors: the error comes to whoever called, who tells of it
    in a sentence, or does without fake tensors."""

    def __enter__(self) -> None:
        self.before, FAKE_LOG.disabled = FAKE_LOG.disabled, True

    def __exit__(self, *raised: object) -> None:
        FAKE_LOG.disabled = self.before


@contextmanager
def unwatched_by(mode: TorchFunctionMode) -> Iterator[None]:
    """While inside, a mode does not see what is called, if it is the innermost."""
    if _get_current_function_mode() is not mode:
        yield
        return
    with _pop_mode_temporarily():
        yield


class DispatchMode(TorchDispatchMode):
    """Sees every operation. Nothing is compiled inside it, so torch need not guard it against the compiler at each call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


WATCHING: list[
    Callable[[torch.Tensor], object]
] = []  # who wants to know of storages that change their size: no mode sees that


def resize_storage(tensor: torch.Tensor, count: int) -> None:
    """Give the storage of a tensor room for so many of its numbers; what they are is left open."""
    tensor.untyped_storage().resize_(count * tensor.element_size())
    for see in WATCHING:
        see(tensor)


def number_of(value: torch.Tensor) -> float:
    """The number in a tensor; in a rehearsal, which has none and where it is only passed on, 0."""
    return 0.0 if isinstance(value, FakeTensor) else float(value)


def next_node_number() -> int:
    """The number that the next autograd node made in this thread will carry."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number() -> int | None:
    """The number of the autograd node that is running backward now; None outside backward and for leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = made_at(node)
    return None if number < 0 or number >= 2**62 else number


def made_at(node: Any) -> int:
    """The number of an autograd node: those of one thread count up as they are made. Nodes of leaves have a huge one, or -1."""
    return int(node._sequence_nr())


def convolved_by_onednn(*convolution: Any) -> bool:
    """Whether oneDNN computes a convolution: its input, weight, bias, stride, and so on, as torch.convolution takes them, and the bias's
    shape. Of torch's two names for it, the one of transposed convolutions is not known in Python; it follows the other."""
    torch_c: Any = torch._C
    by_onednn = int(torch_c._ConvBackend.Mkldnn)
    return int(torch_c._select_conv_backend(*convolution)) in (by_onednn, by_onednn + 1)


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells one storage from all others alive; a later one may get the same after this one is gone."""
    return int(storage._cdata)


def storage_id_of(tensor: Tensor) -> int:
    """The id of the storage that a tensor's numbers are in; equal for two tensors exactly if they share memory."""
    return storage_id(tensor.untyped_storage())


def write_count(tensor: Tensor) -> int:
    """How often a tensor, or a view of it, was written to in place; what goes through `.data` is not counted."""
    return tensor._version


def writes_unseen(tensors: tuple[Tensor, ...]) -> AbstractContextManager[object]:
    """While inside, writes to these tensors are not counted: whoever saved one for backward sees to it that it is as it was then."""
    found: AbstractContextManager[object] = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return found


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose storages hold a tensor's numbers: itself, or what a sparse, nested or other wrapping one is made of."""
    if type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
        return tuple(part for name in tensor.__tensor_flatten__()[0] for part in dense_parts(getattr(tensor, name)))
    if tensor.layout is torch.strided or tensor.layout not in SPARSE_PARTS:
        return (tensor,)
    return tuple(getattr(tensor, part)() for part in SPARSE_PARTS[tensor.layout])


def storage_address(tensor: Tensor) -> int:
    """Where in this process's memory the storage of a tensor begins; 0 where it has no memory, as a fake one."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of a subclass that wraps others, or only looks like a tensor
        return 0


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage of a tensor is as large as it says; that of a fake one stands for one that is."""
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
    """Whether something is called with its gradient, or once that is there."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module without those of its submodules, by name; what is put into this dict is the module's."""
    return module._parameters


def collect_recurrent(module: nn.RNNBase, keep: bool = True) -> None:
    """Let a recurrent layer, which keeps a list of its weights, look them up anew, or forget them."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names] if keep else []
    # A call compares these, where they are not None, with the weights that the layer has, and looks all up again if one differs
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
    """The buffers of a module without those of its submodules, by name; what is put into this dict is the module's."""
    return module._buffers


def operation_of(func: Any) -> Any:
    """The operation (aten.add) that an overload (aten.add.Tensor) belongs to."""
    return func._overloadpacket


def arguments_of(func: Any) -> Any:
    """What an operation's declaration says of its arguments: name, default_value, and alias_info (is it written to?)."""
    return func._schema.arguments


def results_of(func: Any) -> Any:
    """What an operation's declaration says of its results, as `arguments_of` does."""
    return func._schema.returns


def bit_generator(generator: np.random.Generator | np.random.RandomState) -> Any:
    """Where a generator of NumPy, old or new, keeps its state."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def transformers_initialiser(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """How a model of transformers gives values to one of its modules; None for other models."""
    found: Callable[[nn.Module], object] | None = getattr(model, "_init_weights", None)
    return found


def has_schedule(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made of an optimizer: it marks the optimizer's step."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def note_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer was stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """Hooks that are called before and after an optimizer's step."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def load_compiler() -> None:
    """Import what every optimizer of torch, and every fake tensor, imports when it is first used: sooner than they do, and quicker."""
    if "torch._dynamo" not in sys.modules:
        with Uncollected():
            import_module("torch._dynamo")


def operation_writes(target: object) -> bool | None:
    """Whether an operation of a recorded graph writes into what it is given; None: it is none of torch's operations."""
    return bool(target._schema.is_mutable) if isinstance(target, torch._ops.OpOverload) else None


@contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """While inside, torch.func.vmap does not warn that it takes an operation one after the other, for want of a rule. A filter of Python's
    would be slower, and make other warnings come again."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
