"""The Open Inference Protocol, by a real client and by hand; whatever is wrong is a 4xx that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.serving.serving import Served, serving
from tests.serving.tiny import BROKEN, REFUSED, spec
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")
LONG = {"timeout": int(HUNG * 1e6)}  # microseconds
INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec(2.0)}, most_body=50_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}", network_timeout=HUNG) as found:
        yield found


def test_triton_s_client_asks_for_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata("tiny")
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert [one["name"] for one in found["outputs"]] == ["y", "total"]


@pytest.mark.parametrize("binary", [True, False])
def test_triton_s_client_infers(client: triton.InferenceServerClient, binary: bool) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = triton.InferInput("x", [2, 3], "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("total", "y")]
    found = client.infer("tiny", [given], outputs=wanted, request_id="seven", priority=1, **LONG)
    assert np.array_equal(found.as_numpy("y"), 2 * x) and found.as_numpy("total").tolist() == [6.0, 24.0]
    assert found.get_response()["id"] == "seven" and found.get_response()["model_version"] == "1"
    everything = client.infer("tiny", [given])
    assert np.array_equal(everything.as_numpy("y"), 2 * x) and everything.as_numpy("total").shape == (2,)


def test_triton_s_client_hears_what_is_wrong(client: triton.InferenceServerClient) -> None:
    given = triton.InferInput("x", [1, 2], "INT64")
    given.set_data_from_numpy(np.zeros((1, 2), np.int64))
    with pytest.raises(triton.InferenceServerException, match=r"inputs\[0\].datatype: x is FP32"):
        client.infer("tiny", [given])
    with pytest.raises(triton.InferenceServerException, match="no model is called 'other'"):
        client.get_model_metadata("other")


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]} | more


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in tensor().items() if name != field}


@pytest.mark.parametrize("data", [[1.0, 2.0], [[1.0, 2.0]], [1, 2]], ids=["flat", "nested", "whole numbers"])
def test_json_may_be_flat_or_nested(served: Served, data: Any) -> None:
    found = served.ask(INFER, {"inputs": [tensor(data=data)]})
    assert found.status == 200 and found.json["outputs"][0] == {
        "name": "y",
        "datatype": "FP32",
        "shape": [1, 2],
        "data": [2.0, 4.0],
    }


WRONG = [
    (b"{", "no JSON"),
    (b"\xff", "not UTF-8"),
    (b"[" * 20_000, "nested too deeply"),
    (b'{"inputs": NaN}', "NaN"),
    (b'{"id": 1, "id": 2}', "twice"),
    (b'{"inputs": [' + b"9" * 5_000 + b"]}", "no JSON"),
    ([], "body: it must be an object"),
    ({}, "inputs: it must be a list"),
    ({"inputs": [], "id": "a"}, "inputs: it must be a list"),
    ({"inputs": [tensor()], "extra": 1}, "body.extra: there is no such field"),
    ({"inputs": [tensor()], "id": 3}, "id: it must be a string"),
    ({"inputs": [3]}, "inputs[0]: it must be an object, and is 3"),
    ({"inputs": [tensor(name="z")]}, "inputs[0].name: the model has no input"),
    ({"inputs": [tensor(name=["x"])]}, "inputs[0].name"),
    ({"inputs": [tensor(), tensor()]}, "inputs[1].name: 'x' is given twice"),
    ({"inputs": [without("shape")]}, "inputs[0].shape: it must be a list of sizes"),
    ({"inputs": [tensor(shape=[1, -2])]}, "inputs[0].shape"),
    ({"inputs": [tensor(shape=[1, True])]}, "inputs[0].shape"),
    ({"inputs": [tensor(shape=[2])]}, "inputs[0].shape: x has the shape [-1, -1]"),
    ({"inputs": [tensor(shape=[1, 0], data=[])]}, "inputs[0].shape"),
    ({"inputs": [tensor(shape=[0, 2], data=[])]}, "inputs[0].shape: 0 samples"),
    ({"inputs": [tensor(shape=[10**9, 10**9])]}, "inputs[0].shape"),
    ({"inputs": [tensor(shape=[2000, 1])]}, "inputs[0].shape: 2000 samples: give 1 to 1024"),
    ({"inputs": [tensor(datatype="INT64")]}, "inputs[0].datatype"),
    ({"inputs": [without("data")]}, "inputs[0].data: it must be a list"),
    ({"inputs": [tensor(data=[1.0])]}, "inputs[0].data: it has the shape [1]"),
    ({"inputs": [tensor(data=[[1.0], [2.0, 3.0]])]}, "inputs[0].data: its lists have different lengths"),
    ({"inputs": [tensor(data=["a", "b"])]}, "inputs[0].data: FP32 needs numbers"),
    ({"inputs": [tensor(data=[None, 1])]}, "inputs[0].data: FP32 needs numbers"),
    ({"inputs": [tensor(data=[10**400, 1])]}, "inputs[0].data"),
    ({"inputs": [tensor(data=[1e300, 1])]}, "inputs[0].data: it has NaN or infinity"),
    ({"inputs": [tensor()], "outputs": [{"name": "z"}]}, "outputs[0].name: the model has no output"),
    ({"inputs": [tensor()], "parameters": {"timeout": -1}}, "parameters.timeout"),
    ({"inputs": [tensor(parameters={"binary_data_size": 8})]}, "inputs[0].data: it comes as bytes already"),
    ({"inputs": [without("data") | {"parameters": {"binary_data_size": 8}}]}, "binary_data_size: 8 bytes, and 0 came"),
    ({"inputs": [tensor(data=[REFUSED, 1])]}, "IndexError: index out of range"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_is_wrong_is_named(served: Served, body: Any, said: str) -> None:
    found = served.ask(INFER, body)
    assert found.status == 400 and said in found.json["error"], found.body


def test_bytes_that_do_not_fit_are_named(served: Served) -> None:
    def ask(tail: bytes, length: str = "", **more: Any) -> str:
        one = without("data") | {"parameters": {"binary_data_size": 8}} | more
        head = json.dumps({"inputs": [one]}).encode()
        found = served.ask(INFER, head + tail, Inference_Header_Content_Length=length or str(len(head)))
        assert found.status == 400
        return str(found.json["error"])

    nan = np.array([np.nan, 1], np.float32).tobytes()
    assert ask(nan).startswith("inputs[0]: it has NaN")
    assert "9 bytes came" in ask(b"123456789", parameters={"binary_data_size": 9})
    assert "1 bytes more came" in ask(b"123456789")
    assert "inference-header-content-length" in ask(b"12345678", "-3")
    assert "inference-header-content-length" in ask(b"12345678", "99999")


def test_other_failures_have_their_own_status(served: Served) -> None:
    assert served.ask(INFER, {"inputs": [tensor(data=[BROKEN, 1])]}).status == 500
    assert served.ask("/v2/models/other/infer", {"inputs": [tensor()]}).status == 404
    assert served.ask("/v2/models/tiny/versions/2/infer", {"inputs": [tensor()]}).status == 404
    assert served.ask("/v2/models/tiny/versions/1/infer", {"inputs": [tensor()]}).status == 200
    assert served.ask(INFER, b" " * 60_000).status == 413
    assert served.ask(INFER, {"inputs": [tensor()]}, Content_Encoding="gzip").status == 415
    assert served.ask(INFER, method="GET").status == 405 and served.ask("/nothing").status == 404
    assert (
        served.ask(INFER, {"inputs": [tensor()]}, X_Request_Timeout_Ms="soon").json["field"] == "x-request-timeout-ms"
    )
    assert served.ask("/answer", {"text": "a"}).json["error"].startswith("the job of 'tiny' has no answer")
