"""What every operation does to the axes of what it is given: one function a kind of operation, and the table of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoestring.compression.pruning.axes import Dim, freeze, fresh, regrouped, unify
from shoestring.compression.pruning.known import Rule, TracedForward, index_of, pieces, reshaped_to, unfollowed, viewed
from shoestring.compression.pruning.record import RecordedCall

Dims = list[list[Dim]]


def argument(call: RecordedCall, place: int, name: str, default: Any = None) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def broadcast(found: TracedForward, call: RecordedCall) -> Dims:
    """Number by number: what stands at the same place from the right is one axis, unless it is repeated."""
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
        result.insert(0, meeting[0] if meeting else fresh(shape[-place], "it is repeated"))
    return [list(result) for _ in call.outputs]


def same(found: TracedForward, call: RecordedCall) -> Dims:
    """A copy, or a tensor made to be like the first."""
    return [
        list(found.dims(call.inputs[0])) if one.shape == call.inputs[0].shape else [fresh(size) for size in one.shape]
        for one in call.outputs
    ]


def made(found: TracedForward, call: RecordedCall) -> Dims:
    """A constant that the forward makes: its sizes are what the forward says. Numbers that differ from place to place can't be cut."""
    plain = call.name.removeprefix("aten.").removeprefix("new_") in (
        "zeros",
        "ones",
        "full",
        "empty",
        "scalar_tensor",
        "empty_strided",
    )
    return [
        [fresh(size, "" if plain else f"{call.name} makes numbers along it") for size in one.shape]
        for one in call.outputs
    ]


def permuted(found: TracedForward, call: RecordedCall) -> Dims:
    tensor = call.inputs[0]
    dims = list(found.dims(tensor))
    if call.name == "aten.permute":
        return [[dims[index_of(place, tensor)] for place in call.args[1]]]
    if call.name in ("aten.t", "aten.numpy_T"):
        return [dims[::-1]]
    one, other = index_of(call.args[1], tensor), index_of(call.args[2], tensor)
    dims[one], dims[other] = dims[other], dims[one]
    return [dims]


def expanded(found: TracedForward, call: RecordedCall) -> Dims:
    """A dimension of size 1 that is repeated has a new axis, which may be cut with whatever it meets."""
    tensor, shape = call.inputs[0], call.outputs[0].shape
    if call.name == "aten.repeat" and any(
        size != 1 and times != 1 for size, times in zip(tensor.shape[::-1], list(call.args[1])[::-1], strict=False)
    ):
        return unfollowed(found, call)
    dims: list[Dim] = []
    for place, size in zip(range(-len(shape), 0), shape, strict=True):
        known = tensor.dim() >= -place and tensor.shape[place] == size
        dims.append(found.dims(tensor)[place] if known else fresh(size))
    return [dims]


def joined(found: TracedForward, call: RecordedCall) -> Dims:
    """cat and stack: the other dimensions are one; the one along which they lie is frozen."""
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
    result.insert(place, fresh(call.outputs[0].shape[place], why))
    return [result]


def divided(found: TracedForward, call: RecordedCall) -> Dims:
    """split, chunk: equal parts of one dimension."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 2, "dim", 0), tensor)
    dims, start, parts = found.dims(tensor), 0, []
    for one in call.outputs:
        piece = pieces(dims[place], tensor.shape[place], one.shape[place], start)
        parts.append([*dims[:place], piece, *dims[place + 1 :]])
        start += one.shape[place]
    return parts


def sliced(found: TracedForward, call: RecordedCall) -> Dims:
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
        dims[place] = fresh(length, "every so many of it are taken")
    else:
        dims[place] = pieces(dims[place], total, length, start)
    return [dims]


def picked(found: TracedForward, call: RecordedCall) -> Dims:
    """select, unbind: the dimension is gone."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 1, "dim", 0), tensor)
    freeze(found.dims(tensor)[place], "one of it is taken")
    rest = [dim for at, dim in enumerate(found.dims(tensor)) if at != place]
    return [list(rest) for _ in call.outputs]


def reduced(found: TracedForward, call: RecordedCall) -> Dims:
    """A sum, mean or norm over dimensions: those are frozen."""
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
        return unfollowed(found, call)
    return [list(dims) for _ in call.outputs]


