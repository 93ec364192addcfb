"""The front: what every door asks. It finds the model, waits for its answers, and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from shoestring.serving.protocols.encoders import AnswerEncoder
from shoestring.serving.protocols.http.asked import AskedFor
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.refusals import RefusedRequest, error_answer
from shoestring.serving.protocols.metrics import ServedCounts
from shoestring.serving.replicas.happenings import Happening, ServedFigures
from shoestring.serving.replicas.repository import ModelRepository
from shoestring.serving.sample import Sample, Signature, Tensors

CLIENT_GONE = 499  # nginx's status for a client that hung up before its answer
Door = Callable[[Request], Awaitable[Response]]


class Front:
    def __init__(
        self, repository: ModelRepository, config: ServerConfig, counts: ServedCounts, tell: Callable[[Happening], None]
    ) -> None:
        self.repository, self.config, self.counts, self.tell = repository, config, counts, tell
        self.loop = asyncio.get_running_loop()
        self.encoders: dict[str, AnswerEncoder] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.stopping = False

    @property
    def first(self) -> str:
        """The model of requests that name none."""
        return next(iter(self.repository.specs))

    async def answers(self, model: str, samples: Sequence[Sample], asked: AskedFor) -> list[Tensors]:
        if len(samples) > self.config.most_rows:
            raise RefusedRequest(
                413, f"{len(samples):,} samples in one request: give at most {self.config.most_rows:,}"
            )
        pool = await self.repository.pool(model)
        return await pool.answers(samples, asked.urgency, asked.within)

    async def signature(self, model: str) -> Signature:
        """What a model takes; it is loaded if that was never known."""
        if model not in self.repository.facts:
            await self.repository.pool(model)
        self.repository.spec(model)
        return self.repository.facts[model].signature

    def encoder(self, model: str) -> AnswerEncoder:
        """Runs the job's `answer` of a model."""
        function = self.repository.spec(model).answer
        if function is None:
            raise RefusedRequest(
                404,
                f"the job of {model!r} has no answer=...: ask /v2/models/{model}/infer with tensors, or add it to the Job",
            )
        found = self.encoders.get(model)
        if found is None or found.function is not function:
            found = self.encoders[model] = AnswerEncoder(function, self.loop.time)
        return found

    def with_counts(self, name: str, door: Door) -> Door:
        """A door whose requests are counted."""

        async def open_door(request: Request) -> Response:
            begun, status = self.loop.time(), 500
            try:
                response = await door(request)
                status = response.status_code
                return response
            except asyncio.CancelledError:
                status = CLIENT_GONE
                raise
            except Exception as error:
                known = error_answer(error)
                status = known.status if known else 500
                raise
            finally:
                model = request.scope.get("shoestring.model", "")
                self.counts.count_answer(model, name, status, self.loop.time() - begun)
                if self.timer is None and not self.stopping:
                    self.timer = self.loop.call_later(self.config.figures_every, self.tell_figures)

        return open_door

    def tell_figures(self) -> None:
        self.timer = None
        waiting = sum(len(one.queue) for one in self.repository.pools.values())
        figures: ServedFigures = self.counts.figures(self.config.figures_every, waiting)
        self.tell(figures)

    def stop(self) -> None:
        self.stopping = True
        if self.timer is not None:
            self.timer.cancel()
            self.tell_figures()

    def close(self) -> None:
        for one in self.encoders.values():
            one.close()
