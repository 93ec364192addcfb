"""The Open Inference Protocol, version 2: reading requests to infer and writing their answers.

    JSON                              or JSON, then the tensors' bytes
    {"inputs": [{"name", "shape",     Inference-Header-Content-Length: length of the JSON
      "datatype", "data": [...]}]}    "parameters": {"binary_data_size": n} in the place of "data"

The first axis of every tensor counts samples. https://github.com/kserve/open-inference-protocol,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shoestring.serving.protocols.http.asked import AskedFor
from shoestring.serving.protocols.http.refusals import RefusedRequest, wrong
from shoestring.serving.protocols.http.strict_json import checked_object, read_json, value_text, written_json
from shoestring.serving.protocols.samples import fits, length_of
from shoestring.serving.protocols.tensors import DATATYPES, from_bytes, from_lists, raw_bytes
from shoestring.serving.sample import Sample, Signature, TensorForm, Tensors

LENGTH_HEADER = "inference-header-content-length"
MOST_AXES = 16


@dataclass(frozen=True)
class InferRequest:
    samples: Sequence[Sample]
    outputs: Mapping[str, bool]  # those that are wanted, and whether as bytes
    id: str
    asked: AskedFor  # by its parameters


def read_infer(body: bytes, header_length: str, signature: Signature, most_rows: int) -> InferRequest:
    head, tail = cut(body, header_length)
    found = checked_object(
        read_json(head), "body", ("id", "parameters", "inputs", "outputs", "model_name", "model_version")
    )
    if not isinstance(found.get("id", ""), str):
        raise wrong("id", "it must be a string")
    parameters = checked_object(found.get("parameters", {}), "parameters")
    tensors = read_inputs(found.get("inputs"), tail, signature, most_rows)
    rows = next(iter(tensors.values())).shape[0]
    samples = []
    for row in range(rows):
        inputs = {name: one[row] for name, one in tensors.items()}
        samples.append(Sample(inputs, length_of(inputs, signature.inputs)))
    outputs = read_outputs(found.get("outputs"), parameters.get("binary_data_output") is True, signature)
    return InferRequest(samples, outputs, found.get("id", ""), requirements_of(parameters))


def cut(body: bytes, header_length: str) -> tuple[bytes, bytes]:
    """The JSON, and the tensors' bytes behind it."""
    if not header_length:
        return body, b""
    if (
        not header_length.isascii()
        or not header_length.isdigit()
        or len(header_length) > 12
        or int(header_length) > len(body)
    ):
        raise wrong(LENGTH_HEADER, f"it must be the JSON's length, at most {len(body)}, and is {header_length[:20]!r}")
    return body[: int(header_length)], body[int(header_length) :]


def requirements_of(parameters: Mapping[str, Any]) -> AskedFor:
    """Triton's parameters: priority 1 is the most urgent, 4 as urgent as a request without one; timeout is in microseconds."""
    priority, timeout = parameters.get("priority", 0), parameters.get("timeout", 0)
    for name, value in (("priority", priority), ("timeout", timeout)):
        if type(value) is not int or value < 0:
            raise wrong(f"parameters.{name}", f"it must be a whole number of 0 or more, and is {value_text(value)}")
    return AskedFor(max(4 - priority, -4) if priority else 0, timeout / 1e6 if timeout else inf)


def read_inputs(given: Any, tail: bytes, signature: Signature, most_rows: int) -> dict[str, Tensor]:
    kinds = {one.name: one for one in signature.inputs}
    if not isinstance(given, list) or not given:
        raise wrong("inputs", f"it must be a list of the model's inputs: {', '.join(kinds)}")
    tensors: dict[str, Tensor] = {}
    place = 0
    for number, one in enumerate(given):
        field = f"inputs[{number}]"
        checked_object(one, field, ("name", "shape", "datatype", "parameters", "data"))
        name = one.get("name")
        if not isinstance(name, str) or name not in kinds:
            raise wrong(f"{field}.name", f"the model has no input {value_text(name)}; it takes {', '.join(kinds)}")
        if name in tensors:
            raise wrong(f"{field}.name", f"{name!r} is given twice")
        shape = read_shape(one, field, kinds[name], most_rows)
        size = binary_size(one, field)
        if size is None:
            tensors[name] = from_lists(one.get("data"), kinds[name].dtype, shape, f"{field}.data")
        else:
            if place + size > len(tail):
                raise wrong(f"{field}.parameters.binary_data_size", f"{size} bytes, and {len(tail) - place} came")
            tensors[name] = from_bytes(bytearray(tail[place : place + size]), kinds[name].dtype, shape, field)
            place += size
    if place != len(tail):
        raise wrong("inputs", f"{len(tail) - place} bytes more came than the inputs have")
    if missing := [name for name in kinds if name not in tensors]:
        raise wrong("inputs", f"the model also takes {', '.join(missing)}")
    rows = {one.shape[0] for one in tensors.values()}
    if len(rows) > 1:
        raise wrong(
            "inputs", f"the first axis counts samples and must be the same for all inputs; it is {sorted(rows)}"
        )
    return tensors


