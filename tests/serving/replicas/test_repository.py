"""Several models under one memory budget, by Triton's client: loaded when asked for, the least recently used evicted."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.http as triton

from shoestring.core.errors import Mistake
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.server import serve
from shoestring.serving.replicas.happenings import Happening, ModelUnloaded
from tests.serving import tiny
from tests.serving.serving import serving
from tests.serving.tiny import spec
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")


def states(client: triton.InferenceServerClient) -> dict[str, str]:
    return {one["name"]: one["state"] for one in client.get_model_repository_index()}


def asked(client: triton.InferenceServerClient, model: str) -> float:
    given = triton.InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    return float(client.infer(model, [given]).as_numpy("total")[0])


def test_the_least_recently_used_model_makes_room_and_pinned_ones_stay() -> None:
    told: list[Happening] = []
    models = {
        "kept": spec(1.0, memory=40, pinned=True),
        "two": spec(2.0, memory=30),
        "three": spec(3.0, memory=30),
        "four": spec(4.0, memory=30),
        "huge": spec(5.0, memory=101),
        "broken": spec(load=tiny.unloadable, arguments={}, memory=1),
    }
    with (
        serving(models, told, memory=100) as served,
        triton.InferenceServerClient(f"127.0.0.1:{served.port}", network_timeout=HUNG) as client,
    ):
        assert [name for name, state in states(client).items() if state == "READY"] == ["kept"]
        assert [asked(client, name) for name in ("two", "three", "two", "four", "kept")] == [2.0, 3.0, 2.0, 4.0, 1.0]
        assert [name for name, state in states(client).items() if state == "READY"] == ["kept", "two", "four"]
        assert [one.model for one in told if isinstance(one, ModelUnloaded)] == ["three"]
        with pytest.raises(
            triton.InferenceServerException, match=r"'huge' needs 101 B.*all models together may have 100 B"
        ):
            asked(client, "huge")
        with pytest.raises(triton.InferenceServerException, match="no weights here"):
            client.load_model("broken")
        assert served.server.repository.is_ready
        client.unload_model("two")
        assert not client.is_model_ready("two")
        with pytest.raises(triton.InferenceServerException, match="'two' was unloaded; load it first"):
            asked(client, "two")
        client.load_model("two")
        assert client.is_model_ready("two") and asked(client, "two") == 2.0
        with pytest.raises(triton.InferenceServerException, match="where the server is started"):
            client.load_model("two", config='{"backend": "python"}')


def test_what_never_fits_is_a_mistake_when_the_server_starts() -> None:
    with pytest.raises(Mistake, match="'tiny' needs 101 B"):
        serve({"tiny": spec(memory=101)}, ServerConfig(port=0, memory=100))
