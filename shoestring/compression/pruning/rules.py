"""Axis-tracing rules: what each operator does to the axes of its inputs, and the table of rules by operator name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoestring.compression.pruning.axes import Dim, freeze, new_dim, regroup_axes, unify
from shoestring.compression.pruning.record import RecordedCall
from shoestring.compression.pruning.traced_forward import (
    Rule,
    TracedForward,
    freeze_unknown,
    index_of,
    keep_equal_sizes,
    slice_dim,
    view_rule,
)

Dims = list[list[Dim]]


def argument(call: RecordedCall, place: int, name: str, default: Any = None) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def elementwise_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Elementwise with broadcasting: dimensions at the same position from the right are unified, unless expanded."""
    shape = call.outputs[0].shape if call.outputs else ()
    result: list[Dim] = []
    for place in range(1, len(shape) + 1):
        meeting = [
            found.dims(tensor)[-place]
            for tensor in call.inputs
            if tensor.dim() >= place and tensor.shape[-place] == shape[-place]
        ]
        for other in meeting[1:]:
            unify(meeting[0], other)
        result.insert(0, meeting[0] if meeting else new_dim(shape[-place], "it is repeated"))
    return [list(result) for _ in call.outputs]


def same_shape_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """A copy of the input, or a new tensor like it."""
    return [
        list(found.dims(call.inputs[0])) if one.shape == call.inputs[0].shape else [new_dim(size) for size in one.shape]
        for one in call.outputs
    ]


def constant_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """A constant created in the forward pass. If its values vary along a dimension, that dimension can't be pruned."""
    plain = call.name.removeprefix("aten.").removeprefix("new_") in (
        "zeros",
        "ones",
        "full",
        "empty",
        "scalar_tensor",
        "empty_strided",
    )
    return [
        [new_dim(size, "" if plain else f"{call.name} makes numbers along it") for size in one.shape]
        for one in call.outputs
    ]


def permute_rule(found: TracedForward, call: RecordedCall) -> Dims:
    tensor = call.inputs[0]
    dims = list(found.dims(tensor))
    if call.name == "aten.permute":
        return [[dims[index_of(place, tensor)] for place in call.args[1]]]
    if call.name in ("aten.t", "aten.numpy_T"):
        return [dims[::-1]]
    one, other = index_of(call.args[1], tensor), index_of(call.args[2], tensor)
    dims[one], dims[other] = dims[other], dims[one]
    return [dims]


def expand_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """expand, repeat: a repeated dimension of size 1 gets a new axis, which may be pruned together with others."""
    tensor, shape = call.inputs[0], call.outputs[0].shape
    if call.name == "aten.repeat" and any(
        size != 1 and times != 1 for size, times in zip(tensor.shape[::-1], list(call.args[1])[::-1], strict=False)
    ):
        return freeze_unknown(found, call)
    dims: list[Dim] = []
    for place, size in zip(range(-len(shape), 0), shape, strict=True):
        known = tensor.dim() >= -place and tensor.shape[place] == size
        dims.append(found.dims(tensor)[place] if known else new_dim(size))
    return [dims]


def concatenate_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """cat, stack: the other dimensions are unified; the concatenated one is frozen."""
    tensors = [one for one in call.inputs if one.numel() or one.dim() > 1]
    why = "tensors are put side by side along it"
    dim, stacked = argument(call, 1, "dim", 0), call.name == "aten.stack"
    place = dim % (tensors[0].dim() + stacked)
    result = list(found.dims(tensors[0]))
    for other in tensors[1:]:
        for at, (one, two) in enumerate(zip(result, found.dims(other), strict=True)):
            if stacked or at != place:
                unify(one, two)
    if not stacked:
        for tensor in tensors:
            freeze(found.dims(tensor)[place], why)
        del result[place]
    result.insert(place, new_dim(call.outputs[0].shape[place], why))
    return [result]


def split_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """split, chunk: equal parts of one dimension."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 2, "dim", 0), tensor)
    dims, start, parts = found.dims(tensor), 0, []
    for one in call.outputs:
        piece = slice_dim(dims[place], tensor.shape[place], one.shape[place], start)
        parts.append([*dims[:place], piece, *dims[place + 1 :]])
        start += one.shape[place]
    return parts


def take_slice_rule(found: TracedForward, call: RecordedCall) -> Dims:
    tensor = call.inputs[0]
    place, start, step = (
        index_of(argument(call, 1, "dim", 0), tensor),
        argument(call, 2, "start") or 0,
        argument(call, 4, "step", 1),
    )
    total, length = tensor.shape[place], call.outputs[0].shape[place]
    start = max(0, start + total if start < 0 else start)
    dims = list(found.dims(tensor))
    if step != 1:
        freeze(dims[place], "every so many of it are taken")
        dims[place] = new_dim(length, "every so many of it are taken")
    else:
        dims[place] = slice_dim(dims[place], total, length, start)
    return [dims]


def select_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """select, unbind: the dimension is removed."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 1, "dim", 0), tensor)
    freeze(found.dims(tensor)[place], "one of it is taken")
    rest = [dim for at, dim in enumerate(found.dims(tensor)) if at != place]
    return [list(rest) for _ in call.outputs]