def along(found: TracedForward, call: RecordedCall) -> Dims:
    """softmax, cumsum, sort: the shape stays, the dimension is frozen."""
    tensor = call.inputs[0]
    place = index_of(argument(call, 1, "dim", -1), tensor)
    freeze(found.dims(tensor)[place], f"{call.name} is taken along it")
    return [reshaped_to(found.dims(tensor), one.shape) for one in call.outputs]


def product(found: TracedForward, call: RecordedCall) -> Dims:
    """mm, addmm, mv: (n, k) x (k, m), a bias added."""
    added = call.name in ("aten.addmm", "aten.addmv")
    one, other = call.inputs[1 if added else 0], call.inputs[2 if added else 1]
    left, right = found.dims(one), found.dims(other)
    found.sum_over(one, left[-1], other, right[0])
    result = [*left[:-1], *right[1:]]
    if added:
        meet(found, call.inputs[0], result)
    return [result]


def meet(found: TracedForward, tensor: Tensor, result: list[Dim]) -> None:
    """What is added to a result shares its axes, where it is not repeated."""
    for place in range(1, tensor.dim() + 1):
        if tensor.shape[-place] != 1:
            unify(result[-place], found.dims(tensor)[-place])


def products(found: TracedForward, call: RecordedCall) -> Dims:
    """bmm, baddbmm: (b, n, k) x (b, k, m), side by side along b."""
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


