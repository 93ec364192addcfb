"""Runs a job's `answer`: makes samples of a request, hands it the outputs, gets the answer.

Where a step of it (a tokenizer) is short, it runs in the event loop; else in a thread, so that nobody waits for an image that is
decoded. Which, is measured: steps begin in the thread, and move when the median of the last ones is small.

One step runs at a time, because what jobs use (tokenizers of Hugging Face among them) may not be called by two threads at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any

from shoestring.core.errors import Mistake, error_sentence
from shoestring.core.user_code.seams import calls_user
from shoestring.serving.protocols.http.refusals import RefusedRequest, wrong
from shoestring.serving.protocols.http.strict_json import value_text
from shoestring.serving.protocols.samples import as_output, sample_of
from shoestring.serving.sample import Sample, Signature, Tensors

SHORT = 0.001  # seconds: a request waits no longer for another one's step in the event loop
LOOKED_AT = 16  # steps
OF_REQUEST = (ValueError, TypeError, KeyError, IndexError, OSError)  # what an encoder raises for what it can't read
KINDS: Mapping[Any, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "bytes": (bytes,),
}
Compute = Callable[[Sequence[Sample]], Awaitable[list[Tensors]]]


@dataclass
class EncodingTimes:
    """The last steps' seconds, and what follows."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))

    @property
    def are_short(self) -> bool:
        """
        >>> times = EncodingTimes()
        >>> for _ in range(16): times.last.append(0.0002)
        >>> times.are_short
        True
        """
        return len(self.last) == LOOKED_AT and median(self.last) <= SHORT


class AnswerEncoder:
    def __init__(self, function: Callable[..., Any], clock: Callable[[], float]) -> None:
        self.function, self.clock = function, clock
        self.times, self.turn = EncodingTimes(), Lock()
        self.thread: ThreadPoolExecutor | None = None
        self.in_threads = 0  # steps that ran in the thread

    def arguments(self, given: Any) -> dict[str, Any]:
        """The arguments of a request: the fields of an object, or one value for a function of one argument."""
        parameters = inspect.signature(self.function).parameters
        names = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        if not isinstance(given, dict):
            if not names or len(needed) > 1:
                raise wrong("", f"the body must be an object with {', '.join(names)}, and is {said_or_bytes(given)}")
            given = {(needed or names)[0]: given}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for name in given:
            if name not in names and not takes_any:
                raise wrong(str(name)[:100], f"there is no such field; there are: {', '.join(names)}")
        for name in needed:
            if name not in given:
                raise wrong(name, "it is missing")
        for name, value in given.items():
            self.check_kind(name, value, parameters)
        return dict(given)

    def check_kind(self, name: str, value: Any, parameters: Mapping[str, inspect.Parameter]) -> None:
        kind = parameters[name].annotation if name in parameters else None
        kind = getattr(kind, "__name__", kind)
        if kind in KINDS and (type(value) not in KINDS[kind]):
            raise wrong(name, f"it must be {kind}, and is {said_or_bytes(value)}")

    async def answer(self, given: Any, signature: Signature, compute: Compute) -> Any:
        """The job's answer to a request."""
        generator = self.function(**self.arguments(given))
        outputs: Any = None
        first = True
        while True:
            try:
                ended, value = await self.step(generator, outputs, signature)
            except Mistake as error:
                raise RefusedRequest(500, f"the job's answer failed: {error}") from error
            except Exception as error:
                status = 400 if first and isinstance(error, OF_REQUEST) else 500
                text = "can't use this request" if status == 400 else "failed"
                raise RefusedRequest(status, f"the job's answer {text}: {error_sentence(error)}") from error
            if ended:
                return value
            first = False
            samples, is_list = value
            computed = [as_output(one) for one in await compute(samples)]
            outputs = computed if is_list else computed[0]

    async def step(self, generator: Any, outputs: Any, signature: Signature) -> tuple[bool, Any]:
        """Run the generator to its next sample or its end, here or in the thread."""
        if self.times.are_short and self.turn.acquire(blocking=False):
            try:
                return self.advance_timed(generator, outputs, signature)
            finally:
                self.turn.release()
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, "encoder")
        self.in_threads += 1
        return await asyncio.get_running_loop().run_in_executor(
            self.thread, self.in_turn, generator, outputs, signature
        )

    def in_turn(self, generator: Any, outputs: Any, signature: Signature) -> tuple[bool, Any]:
        with self.turn:
            return self.advance_timed(generator, outputs, signature)

    def advance_timed(self, generator: Any, outputs: Any, signature: Signature) -> tuple[bool, Any]:
        begun = self.clock()
        try:
            return advance(generator, outputs, signature)
        finally:
            self.times.last.append(self.clock() - begun)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)


def said_or_bytes(value: Any) -> str:
    return "bytes" if isinstance(value, bytes) else value_text(value)


@calls_user("answer")
def advance(generator: Generator[Any, Any, Any], outputs: Any, signature: Signature) -> tuple[bool, Any]:
    """(True, the answer), or (False, (samples, whether they came as a list))."""
    try:
        found = generator.send(outputs)
    except StopIteration as end:
        return True, end.value
    if isinstance(found, list):
        return False, ([sample_of(one, signature) for one in found], True)
    return False, ([sample_of(found, signature)], False)
