"""Whether a model's sequences can be cut into slices: found by tracing it on a few tokens, before anything is computed.

The model's forward is traced twice on fake tensors, for two slices of different lengths at different positions. A
dimension whose size differs between the traces is the token dimension. Every operation must then keep tokens apart (a
product along another dimension, a norm over features, anything elementwise), and positions must begin where the slice
does. The exceptions are causal attention by `scaled_dot_product_attention`, which `sliced_attention.py` computes, and a
loss: one number, from which nothing flows back to tokens.
An operation that is not known to keep tokens apart is refused, with its name and module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, tensors
from shoestring.core.errors import Mistake
from shoestring.core.private import DispatchMode, FakeTensor, operation_of, tree_map, without_modes
from shoestring.core.user_code.foreign import copy_module
from shoestring.measure.fake import Stage
from shoestring.training.sequence.sliced_attention import SliceSpan, Slicing, not_causal, takes_positions

TRIED = (SliceSpan(3, 8), SliceSpan(4, 11))  # traced slices: of different lengths, at different positions
LEAST = max(span.stop for span in TRIED)

# Operations that keep positions of every dimension apart, except the dimensions in `mixed_dimensions`. Operations that
# torch tags as pointwise do so too.
APART = frozenset(
    {
        "clone",
        "_to_copy",
        "detach",
        "alias",
        "lift_fresh",
        "native_dropout",
        "bernoulli",
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "transpose",
        "t",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "embedding",
        "new_empty",
        "new_zeros",
        "new_full",
        "new_ones",
        "new_empty_strided",
        "empty",
        "zeros",
        "ones",
        "full",
        "empty_strided",
        "scalar_tensor",
        "_local_scalar_dense",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "slice",
        "select",
        "arange",
        "addmm",
        "mm",
        "bmm",
        "baddbmm",
        "native_layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "_softmax",
        "_log_softmax",
        "sum",
        "mean",
        "amax",
        "amin",
        "var",
        "std",
        "linalg_vector_norm",
        "logsumexp",
        "cat",
        "stack",
    }
)


class TensorUse(NamedTuple):
    """A tensor as the input or output of an operation."""

    number: int  # identifies the tensor wherever it is used
    shape: tuple[int, ...]
    value: float | None = None  # of a scalar that is known because it depends on no weight


class TensorOperation(NamedTuple):
    """One operation of a forward."""

    func: Any
    args: Any  # arguments, with tensors as TensorUse
    kwargs: Any
    out: Any
    where: str  # the module that runs it


@dataclass
class Trace:
    """The operations of a forward and its loss on one slice."""

    span: SliceSpan
    steps: list[TensorOperation] = field(default_factory=list)
    given: set[int] = field(default_factory=set)  # numbers of tensors that existed before: weights and the batch
    calls: list[str] = field(default_factory=list)  # the block of every call of attention,
    arguments: list[Any] = field(default_factory=list)  # and its arguments other than tensors
    brought: bool = False  # whether the loss is the model's own


class Tracing(DispatchMode):
    """Records a model's operations on a stage."""

    def __init__(self, stage: Stage, trace: Trace) -> None:
        super().__init__()
        self.stage, self.trace = stage, trace
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []  # keeps ids valid
        self.inside: list[str] = []  # names of the running modules, the outermost first

    def tensor_use(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.numbers:
            self.numbers[id(leaf)] = len(self.alive)
            self.alive.append(leaf)
        known = leaf.dim() == 0 and not leaf.is_complex() and not isinstance(leaf, FakeTensor)
        return TensorUse(self.numbers[id(leaf)], tuple(leaf.shape), float(leaf) if known else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        taken, named = tree_map(self.tensor_use, (args, kwargs))
        out = self.stage.perform(func, args, kwargs)
        self.trace.steps.append(
            TensorOperation(func, taken, named, tree_map(self.tensor_use, out), self.inside[-1] if self.inside else "")
        )
        return out


class SliceProbe(Slicing):
    """Slicing whose attention is only recorded."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace, inside: list[str]) -> None:
        super().__init__(model, blocks, (trace.span.stop,))
        self.now, self.trace, self.inside = trace.span, trace, inside

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        why = not_causal(query, key, attn_mask, is_causal, self.now.length)
        if why:
            raise Mistake(f"attention in {self.inside[-1] if self.inside else 'the model'} {why}")
        self.trace.calls.append(self.place)
        self.trace.arguments.append((dropout_p, more))
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


def trace_slice(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    forward: Callable[[nn.Module, Batch], Any],
    loss: Callable[[Any, Batch], Tensor],
    piece: Batch,
    span: SliceSpan,
) -> Trace:
    """Trace one slice of a batch, at position `span`. The model is not changed."""
    stage, trace = Stage(), Trace(span)
    copy = fake_copy(model, stage)
    mode = Tracing(stage, trace)
    slicing = SliceProbe(copy, {name: copy.get_submodule(name) for name in blocks}, trace, mode.inside)

    with ExitStack() as stack:
        for name, part in copy.named_modules():
            part.register_forward_pre_hook(lambda module, args, name=name: mode.inside.append(name or "the model"))
            part.register_forward_hook(lambda module, args, output: mode.inside.pop() and None)
        for one in (slicing.watching_model(), torch.no_grad(), mode):
            stack.enter_context(one)
        trace.given = {
            mode.tensor_use(tensor).number for tensor in (*copy.parameters(), *copy.buffers(), *tensors(piece))
        }
        output = forward(copy, piece)
        value = loss(output, piece)
        trace.brought = value is (output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None))
    return trace


def fake_copy(model: nn.Module, stage: Stage) -> nn.Module:
    """A copy of a model (fake or real) with weights that take no memory."""

    def fake(tensor: Tensor) -> Tensor:
        with stage.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    memo: dict[int, Any] = {id(one): nn.Parameter(fake(one), one.requires_grad) for one in model.parameters()}
    return copy_module(model, memo | {id(one): fake(one) for one in model.buffers() if isinstance(one, FakeTensor)})


class MixesTokens(Exception):
    """An operation mixes tokens; the message says how."""


def refusal(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    forward: Callable[[nn.Module, Batch], Any],
    loss: Callable[[Any, Batch], Tensor],
    cut: Callable[[SliceSpan], Batch],
    length: int,
) -> tuple[str, bool]:
    """Why a model can't run in slices (empty if it can), and whether the loss is the model's own. `cut` returns a slice
    of a batch with sequences of `length` tokens. Whole sequences are traced too, because attention with a limited
    window has a mask only there."""
    if not takes_positions(model):
        return (
            "no forward of the model can be told where a slice begins: give it an argument `start`, the place of its first token, "
            "with start=0 as default (models of transformers take position_ids)"
        ), False
    try:
        with without_modes():
            one, two, whole = (
                trace_slice(model, blocks, forward, loss, cut(span), span) for span in (*TRIED, SliceSpan(0, length))
            )
    except Mistake as mistake:
        return str(mistake), False
    except Exception as error:
        return f"a slice of it fails: {type(error).__name__}: {error}".splitlines()[0], False
    repeated = next((name for name in dict.fromkeys(one.calls) if name and twice(one.calls, name)), "")
    if repeated:
        return (
            f"block {repeated} runs attention more than once in a forward, with others in between: it is used at several places",
            False,
        )
    if one.calls != whole.calls:
        return f"a whole sequence calls attention {len(whole.calls)} times, and a slice {len(one.calls)} times", False
    if not one.arguments == two.arguments == whole.arguments:
        return "attention is given other arguments (a scale?) for other numbers of tokens", False
    if not one.calls:
        return (
            'no attention by scaled_dot_product_attention is in its forward (attn_implementation="sdpa" in transformers)',
            False,
        )
    return mixing_reason(one, two), one.brought


def twice(calls: list[str], name: str) -> bool:
    """Whether a block was left and entered again."""
    first = calls.index(name)
    return name in calls[first + calls[first:].count(name) :]


def mixing_reason(one: Trace, two: Trace) -> str:
    """What mixes tokens, judged from two traces; empty if nothing does."""
    if [step.func for step in one.steps] != [step.func for step in two.steps]:
        at = next((a.where for a, b in zip(one.steps, two.steps, strict=False) if a.func is not b.func), "the end")
        return f"the model does something else with {two.span.length} tokens than with {one.span.length}, in {at}"
    check = TokenCheck((one, two))
    for first, second in zip(one.steps, two.steps, strict=True):
        try:
            check.step(first, second)
        except MixesTokens as how:
            return f"{operation_of(first.func).__name__} in {first.where or 'the loss'} {how}"
    return ""


@dataclass
class TokenCheck:
    """What is known about the tensors of two traces, step by step."""

    traces: tuple[Trace, Trace]
    data: set[int] = field(default_factory=set)  # tensors that depend on weights or tokens, not on positions alone
    odd: dict[int, str] = field(default_factory=dict)  # tensors that must not be combined with those -> the reason
    summed: set[int] = field(default_factory=set)  # tensors computed from all tokens, such as a loss
    inside: dict[int, int] = field(
        default_factory=dict
    )  # for dimensions that merge tokens with others: how many entries a token has

    def __post_init__(self) -> None:
        self.data = set(self.traces[0].given)

    def step(self, first: TensorOperation, second: TensorOperation) -> None:
        given, made = list(tensor_uses((first.args, first.kwargs))), list(tensor_uses(first.out))
        is_data = any(leaf.number in self.data for leaf in given)
        try:
            met = next((self.odd[leaf.number] for leaf in given if leaf.number in self.odd), "")
            if met and made:
                raise MixesTokens(met)
            if len(made) != len(list(tensor_uses(second.out))):
                raise MixesTokens("takes tokens one by one")
            self.apart(first, second)
        except MixesTokens as how:
            if is_data:
                raise
            self.odd |= {leaf.number: str(how) for leaf in made}
        else:
            self.data |= {leaf.number for leaf in made} if is_data else set()

    def apart(self, first: TensorOperation, second: TensorOperation) -> None:
        """Refuse an operation that mixes tokens; record its outputs."""
        name = operation_of(first.func).__name__
        name = name.rstrip("_") if name.endswith("_") else name
        takes = {a: self.tokens(a, b) for a, b in zip(tensor_uses(first[1:3]), tensor_uses(second[1:3]), strict=True)}
        makes = {a: self.tokens(a, b) for a, b in zip(tensor_uses(first.out), tensor_uses(second.out), strict=True)}
        here = any(dim is not None for dim in takes.values())
        if here and name not in APART and torch.Tag.pointwise not in first.func.tags:
            raise MixesTokens("is not known to keep tokens apart")
        if here and torch.Tag.pointwise in first.func.tags and plain_in(first[1:3]) != plain_in(second[1:3]):
            raise MixesTokens("depends on how many tokens there are, which are fewer in a slice")
        for leaf, dims in mixed_dimensions(name, first.args):
            if takes.get(leaf) in [dim % len(leaf.shape) for dim in dims]:
                raise MixesTokens(f"goes along the tokens of a tensor of the shape {leaf.shape}")
        if not here and any(dim is not None for dim in makes.values()) and name in ("arange", "slice"):
            for step, trace in zip((first, second), self.traces, strict=True):
                check_begin(name, step.args, trace.span)
        whole = any(leaf.number in self.summed for leaf in takes)
        for leaf, dim in makes.items():
            if dim is not None and whole:
                raise MixesTokens("gives tokens something that was computed from all of them")
            if dim is None and here and prod(leaf.shape) > 1:
                raise MixesTokens(f"makes one of all tokens, of the shape {leaf.shape}")
            if dim is None and (here or whole):
                self.summed.add(leaf.number)
            if dim is not None and here:
                self.note_inside(name, takes, leaf, dim)

    def tokens(self, one: TensorUse, two: TensorUse) -> int | None:
        """A tensor's token dimension; refused if there are two, or one of a size that no slice has."""
        lengths = self.lengths
        found = [dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        for dim in found:
            if one.shape[dim] * lengths[1] != two.shape[dim] * lengths[0]:
                raise MixesTokens(
                    f"has {one.shape[dim]} places for a slice of {lengths[0]} tokens: it shifts or pads tokens, and a slice does "
                    "not know the next one (shift labels in the data, not in the loss)"
                )
        if len(found) > 1:
            raise MixesTokens(
                f"is of every pair of tokens, with the shape {one.shape}: attention that is not scaled_dot_product_attention"
            )
        return found[0] if found else None

    @property
    def lengths(self) -> list[int]:
        return [trace.span.length for trace in self.traces]

    def note_inside(self, name: str, takes: Mapping[TensorUse, int | None], made: TensorUse, dim: int) -> None:
        """Follow a dimension that merges tokens with others, such as all rows of a batch: a view must not reorder
        tokens."""
        shared = made.shape[dim] // self.lengths[0]
        before = [(leaf, at) for leaf, at in takes.items() if at is not None]
        if name in VIEWS:
            ((leaf, at),) = before
            unit = self.inside.get(leaf.number, 1) * prod(leaf.shape[at + 1 :])  # entries from one token to the next
            found = {unit // prod(made.shape[dim + 1 :])} if unit % max(prod(made.shape[dim + 1 :]), 1) == 0 else set()
        else:
            found = {self.inside.get(leaf.number, 1) for leaf, at in before if leaf.shape[at] == made.shape[dim]}
        if len(found) != 1 or (shared == 1 and found != {1}):
            raise MixesTokens(
                f"takes a tensor of the shape {before[0][0].shape} apart and puts it together as {made.shape}, with tokens in "
                "another order (a transpose is missing?)"
            )
        if shared > 1:
            self.inside[made.number] = found.pop()


VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")


def mixed_dimensions(name: str, args: Any) -> Iterator[tuple[TensorUse, tuple[int, ...]]]:
    """The dimensions of its arguments along which an operation mixes positions."""
    if name in ("mm", "bmm"):
        yield from ((args[0], (-1,)), (args[1], (-2,)))
    elif name in ("addmm", "baddbmm"):
        yield from ((args[1], (-1,)), (args[2], (-2,)))
    elif name in ("native_layer_norm", "_fused_rms_norm", "rms_norm"):
        yield args[0], tuple(range(-len(args[1]), 0))
    elif name in ("_softmax", "_log_softmax"):
        yield args[0], (args[1],)
    elif name == "cat":
        yield from ((leaf, (args[1] if len(args) > 1 else 0,)) for leaf in args[0])


def check_begin(name: str, args: Any, span: SliceSpan) -> None:
    """Refuse positions, counted by the forward or taken from a table, that do not begin where the slice does."""
    numbers = args if name == "arange" else args[2:]
    start = (numbers[0] if len(numbers) > 1 else 0) if name == "arange" else (numbers[0] if numbers else 0)
    if start != span.start:
        raise MixesTokens(
            f"counts tokens from {start or 0} in a slice that begins at {span.start}: begin where `start` or position_ids say"
        )


def plain_in(value: Any) -> Any:
    """An operation's arguments other than tensors, with the scalars among the tensors."""
    if isinstance(value, TensorUse):
        return value.value
    if isinstance(value, (Mapping, tuple, list)):
        return [plain_in(inner) for inner in (value.values() if isinstance(value, Mapping) else value)]
    return value


def tensor_uses(value: Any) -> Iterator[TensorUse]:
    """The tensors among an operation's inputs or outputs, in order."""
    if isinstance(value, TensorUse):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensor_uses(inner)