def convolved(found: TracedForward, call: RecordedCall) -> Dims:
    """A convolution in g groups: input (n, g x i, ...), weight (g x o, i, ...) or transposed (g x i, o, ...), output (n, g x o, ...)."""
    tensor, weight, bias = call.args[0], call.args[1], call.args[2]
    groups, transposed = call.args[8], call.args[6]
    inputs, own = found.dims(tensor), found.dims(weight)
    spatial = "it is a dimension of a picture or a kernel"
    for dim in (*inputs[2:], *own[2:]):
        freeze(dim, spatial)
    first, second = regrouped([inputs[1]], (groups, tensor.shape[1] // groups))
    outer, inner = regrouped([own[0]], (groups, weight.shape[0] // groups))
    unify(first, outer)
    read, made = (inner, own[1]) if transposed else (own[1], inner)
    found.sum_over(tensor, second, weight, read)
    out = (*outer, *made)
    if bias is not None:
        unify(found.dims(bias)[0], out)
    found.channels += [inputs[1], out]
    found.groups += [(name, outer) for name in found.of(weight).weights if outer]
    return [[inputs[0], out, *(fresh(size, spatial) for size in call.outputs[0].shape[2:])]]


def pooled(found: TracedForward, call: RecordedCall) -> Dims:
    """Pooling, interpolation and padding: dimensions whose size changes are frozen, and so are those of a picture."""
    tensor, why = call.inputs[0], f"{call.name} is taken over it"
    dims, shape = found.dims(tensor), call.outputs[0].shape
    changed = [place for place in range(len(shape)) if shape[place] != tensor.shape[place]]
    window = [] if call.name == "aten.constant_pad_nd" else list(range(2, len(shape)))
    for place in {*changed, *window}:
        freeze(dims[place], why)
    result = [fresh(shape[place], why) if place in changed else dim for place, dim in enumerate(dims)]
    return [list(result) if one.shape == shape else unfollowed(found, call)[0] for one in call.outputs]


def batch_normed(found: TracedForward, call: RecordedCall) -> Dims:
    """Channel by channel: weight, bias and both statistics have the axis of the channels. In training a mean is taken of the rest."""
    tensor = call.args[0]
    dims = found.dims(tensor)
    for one in call.inputs[1:]:
        unify(dims[1], found.dims(one)[0])
    found.channels.append(dims[1])
    return [
        list(dims)
        if one.shape == tensor.shape
        else [dims[1] if size == tensor.shape[1] else fresh(size) for size in one.shape]
        for one in call.outputs
    ]


def layer_normed(found: TracedForward, call: RecordedCall) -> Dims:
    """Means over the last dimensions: they are frozen."""
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


def group_normed(found: TracedForward, call: RecordedCall) -> Dims:
    """Means over the channels of a group: whole groups may go, but nothing of one."""
    tensor, groups, dims = call.inputs[0], call.args[6], found.dims(call.inputs[0])
    outer, inner = regrouped([dims[1]], (groups, tensor.shape[1] // groups))
    freeze((*inner, *(axis for dim in dims[2:] for axis in dim)), "a norm is taken over it")
    for one in call.inputs[1:]:
        unify(dims[1], found.dims(one)[0])
        found.groups += [(name, outer) for name in found.of(one).weights]
    found.channels.append(dims[1])
    return [list(dims), *([[dims[0], outer]] * 2)]


def weight_normed(found: TracedForward, call: RecordedCall) -> Dims:
    """g v / |v|, a norm for each place along one dimension."""
    direction, size = call.args[0], call.args[1]
    place = index_of(argument(call, 2, "dim", 0), direction)
    for at, dim in enumerate(found.dims(direction)):
        if at == place:
            unify(dim, found.dims(size)[at])
        else:
            freeze(dim, "a norm is taken over it")
    return [list(found.dims(direction)), list(found.dims(size))]


def looked_up(found: TracedForward, call: RecordedCall) -> Dims:
    """embedding: rows of a table by number."""
    table, numbers = call.args[0], call.args[1]
    freeze(found.dims(table)[0], "rows of it are looked up")
    return [[*found.dims(numbers), found.dims(table)[1]]]


def indexed(found: TracedForward, call: RecordedCall) -> Dims:
    """table[numbers]: followed where one dimension is indexed by a tensor of integers."""
    table, indices = call.args[0], call.args[1]
    given = [place for place, one in enumerate(indices) if one is not None]
    if (
        len(given) != 1
        or indices[given[0]].dtype.is_floating_point
        or str(indices[given[0]].dtype) in ("torch.bool", "torch.uint8")
    ):
        return unfollowed(found, call)
    place, dims = given[0], found.dims(table)
    freeze(dims[place], "parts of it are looked up")
    return [[*dims[:place], *found.dims(indices[place]), *dims[place + 1 :]]]


def gathered(found: TracedForward, call: RecordedCall) -> Dims:
    """index_select: one dimension by a list of numbers."""
    tensor, place = call.inputs[0], index_of(call.args[1], call.inputs[0])
    dims, why = list(found.dims(tensor)), "parts of it are looked up"
    freeze(dims[place], why)
    dims[place] = fresh(call.outputs[0].shape[place], why)
    return [dims]


def nothing(found: TracedForward, call: RecordedCall) -> Dims:
    return []


def rows(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **rows(
        same,
        "clone _to_copy detach alias lift_fresh lift_fresh_copy contiguous zeros_like ones_like empty_like full_like rand_like "
        "randn_like bernoulli native_dropout fill_ zero_ resolve_conj",
    ),
    **rows(made, "new_zeros new_ones new_empty new_full new_empty_strided"),
    **rows(broadcast, "copy_ copy masked_fill masked_fill_ where"),
    **rows(viewed, "view _unsafe_view reshape unsqueeze squeeze flatten _reshape_alias unsqueeze_ squeeze_ view_as"),
    **rows(permuted, "permute t transpose numpy_T"),
    **rows(expanded, "expand repeat"),
    **rows(joined, "cat stack"),
    **rows(divided, "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk"),
    **rows(sliced, "slice"),
    **rows(picked, "select unbind"),
    **rows(
        reduced, "sum mean amax amin var std var_mean std_mean linalg_vector_norm logsumexp any all prod argmax argmin"
    ),
    **rows(along, "_softmax _log_softmax _safe_softmax cumsum sort topk"),
    **rows(product, "mm addmm mv addmv"),
    **rows(products, "bmm baddbmm"),
    **rows(convolved, "convolution"),
    **rows(
        pooled,
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool2d constant_pad_nd upsample_nearest2d upsample_nearest1d upsample_bilinear2d "
        "upsample_bicubic2d reflection_pad2d replication_pad2d",
    ),
    **rows(
        batch_normed, "native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit cudnn_batch_norm"
    ),
    **rows(layer_normed, "native_layer_norm _fused_rms_norm"),
    **rows(group_normed, "native_group_norm"),
    **rows(weight_normed, "_weight_norm_interface"),
    **rows(looked_up, "embedding"),
    **rows(indexed, "index"),
    **rows(gathered, "index_select"),
    **rows(nothing, "sym_size _assert_async _assert_tensor_metadata _assert_scalar"),
}
