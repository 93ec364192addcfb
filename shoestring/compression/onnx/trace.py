"""Trace a model as an ONNX graph with its packed weights: torch's tracer gets them as inputs, so that no step folds them into
dense constants; afterwards each is written in its packed format (emit.py)."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.packed_modules import decode_weights, formats_of
from shoestring.compression.onnx.interface import Forward, Interface, name_axes, outputs_of, replace_tensors
from shoestring.compression.onnx.open_lengths import (
    BATCH_AXIS,
    EVERY_AXIS,
    LENGTH,
    answer_shapes,
    runs_alike,
    shorter_by_one,
    twice_as_long,
    with_dynamic_lengths,
)
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.private import recurrent_weights

OPSET = 21  # the first with 4-bit integers and blockwise scales


TOLERANCE = 1e-4  # relative to the largest output, if everything is computed in float32


LARGEST = 2_000_000_000  # bytes of the largest ONNX file


def serialize(graph: Any) -> bytes:
    from shoestring.compression.onnx.graph import slim

    slim(graph)
    written: bytes = graph.SerializeToString()
    if len(written) > LARGEST:
        raise Mistake(
            f"the model takes {len(written):,} bytes, and one ONNX file holds {LARGEST:,}: compress it to fewer bits first"
        )
    return written


class TensorForward(nn.Module):
    """The job's call of the model as a module of a list of tensors, for tracing."""

    def __init__(self, model: nn.Module, forward: Forward, batch: Batch) -> None:
        super().__init__()
        self.model, self.call, self.batch = model, forward, batch

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        with (
            ExitStack() as stack
        ):  # recurrent layers keep references to their weights: make them use those of this call
            for module in self.model.modules():
                if isinstance(module, nn.RNNBase):
                    stack.enter_context(recurrent_weights(module))
            return list(outputs_of(self.call(self.model, replace_tensors(self.batch, tensors))).values())


class WithWeights(nn.Module):
    """The same call with the weights as additional inputs."""

    def __init__(self, called: TensorForward, names: Sequence[str]) -> None:
        super().__init__()
        self.called, self.names = called, tuple(names)

    def forward(self, tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        named = {f"model.{name}": weight for name, weight in zip(self.names, weights, strict=True)}
        found: list[Tensor] = torch.func.functional_call(self.called, named, (tensors,))
        return found


def trace_graph(
    model: nn.Module, forward: Forward, batch: Batch, interface: Interface, most: int, dense: bool = False
) -> tuple[Any, list[str]]:
    """The model as an ONNX graph with packed weights (`dense`: all in float32) and dynamic axes below `most`, and
    messages for the user."""
    from shoestring.compression.onnx.emit import write_weight
    from shoestring.compression.onnx.graph import Graph

    forms = formats_of(model)
    plain = decode_weights(copy.deepcopy(model))
    for one in plain.modules():
        if callable(change := getattr(one, "set_attn_implementation", None)):
            change("eager")  # of transformers: half as many nodes, and onnxruntime knows the pattern
            break
    weights = {name: value.detach() for name, value in plain.named_parameters() if value.ndim > 1 or name in forms}
    if narrow := [name for name, value in plain.named_parameters() if value.dtype == torch.bfloat16]:
        raise Mistake(
            f"{narrow[0]} is bfloat16, which onnxruntime does not compute with on a CPU: let the job make the model in float32 "
            f"(model.float(), and a forward that casts nothing), or keep the packed folder, which needs no export"
        )
    with torch.no_grad():
        result = outputs_of(forward(plain, batch))
    called = WithWeights(TensorForward(plain, forward, interface.part(batch)), tuple(weights))
    inputs = {name: repeat_single_sample(one) if most else one for name, one in interface.feed(batch).items()}
    asked = {name: open_shape(one, most) for name, one in inputs.items()}
    given = [f"input_of_file_{number}" for number in range(len(inputs))]  # names that no inner tensor has
    program = onnx_program(
        called,
        list(inputs.values()),
        list(weights.values()),
        list(asked.values()),
        given,
        [f"output_of_file_{number}" for number in range(len(result))],
    )
    graph = Graph(program)
    weights = {free_name(name, (*inputs, *result)): value for name, value in weights.items()}
    forms = {free_name(name, (*inputs, *result)): form for name, form in forms.items()}
    notes: list[str] = []
    for number, (name, value) in enumerate(weights.items()):
        here = f"weights_{number}"
        graph.rename({here: name})
        form: WeightFormat | Tensor = value if dense or name not in forms else forms[name]
        notes += write_weight(graph, name, form)
    graph.fold_transposes(shared=False)
    graph.rename(
        {
            **dict(zip(given, inputs, strict=True)),
            **{f"output_of_file_{number}": free_name(name, inputs, "_result") for number, name in enumerate(result)},
        }
    )
    proto = graph.proto()
    keep_read_inputs(proto, weights)
    if most > BATCH_AXIS:
        proto = with_open_lengths(proto, model, forward, batch, interface, asked)
    name_axes(proto, inputs)
    told = fixed_dimensions(proto.graph.input, inputs)
    return proto, notes + ([told] if told else [])


def with_open_lengths(
    graph: Any,
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    interface: Interface,
    asked: Mapping[str, Mapping[int, Any] | None],
) -> Any:
    """The graph with dynamic sequence lengths that torch's tracer fixed, if it agrees with the model for other lengths."""
    from shoestring.compression.onnx.check import largest_difference

    fixed = {
        one.name: one.type.tensor_type.shape.dim[LENGTH].dim_value
        for one in graph.graph.input
        if LENGTH in (asked.get(one.name) or {})
        and not one.type.tensor_type.shape.dim[LENGTH].dim_param
        and one.type.tensor_type.shape.dim[LENGTH].dim_value > 2
    }
    tensors, part = interface.feed(batch), interface.part(batch)
    longer = replace_tensors(part, twice_as_long(tensors, fixed))

    def call(given: Batch) -> dict[str, Tensor]:
        return {free_name(name, tensors, "_result"): one for name, one in outputs_of(forward(model, given)).items()}

    def agrees(changed: Any) -> bool:
        written, open_ones = serialize(type(changed).FromString(changed.SerializeToString())), open_dimensions(changed)
        tried = [batch, longer] if answer_shapes(call, longer) is not None else [batch]
        return all(
            runs_alike(lambda: largest_difference(written, model, forward, one, interface, open_ones), TOLERANCE)  # noqa: B023
            for one in tried
        )

    return with_dynamic_lengths(
        graph, fixed, answer_shapes(call, replace_tensors(part, shorter_by_one(tensors, fixed))), agrees
    )


def keep_read_inputs(proto: Any, weights: Collection[str]) -> None:
    """Remove graph inputs that no operator reads, and those that are weights."""
    from shoestring.compression.onnx.graph import inputs_of

    read = {name for node in proto.graph.node for name in inputs_of(node)} | {one.name for one in proto.graph.output}
    left = [one for one in proto.graph.input if one.name not in weights and one.name in read]
    del proto.graph.input[:]
    proto.graph.input.extend(left)


def free_name(name: str, taken: Collection[str], end: str = "_weight") -> str:
    """The name, with suffixes until it is free."""
    while name in taken:
        name += end
    return name


def repeat_single_sample(tensor: Tensor) -> Tensor:
    """Repeat a single sample, because torch treats a dimension of size 1 as static."""
    return torch.cat([tensor, tensor]) if tensor.ndim and len(tensor) == 1 else tensor


def open_shape(tensor: Tensor, most: int = EVERY_AXIS) -> dict[int, Any] | None:
    """Dimensions below `most` that torch should keep dynamic if possible: the batch, and whatever may be a length: all
    of ids, of audio (batch, samples), of vectors (batch, length, features) and of features (batch, features, length).
    torch fixes those on which the model has weights."""
    sizes = range(min(tensor.ndim if tensor.ndim <= EVERY_AXIS else 1, most))
    return dict.fromkeys(sizes, torch.export.Dim.AUTO) or None


def onnx_program(
    called: nn.Module,
    inputs: list[Tensor],
    weights: list[Tensor],
    shapes: list[Any],
    names: list[str],
    results: list[str],
) -> Any:
    """Run torch's ONNX exporter quietly. Raises Mistake with the cause if the model can't be exported."""
    from shoestring.compression.onnx.lookup import embedding

    fixed = [None] * len(weights)
    weights_named = [f"weights_{number}" for number in range(len(weights))]
    with quiet():
        try:
            program = torch.export.export(
                called.eval(), (inputs, weights), dynamic_shapes=(shapes, fixed), strict=False
            )
            written: Any = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                optimize=True,
                input_names=[*names, *weights_named],
                output_names=results,
                custom_translation_table={torch.ops.aten.embedding.default: embedding},
            )
        except Exception as error:
            raise Mistake(
                f"torch can't export this model to ONNX: {reason(error)}. Give a forward without it, or keep the packed folder, "
                f"which needs no export"
            ) from error
    model = written.model_proto  # the property creates a new object at every access
    fix_dimensions(model, program, names)
    return model


