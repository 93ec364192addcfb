"""A line of progress at least every ten seconds, for logs, where no line can move."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST = 9.0  # longest time without a line, in seconds
LOOKS = 0.5  # seconds between two looks at the clock; the sum is below ten

SAYING = threading.Lock()
# Held while a process is forked: otherwise the child could inherit a standard stream whose lock is held by a thread
# that it does not have
os.register_at_fork(before=SAYING.acquire, after_in_parent=SAYING.release, after_in_child=SAYING.release)


class Ticker:
    """Prints what is being done, and for how long, if nothing was printed for a while. Code that prints must notify it."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock = say, clock
        self.doing = ""  # what is being done; empty: nothing to say
        self.since = self.last = clock()  # when that began, and when something was last printed
        self.lock = SAYING  # two threads print

    def begin(self, doing: str) -> None:
        """Something else is being done from now on."""
        with self.lock:
            self.doing, self.since = doing, self.clock()

    def update(self, doing: str) -> None:
        """The same thing continues, further on."""
        with self.lock:
            self.doing = doing

    def note_line(self) -> None:
        self.last = self.clock()

    @property
    def due(self) -> bool:
        return self.clock() - self.last >= LONGEST

    def tick(self) -> None:
        """Print what is being done, if nothing was printed for long."""
        from shoestring.core.units import about

        with self.lock:
            if self.doing and self.due:
                self.say(f"{self.doing}, {about(self.clock() - self.since)} so far …")
                self.note_line()

    @contextmanager
    def running(self, wanted: bool = True) -> Iterator[None]:
        """While inside, a thread watches the clock, if `wanted`."""
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
