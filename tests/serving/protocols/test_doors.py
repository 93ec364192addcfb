"""The doors besides the protocol's: a job's own answer, embeddings, metrics, the page and its document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoestring.serving.protocols.encoders import LOOKED_AT, SHORT
from tests.serving import tiny
from tests.serving.serving import Served, serving
from tests.serving.tiny import spec
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec(2.0, answer=tiny.answer)}) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0, timeout=HUNG
    ) as found:
        yield found


GOOD = {"total": 12.0, "first": 4.0, "embedding": [2.0, 4.0]}


def test_a_job_answers_text_or_json(served: Served) -> None:
    assert served.ask("/answer", {"text": "1 2"}).json == GOOD
    assert served.ask("/answer/tiny", "1 2").json == GOOD, "a function of one argument takes a value"
    assert served.ask("/answer", b"1 2", Content_Type="text/plain; charset=utf-8").json == GOOD
    assert served.ask("/answer", b'{"text": "1 2"}', Content_Type="application/x-www-form-urlencoded").json == GOOD
    assert served.ask("/answer", {"text": "1 2", "scale": 2}).json["total"] == 24.0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "text: it is missing"),
        ({"txt": "1"}, 400, "txt: there is no such field; there are: text, scale"),
        ({"text": 5}, 400, "text: it must be str, and is 5"),
        ({"text": "1", "scale": "2"}, 400, "scale: it must be float"),
        ({"text": "one"}, 400, "can't use this request: ValueError: could not convert"),
        ({"text": "1", "scale": 1e300}, 500, "can't be written as JSON"),
        (b"\x00", 400, "text: it must be str, and is bytes"),
        ({"text": str(tiny.REFUSED)}, 400, "IndexError: index out of range"),
        ({"text": ""}, 400, "x is empty: a sample needs at least one position"),
    ],
)
def test_what_a_job_can_not_answer_is_named(served: Served, body: Any, status: int, said: str) -> None:
    kind = {"Content-Type": "application/octet-stream"} if isinstance(body, bytes) else {}
    found = served.ask("/answer", body, **kind)
    assert found.status == status and said in found.json["error"], found.body


def test_short_steps_move_from_the_thread_into_the_event_loop_and_long_ones_back(served: Served) -> None:
    assert served.server.front is not None
    encoder, now = served.server.front.encoder("tiny"), [0.0]
    seconds = [SHORT / 2]

    def clock() -> float:
        now[0] += seconds[0]
        return now[0]

    encoder.clock = clock
    for _ in range(LOOKED_AT):
        assert served.ask("/answer", {"text": "1 2"}).json == GOOD
    before = encoder.in_threads
    assert served.ask("/answer", {"text": "1 2"}).json == GOOD and encoder.in_threads == before
    seconds[0] = 3 * SHORT
    for _ in range(LOOKED_AT):
        served.ask("/answer", {"text": "1 2"})
    assert encoder.in_threads > before


def test_openai_s_client_gets_embeddings(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="tiny", input=["1 2", "3 4 5"])  # asks for base64
    assert [one.embedding for one in found.data] == [[2.0, 4.0], [6.0, 8.0, 10.0]]
    assert found.usage.prompt_tokens > 5 and [one.index for one in found.data] == [0, 1]
    one = client.embeddings.create(model="tiny", input="3 4 5", encoding_format="float", dimensions=2).data[0].embedding
    assert one == pytest.approx([0.6, 0.8])
    assert [one.id for one in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"model": "other", "input": "1"}, openai.NotFoundError, "no model is called"),
        ({"model": "tiny", "input": []}, openai.BadRequestError, "input: give a text"),
        ({"model": "tiny", "input": ["1", ""]}, openai.BadRequestError, "input: a text is empty"),
        ({"model": "tiny", "input": [[1, 2]]}, openai.BadRequestError, "numbers of tokens are not taken"),
        ({"model": "tiny", "input": "1", "dimensions": 9}, openai.BadRequestError, "dimensions: the model gives 1"),
        ({"model": "tiny", "input": "one"}, openai.BadRequestError, "can't use this request"),
    ],
)
def test_openai_s_client_hears_what_is_wrong(
    client: openai.OpenAI, asked: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        client.embeddings.create(**asked)


def test_metrics_are_what_prometheus_reads(served: Served) -> None:
    served.ask("/answer", {"text": "1 2"})
    served.ask("/answer", {})
    lines = served.ask("/metrics").body.decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values['shoestring_requests_total{model="tiny",door="answer",status="200"}'] >= 1
    assert values['shoestring_requests_total{model="tiny",door="answer",status="400"}'] >= 1
    assert values['shoestring_replicas{model="tiny"}'] == 1 and values['shoestring_queue_length{model="tiny"}'] == 0
    for name in ("request_seconds", "batch_tokens"):
        buckets = [value for key, value in values.items() if key.startswith(f'shoestring_{name}_bucket{{model="tiny"')]
        assert buckets == sorted(buckets) and buckets[-1] == values[f'shoestring_{name}_count{{model="tiny"}}'] > 0
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) == 8


def test_the_page_carries_strict_headers_and_what_it_runs_is_named_in_them(served: Served) -> None:
    found = served.ask("/")
    policy = found.headers["content-security-policy"]
    assert found.status == 200 and "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert b"unsafe-inline" not in found.body and found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["date"].endswith("GMT") and served.ask("/healthz").json == {"live": True}


@pytest.mark.slow
def test_whatever_the_document_allows_is_answered_as_it_says(served: Served) -> None:
    document = served.ask("/openapi.json").json
    schema = schemathesis.openapi.from_dict(document)
    operations = [one.ok() for one in schema.get_all_operations()]
    assert {one.path for one in operations} >= {"/v2/models/tiny/infer", "/answer/tiny", "/v1/embeddings"}
    for operation in operations:
        asked = settings(max_examples=15)(given(case=operation.as_strategy())(ask))
        asked(base_url=f"http://127.0.0.1:{served.port}")


def ask(case: Any, base_url: str) -> None:
    case.call_and_validate(
        base_url=base_url,
        checks=[not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance],
        timeout=HUNG,
    )
