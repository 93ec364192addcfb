"""Record the operators that a model's forward pass calls, for axis tracing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoestring.core.private import DispatchMode, arguments_of, tree_leaves


@dataclass(frozen=True)
class RecordedCall:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The operator without its overload: aten.add for aten.add.Tensor."""
        return ".".join(str(self.func).split(".")[:2])

    @property
    def inputs(self) -> list[Tensor]:
        return [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Tensor)]

    @property
    def outputs(self) -> list[Tensor]:
        return [one for one in tree_leaves(self.result) if isinstance(one, Tensor)]

    @property
    def writes(self) -> bool:
        return any(one.alias_info is not None and one.alias_info.is_write for one in arguments_of(self.func))


class CallRecorder(DispatchMode):
    """Dispatch mode that records every call. It keeps tensors alive, so that their ids stay unique."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(RecordedCall(func, tuple(args), dict(kwargs or {}), result))
        return result


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute attention and recurrent layers from elementary operators inside the context, not by fused kernels that
    can't be traced."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the next line warns about a CUDA setting
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def record_forward(model: nn.Module, example: Callable[[nn.Module], Any]) -> tuple[list[RecordedCall], list[Tensor]]:
    """The calls that the outputs depend on, in order, and the outputs.

    Calls with unused results are left out (such as averaged attention weights that are discarded). Calls that write in
    place or return no tensor are always kept.
    """
    recorder = CallRecorder()
    with torch.no_grad(), plain_kernels(), recorder:
        outputs = tensors_in(example(model))
    used = {id(one) for one in outputs}
    live = []
    for call in reversed(recorder.calls):
        made = call.outputs
        if call.writes or not made or any(id(one) in used for one in made):
            used.update(id(one) for one in call.inputs)
            live.append(call)
    return live[::-1], outputs


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in lists, dicts and dataclasses; other objects (such as a key/value cache) are ignored.

    >>> [len(one) for one in tensors_in({"a": torch.zeros(2), "b": [torch.zeros(3), None]})]
    [2, 3]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [one for part in value.values() for one in tensors_in(part)]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in tensors_in(part)]
    if is_dataclass(value) and not isinstance(value, type):
        return [one for field in fields(value) for one in tensors_in(getattr(value, field.name))]
    return []
