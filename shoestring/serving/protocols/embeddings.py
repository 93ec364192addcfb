"""`/v1/embeddings` as OpenAI's clients ask it, for jobs whose `answer` to a text is a vector, or has one as "embedding".

https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoestring.serving.protocols.front import Front
from shoestring.serving.protocols.http.asked import AskedFor
from shoestring.serving.protocols.http.refusals import RefusedRequest, wrong
from shoestring.serving.protocols.http.strict_json import checked_object, value_text
from shoestring.serving.sample import Sample, Tensors

KNOWN = ("input", "model", "encoding_format", "dimensions", "user")


async def embeddings(front: Front, body: Any, asked: AskedFor) -> dict[str, Any]:
    found = checked_object(body, "body", KNOWN)
    model = found.get("model")
    if not isinstance(model, str) or model not in front.repository.specs:
        raise RefusedRequest(
            404, f"no model is called {value_text(model)}; there are: {', '.join(front.repository.specs)}", "model"
        )
    texts = read_texts(found.get("input"), front.config.most_rows)
    form = found.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", f"give float or base64, not {value_text(form)}")
    size = found.get("dimensions")
    if size is not None and (type(size) is not int or size < 1):
        raise wrong("dimensions", f"it must be a whole number above 0, and is {value_text(size)}")
    encoder, signature, positions = front.encoder(model), await front.signature(model), [0]

    async def compute(samples: Sequence[Sample]) -> list[Tensors]:
        positions[0] += sum(one.length for one in samples)
        return await front.answers(model, samples, asked)

    answers = await asyncio.gather(
        *(encoder.answer(one, signature, compute) for one in texts), return_exceptions=True
    )  # all of them end before one's error is told
    for one in answers:
        if isinstance(one, BaseException):
            raise one
    data = [
        {"object": "embedding", "index": place, "embedding": encode_vector(vector_of(one, size), form)}
        for place, one in enumerate(answers)
    ]
    usage = {"prompt_tokens": positions[0], "total_tokens": positions[0]}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def read_texts(given: Any, most: int) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise wrong(
            "input", "give a text or a list of texts; numbers of tokens are not taken, because tokenizers differ"
        )
    if len(texts) > most:
        raise wrong("input", f"{len(texts):,} texts in one request: give at most {most:,}")
    if not all(texts):
        raise wrong("input", "a text is empty")
    return texts


def vector_of(answer: Any, size: int | None) -> Tensor:
    """The vector in a job's answer, cut and made as long as 1 if fewer dimensions are wanted."""
    if isinstance(answer, dict):
        answer = answer.get("embedding")
    try:
        vector = torch.as_tensor(answer, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        vector = torch.empty(0)
    if vector.ndim == 2 and vector.shape[0] == 1:
        vector = vector[0]
    if vector.ndim != 1 or not len(vector):
        raise RefusedRequest(
            400, "the job's answer is no vector: let it return a tensor, a list or {'embedding': ...}", "model"
        )
    if not bool(torch.isfinite(vector).all()):
        raise RefusedRequest(500, "the embedding has NaN or infinity")
    if size is None:
        return vector
    if size > len(vector):
        raise wrong("dimensions", f"the model gives {len(vector)}, and {size} are asked for")
    return torch.nn.functional.normalize(vector[:size], dim=0)


def encode_vector(vector: Tensor, form: str) -> Any:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.contiguous().numpy().astype("<f4").tobytes()).decode()
