"""Terminal output while a run trains."""

from __future__ import annotations

from contextlib import contextmanager

from shoestring.show.moving_line import MovingLine
from shoestring.show.output import screen
from shoestring.show.ticker import Ticker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.runs.events.event import Event, Stepped
    from shoestring.runs.resume import OpenedRun
    from shoestring.show.terminal import ProgressLine


@contextmanager
def telling(call: Call, clock: Callable[[], float] | None = None) -> Iterator[Callable[[str, float | None], None]]:
    """While inside, report what planning is doing, for how long, and how long it took the last time. In a log, every
    ten seconds."""
    import time

    now = clock or time.monotonic
    line, begun = MovingLine(), now()
    ticker = Ticker(line.remind, now)

    def doing(what: str, expected: float | None) -> None:
        from shoestring.core.units import about

        ticker.begin(f"planning: {what}")
        if call.json and not line.moves:
            return
        so_far = now() - begun
        of = f" of about {about(expected)}" if expected and so_far < expected else " so far"
        passed = f", {about(so_far)}{of}" if so_far > 1 else f", about {about(expected)}" if expected else ""
        text = f"planning{passed}: {what} …"  # the time first, because the end may be cut
        line.remind(text)
        ticker.note_line()

    try:
        with ticker.running(clock is None):
            yield doing
    finally:
        line.clear()


class Shower:
    """Shows the events of a run. Earlier events of a resumed run are in its folder."""

    def __init__(self, call: Call, line: MovingLine, job: Job, held: OpenedRun, ticker: Ticker) -> None:
        from shoestring.runs.events.history import History

        self.ticker = ticker
        ticker.begin("training: making the model")

        history = History().read(held.folder.path)
        self.call, self.line, self.budget, self.job = call, line, held.request.memory, job
        self.steps = job.steps if not job.epochs else 0  # total; 0: unknown
        self.seconds = list(history.steps.seconds)
        self.validations = [(one.step, one.seconds) for one in history.validated]
        self.metrics = dict(history.validated[-1].metrics) if history.validated else {}
        self.rounds = list(history.steps.epoch)  # completed epochs after every step
        self.told: ProgressLine | None = None  # the data of the progress line
        self.together = 1  # batches that come at once

    def __call__(self, event: Event) -> None:
        from dataclasses import replace

        from shoestring.runs.events.event import Begun, Died, Reformed, Stepped, Validated, Warned

        if isinstance(event, (Begun, Stepped)):
            self.ticker.begin(f"training, after step {event.step}" if event.step else "training: the first step")
        if isinstance(event, Stepped):
            self.on_step(event)
        elif isinstance(event, Validated):
            self.validations.append((event.step, event.seconds))
            self.metrics = dict(event.metrics)
            if self.told is not None and self.line.moves:
                self.show(replace(self.told, metrics=self.metrics))
            elif not self.call.json:
                self.line.say(validation_text(event.step, event.metrics, event.best))
        elif isinstance(event, Warned):
            self.line.say(f"warning: {event.text}")
        elif isinstance(event, (Died, Reformed)):
            self.say(event.text)
        elif isinstance(event, Begun):
            self.steps, self.together = event.steps, event.together
            del (
                self.seconds[event.step :],
                self.rounds[event.step :],
            )  # steps after the last checkpoint are done again
            self.validations = [one for one in self.validations if one[0] <= event.step]
            if event.step:
                of = f" of {event.steps}" if event.steps else ""
                self.say(f"going on after step {event.step}{of}: {event.how}")

    def say(self, text: str) -> None:
        if self.line.moves or not self.call.json:
            self.line.say(text)

    def on_step(self, event: Stepped) -> None:
        """Update the line after every step. On a pipe, print a line every ten steps or every hundredth of the run,
        whichever is rarer, and for a step that ends ten seconds after the last line."""
        from shoestring.runs.events.time_left import time_left
        from shoestring.show.terminal import ProgressLine

        self.seconds.append(event.seconds)
        epoch = self.rounds[-1] + 1 if self.rounds else 1
        self.rounds.append(event.epoch)
        due, every = self.ticker.due, max(10, self.steps // 100)
        if (self.call.json and not due) or not (
            self.line.moves or event.step % every in (0, 1) or event.step == self.steps or due
        ):
            return
        self.show(
            ProgressLine(
                event.step,
                self.steps,
                event.loss,
                event.most,
                self.budget,
                time_left(event.step, self.steps, self.seconds, self.validations, self.together),
                epoch if self.job.epochs or epoch > 1 else 0,
                self.job.epochs,
                event.rate,
                self.metrics,
            )
        )

    def show(self, told: ProgressLine) -> None:
        from shoestring.show.terminal import progress

        self.told = told
        self.line.show(progress(told, screen(self.line.stream)))
        self.ticker.note_line()


def validation_text(step: int, metrics: Mapping[str, float | None], best: bool) -> str:
    """The result of a validation in one line."""
    from shoestring.show.terminal import number_text

    found = ", ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
    return f"held out, after step {step}: {found}{' (the best so far)' if best else ''}"