def reduce_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """A sum, mean or norm over dimensions, which are frozen."""
    tensor, why = call.inputs[0], f"{call.name} is taken over it"
    places = argument(call, 2 if call.name == "aten.linalg_vector_norm" else 1, "dim")
    if places is None or places == [] or isinstance(places, (bool, float)):
        places = range(tensor.dim())
    gone = {index_of(place, tensor) for place in ([places] if isinstance(places, int) else places)}
    for place in gone:
        freeze(found.dims(tensor)[place], why)
    keeps = bool(call.outputs) and call.outputs[0].dim() == tensor.dim()
    dims: list[Dim] = [
        () if place in gone else dim for place, dim in enumerate(found.dims(tensor)) if keeps or place not in gone
    ]
    if any(len(dims) != one.dim() for one in call.outputs):
        return freeze_unknown(found, call)
    return [list(dims) for _ in call.outputs]


def along_dim_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """softmax, cumsum, sort: the shape stays, the dimension is frozen."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 1, "dim", -1), tensor)
    freeze(found.dims(tensor)[place], f"{call.name} is taken along it")
    return [keep_equal_sizes(found.dims(tensor), one.shape) for one in call.outputs]


def matmul_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """mm, addmm, mv: (n, k) x (k, m), plus a bias."""
    added = call.name in ("aten.addmm", "aten.addmv")
    one, other = call.inputs[1 if added else 0], call.inputs[2 if added else 1]
    left, right = found.dims(one), found.dims(other)
    found.sum_over(one, left[-1], other, right[0])
    result = [*left[:-1], *right[1:]]
    if added:
        meet(found, call.inputs[0], result)
    return [result]


def meet(found: TracedForward, tensor: Tensor, result: list[Dim]) -> None:
    """Unify a tensor that is added to the result with it, except along broadcast dimensions."""
    for place in range(1, tensor.dim() + 1):
        if tensor.shape[-place] != 1:
            unify(result[-place], found.dims(tensor)[-place])


def batched_matmul_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """bmm, baddbmm: (b, n, k) x (b, k, m), batched along b."""
    added = call.name == "aten.baddbmm"
    one, other = call.inputs[1 if added else 0], call.inputs[2 if added else 1]
    left, right = found.dims(one), found.dims(other)
    unify(left[0], right[0])
    found.sum_over(one, left[2], other, right[1])
    if found.of(one).data and found.of(other).data:
        found.heads.append(left[0])
    result = [left[0], left[1], right[2]]
    if added:
        meet(found, call.inputs[0], result)
    return [result]


def convolution_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """A convolution in g groups: input (n, g x i, ...), weight (g x o, i, ...) or transposed (g x i, o, ...), output
    (n, g x o, ...)."""
    tensor, weight, bias = call.args[0], call.args[1], call.args[2]
    groups, transposed = call.args[8], call.args[6]
    inputs, own = found.dims(tensor), found.dims(weight)
    spatial = "it is a dimension of a picture or a kernel"
    for dim in (*inputs[2:], *own[2:]):
        freeze(dim, spatial)
    first, second = regroup_axes([inputs[1]], (groups, tensor.shape[1] // groups))
    outer, inner = regroup_axes([own[0]], (groups, weight.shape[0] // groups))
    unify(first, outer)
    read, made = (inner, own[1]) if transposed else (own[1], inner)
    found.sum_over(tensor, second, weight, read)
    out = (*outer, *made)
    if bias is not None:
        unify(found.dims(bias)[0], out)
    found.channels += [inputs[1], out]
    found.groups += [(name, outer) for name in found.of(weight).weights if outer]
    return [[inputs[0], out, *(new_dim(size, spatial) for size in call.outputs[0].shape[2:])]]


def pool_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Pooling, interpolation and padding: spatial dimensions and those whose size changes are frozen."""
    tensor, why = call.inputs[0], f"{call.name} is taken over it"
    dims, shape = found.dims(tensor), call.outputs[0].shape
    changed = [place for place in range(len(shape)) if shape[place] != tensor.shape[place]]
    window = [] if call.name == "aten.constant_pad_nd" else list(range(2, len(shape)))
    for place in {*changed, *window}:
        freeze(dims[place], why)
    result = [new_dim(shape[place], why) if place in changed else dim for place, dim in enumerate(dims)]
    return [list(result) if one.shape == shape else freeze_unknown(found, call)[0] for one in call.outputs]


def batch_norm_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Batch norm: weight, bias and both statistics have the channels' axis."""
    tensor = call.args[0]
    dims = found.dims(tensor)
    for one in call.inputs[1:]:
        unify(dims[1], found.dims(one)[0])
    found.channels.append(dims[1])
    return [
        list(dims)
        if one.shape == tensor.shape
        else [dims[1] if size == tensor.shape[1] else new_dim(size) for size in one.shape]
        for one in call.outputs
    ]