def fix_dimensions(model: Any, program: torch.export.ExportedProgram, names: Sequence[str]) -> None:
    """Make inputs static where the traced program needs fixed sizes. The exporter leaves them dynamic, because torch
    keeps a symbol for a size that it found to be fixed."""
    places = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    needed = {
        name: places[place].shape for name, place in zip(names, program.graph_signature.user_inputs, strict=False)
    }
    for one in model.graph.input:
        for size, given in zip(one.type.tensor_type.shape.dim, needed.get(one.name, ()), strict=False):
            if str(given).isdigit():
                size.dim_value = int(str(given))


def reason(error: BaseException) -> str:
    """The innermost cause in one line; torch wraps it in exceptions that only name the failed step."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no text'])[0][:300]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's warnings about missing packages and its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def open_dimensions(model: Any) -> dict[str, tuple[int, ...]]:
    """The dynamic dimensions of each input."""
    return {
        one.name: tuple(at for at, size in enumerate(one.type.tensor_type.shape.dim) if size.dim_param)
        for one in model.graph.input
    }


def fixed_dimensions(inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> str:
    """Message about dimensions that should be dynamic but are static: the batch; and lengths, which are those of ids,
    and at least one of (batch, length, features)."""
    said = []
    for one in inputs:
        tensor, sizes = tensors[one.name], one.type.tensor_type.shape.dim
        fixed = [at for at in open_shape(tensor) or () if not sizes[at].dim_param]
        lengths = [at for at in fixed if at]
        if tensor.is_floating_point() and len(lengths) < EVERY_AXIS - 1:  # the others are features
            fixed = [at for at in fixed if not at]
        said += [f"dimension {at} of {one.name} is fixed at {sizes[at].dim_value}" for at in fixed]
    batch = "; where it takes len(x), x.shape[0] leaves the batch open" * any("dimension 0" in one for one in said)
    return f"{'; '.join(said)}: the model computes with that number{batch}" if said else ""
