"""A line of progress at least every ten seconds, where a log is written and no line moves."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST = 9.0  # seconds without a line
LOOKS = 0.5  # seconds between two looks at the clock: together less than ten

SAYING = threading.Lock()
# Nobody says anything while a process is forked: the new one would find the lock of a standard stream held by a thread that it has not
os.register_at_fork(before=SAYING.acquire, after_in_parent=SAYING.release, after_in_child=SAYING.release)


class Ticker:
    """Says what is being done, and for how long, when nothing was said for a while. Whoever says something tells it so."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock = say, clock
        self.doing = ""  # nothing: there is nothing to say
        self.since = self.last = clock()  # it is being done; something was said
        self.lock = SAYING  # two threads say something

    def begin(self, doing: str) -> None:
        """Something else is being done from now on."""
        with self.lock:
            self.doing, self.since = doing, self.clock()

    def update(self, doing: str) -> None:
        """The same thing is being done, further on."""
        with self.lock:
            self.doing = doing

    def said(self) -> None:
        self.last = self.clock()

    @property
    def due(self) -> bool:
        return self.clock() - self.last >= LONGEST

    def tick(self) -> None:
        """Say what is being done, if nothing was said for long."""
        from shoestring.core.units import about

        with self.lock:
            if self.doing and self.due:
                self.say(f"{self.doing}, {about(self.clock() - self.since)} so far …")
                self.said()

    @contextmanager
    def running(self, wanted: bool = True) -> Iterator[None]:
        """While inside, a thread looks at the clock, if that is `wanted`."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOKS):
                self.tick()

        thread = threading.Thread(target=look, name="shoestring ticker", daemon=True)
        if wanted:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if wanted:
                thread.join()


@contextmanager
def ticking(doing: str) -> Iterator[Ticker]:
    """While inside, a log gets a line at least every ten seconds."""
    from shoestring.show.moving_line import MovingLine

    line = MovingLine()
    ticker = Ticker(line.say)
    ticker.begin(doing)
    with ticker.running(not line.moves):
        yield ticker