def read_shape(one: Mapping[str, Any], field: str, kind: TensorForm, most_rows: int) -> list[int]:
    if one.get("datatype") != DATATYPES[kind.dtype]:
        raise wrong(
            f"{field}.datatype", f"{kind.name} is {DATATYPES[kind.dtype]}, and {value_text(one.get('datatype'))} came"
        )
    shape = one.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_AXES
        or any(type(size) is not int or size < 0 for size in shape)
    ):
        raise wrong(f"{field}.shape", "it must be a list of sizes")
    wanted = shape_text(kind)
    if not shape or not fits(shape[1:], kind) or prod(shape) > 1 << 40:
        raise wrong(f"{field}.shape", f"{kind.name} has the shape {wanted}, any size where -1 is, and {shape} came")
    if not 1 <= shape[0] <= most_rows:
        raise wrong(f"{field}.shape", f"{shape[0]} samples: give 1 to {most_rows}")
    return shape


def binary_size(one: Mapping[str, Any], field: str) -> int | None:
    """Bytes of an input that come behind the JSON; None if it is in the JSON."""
    parameters = checked_object(one.get("parameters", {}), f"{field}.parameters")
    if "binary_data_size" not in parameters:
        return None
    size = parameters["binary_data_size"]
    if type(size) is not int or size < 0:
        raise wrong(f"{field}.parameters.binary_data_size", f"it must be a number of bytes, and is {value_text(size)}")
    if "data" in one:
        raise wrong(f"{field}.data", "it comes as bytes already")
    return size


def read_outputs(given: Any, as_bytes: bool, signature: Signature) -> dict[str, bool]:
    known = [one.name for one in signature.outputs]
    if given is None or given == []:
        return dict.fromkeys(known, as_bytes)
    if not isinstance(given, list):
        raise wrong("outputs", f"it must be a list of outputs: {', '.join(known)}")
    wanted: dict[str, bool] = {}
    for number, one in enumerate(given):
        field = f"outputs[{number}]"
        checked_object(one, field, ("name", "parameters"))
        name = one.get("name")
        if not isinstance(name, str) or name not in known:
            raise wrong(f"{field}.name", f"the model has no output {value_text(name)}; it gives {', '.join(known)}")
        parameters = checked_object(one.get("parameters", {}), f"{field}.parameters")
        if "classification" in parameters:
            raise wrong(f"{field}.parameters.classification", "this server gives tensors only")
        wanted[name] = bool(parameters.get("binary_data", as_bytes))
    return wanted


def written_infer(
    model: str, version: str, request: InferRequest, answers: Sequence[Tensors]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if bytes follow."""
    described, tail = [], []
    for name, as_bytes in request.outputs.items():
        rows = [one[name] for one in answers]
        if len({one.shape for one in rows}) > 1:
            raise RefusedRequest(
                400,
                f"{name} has another shape for every sample: {sorted({tuple(one.shape) for one in rows})}; ask for one at a time",
            )
        output = torch.stack(rows)
        dtype = str(output.dtype).removeprefix("torch.")
        one: dict[str, Any] = {"name": name, "datatype": DATATYPES[dtype], "shape": list(output.shape)}
        if as_bytes:
            tail.append(raw_bytes(output))
            one["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            one["data"] = output.flatten().tolist()
        described.append(one)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id:
        head["id"] = request.id
    text = written_json(head, "output (NaN or infinity: ask for it with binary_data)")
    return (text + b"".join(tail), len(text)) if tail else (text, None)


def shape_text(kind: TensorForm) -> str:
    return json.dumps([-1, *kind.shape])


def metadata(model: str, version: str, signature: Signature) -> dict[str, Any]:
    """What the protocol says of a model; -1: any size."""

    def tensor_metadata(kinds: Sequence[TensorForm]) -> list[dict[str, Any]]:
        return [{"name": one.name, "datatype": DATATYPES[one.dtype], "shape": [-1, *one.shape]} for one in kinds]

    return {
        "name": model,
        "versions": [version],
        "platform": "shoestring",
        "inputs": tensor_metadata(signature.inputs),
        "outputs": tensor_metadata(signature.outputs),
    }
