"""Embeddings, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

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