def layer_norm_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Layer norm: the normalised (last) dimensions are frozen."""
    tensor, dims = call.inputs[0], found.dims(call.inputs[0])
    count = len(call.args[1])
    for place in range(1, count + 1):
        freeze(dims[-place], "a norm is taken over it")
        for one in call.inputs[1:]:
            unify(dims[-place], found.dims(one)[-place])
    return [
        list(dims) if one.shape == tensor.shape else [*dims[:-count], *([()] * count)][: one.dim()]
        for one in call.outputs
    ]


def group_norm_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Group norm: only whole groups can be pruned."""
    tensor, groups, dims = call.inputs[0], call.args[6], found.dims(call.inputs[0])
    outer, inner = regroup_axes([dims[1]], (groups, tensor.shape[1] // groups))
    freeze((*inner, *(axis for dim in dims[2:] for axis in dim)), "a norm is taken over it")
    for one in call.inputs[1:]:
        unify(dims[1], found.dims(one)[0])
        found.groups += [(name, outer) for name in found.of(one).weights]
    found.channels.append(dims[1])
    return [list(dims), *([[dims[0], outer]] * 2)]


def weight_norm_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """Weight norm, g v / |v|, with a norm per index of one dimension."""
    direction, size = call.args[0], call.args[1]
    place = index_of(argument(call, 2, "dim", 0), direction)
    for at, dim in enumerate(found.dims(direction)):
        if at == place:
            unify(dim, found.dims(size)[at])
        else:
            freeze(dim, "a norm is taken over it")
    return [list(found.dims(direction)), list(found.dims(size))]


def embedding_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """embedding: rows of a table by index."""
    table, numbers = call.args[0], call.args[1]
    freeze(found.dims(table)[0], "rows of it are looked up")
    return [[*found.dims(numbers), found.dims(table)[1]]]


def index_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """table[indices]: traced if one dimension is indexed by a tensor of integers."""
    table, indices = call.args[0], call.args[1]
    given = [place for place, one in enumerate(indices) if one is not None]
    if (
        len(given) != 1
        or indices[given[0]].dtype.is_floating_point
        or str(indices[given[0]].dtype) in ("torch.bool", "torch.uint8")
    ):
        return freeze_unknown(found, call)
    place, dims = given[0], found.dims(table)
    freeze(dims[place], "parts of it are looked up")
    return [[*dims[:place], *found.dims(indices[place]), *dims[place + 1 :]]]


def index_select_rule(found: TracedForward, call: RecordedCall) -> Dims:
    """index_select: one dimension by a list of indices."""
    tensor, place = call.inputs[0], index_of(call.args[1], call.inputs[0])
    dims, why = list(found.dims(tensor)), "parts of it are looked up"
    freeze(dims[place], why)
    dims[place] = new_dim(call.outputs[0].shape[place], why)
    return [dims]


def no_outputs_rule(found: TracedForward, call: RecordedCall) -> Dims:
    return []


def rows(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **rows(
        same_shape_rule,
        "clone _to_copy detach alias lift_fresh lift_fresh_copy contiguous zeros_like ones_like empty_like full_like rand_like "
        "randn_like bernoulli native_dropout fill_ zero_ resolve_conj",
    ),
    **rows(constant_rule, "new_zeros new_ones new_empty new_full new_empty_strided"),
    **rows(elementwise_rule, "copy_ copy masked_fill masked_fill_ where"),
    **rows(view_rule, "view _unsafe_view reshape unsqueeze squeeze flatten _reshape_alias unsqueeze_ squeeze_ view_as"),
    **rows(permute_rule, "permute t transpose numpy_T"),
    **rows(expand_rule, "expand repeat"),
    **rows(concatenate_rule, "cat stack"),
    **rows(split_rule, "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk"),
    **rows(take_slice_rule, "slice"),
    **rows(select_rule, "select unbind"),
    **rows(
        reduce_rule,
        "sum mean amax amin var std var_mean std_mean linalg_vector_norm logsumexp any all prod argmax argmin",
    ),
    **rows(along_dim_rule, "_softmax _log_softmax _safe_softmax cumsum sort topk"),
    **rows(matmul_rule, "mm addmm mv addmv"),
    **rows(batched_matmul_rule, "bmm baddbmm"),
    **rows(convolution_rule, "convolution"),
    **rows(
        pool_rule,
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool2d constant_pad_nd upsample_nearest2d upsample_nearest1d upsample_bilinear2d "
        "upsample_bicubic2d reflection_pad2d replication_pad2d",
    ),
    **rows(
        batch_norm_rule,
        "native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit cudnn_batch_norm",
    ),
    **rows(layer_norm_rule, "native_layer_norm _fused_rms_norm"),
    **rows(group_norm_rule, "native_group_norm"),
    **rows(weight_norm_rule, "_weight_norm_interface"),
    **rows(embedding_rule, "embedding"),
    **rows(index_rule, "index"),
    **rows(index_select_rule, "index_select"),
    **rows(no_outputs_rule, "sym_size _assert_async _assert_tensor_metadata _assert_scalar"),
}
