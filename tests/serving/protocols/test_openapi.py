"""Whatever the OpenAPI document allows is answered as it says: schemathesis asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving import tiny
from tests.serving.serving import Served, serving
from tests.serving.tiny import spec
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec(2.0, answer=tiny.answer)}) as found:
        yield found


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
