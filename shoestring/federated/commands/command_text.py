"""Terminal output of `shoestring federate`."""

from __future__ import annotations

import sys

from shoestring.show.output import screen as screen_of
from shoestring.show.ticker import Ticker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.federated.events import RoundFinished
    from shoestring.federated.planning.prepare import Prepared
    from shoestring.federated.planning.verify import FederatedVerdict
    from shoestring.federated.room import FederatedOutcome
    from shoestring.runs.events.event import Event, Stepped
    from shoestring.show.moving_line import MovingLine
    from shoestring.show.terminal import Screen

VERDICTS = {True: "kept", False: "NOT KEPT", None: "nothing is promised"}


def federation_text(outcome: FederatedOutcome, given: Prepared, screen: Screen) -> str:
    """The plan, its alternatives, and how devices are simulated."""
    from shoestring.federated.quantities import FEDERATED
    from shoestring.federated.room import ERROR
    from shoestring.show.outcome import outcome_text
    from shoestring.show.terminal import plain

    told = [
        *(f"note: {said}" for said in notes_on_privacy(given)),
        f"{given.population.count:,} clients, {given.population.per_round:,} a round, {given.rounds:,} rounds; "
        f"{given.layout.trained_count:,} weights are sent each way",
        *[statistics_text(given)] * bool(given.layout.statistics.size),
        f"devices: {given.how.kind}, {given.how.chunk} at once in {given.processes} process{'es' * (given.processes > 1)}: "
        f"{given.how.why}",
    ]
    return outcome_text(outcome, (*FEDERATED, ERROR), screen, map(plain, told))


def statistics_text(given: Prepared) -> str:
    """What happens to the running statistics of norm layers."""
    from shoestring.core.clients.statistics import StatisticsRule

    count, private = given.layout.statistics.size, given.asked.epsilon is not None
    told = {
        StatisticsRule.AVERAGED: f"averaged: they are sent beside the weights as they are, {4 * count:,} bytes",
        StatisticsRule.LOCAL: "local: every device keeps its own, and the common model's stay as it began",
        StatisticsRule.FROZEN: "frozen: norm layers use those that the model begins with",
    }[given.statistics]
    return f"{count:,} statistics of norm layers are {told}" + ", because epsilon does not cover them" * private


def notes_on_privacy(given: Prepared) -> list[str]:
    from shoestring.federated.techniques.private.release import NOT_PRIVATE, check_delta_for

    return [
        *filter(None, [check_delta_for(given.asked.delta, given.population.count)]),
        *[NOT_PRIVATE] * (given.asked.insecure_seed is not None),
    ]


class RoundShower:
    """Shows the events of a federation while it runs."""

    def __init__(self, call: Call, line: MovingLine, rounds: int, epsilon: float | None) -> None:
        self.call, self.line, self.rounds, self.epsilon = call, line, rounds, epsilon
        self.ticker = Ticker(line.say)  # reports each round that takes long
        self.playing = 0  # the present round
        self.step: Stepped | None = None
        self.seconds: list[float] = []
        self.metrics: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        from shoestring.federated.events import RoundFinished
        from shoestring.runs.events.event import Begun, Stepped, Validated, Warned

        if isinstance(event, Stepped):
            self.step = event
            self.seconds.append(event.seconds)
        elif isinstance(event, RoundFinished):
            self.on_round(event)
        elif isinstance(event, Validated):
            self.metrics = dict(event.metrics)
        elif isinstance(event, Warned):
            self.line.say(f"warning: {event.text}")
        elif isinstance(event, Begun) and event.step and not self.call.json:
            self.line.say(f"going on after round {event.step} of {event.steps}: {event.how}")

    def on_progress(self, number: int, done: int, given: int) -> None:
        """Progress within a round: a line in a log if it takes long, or the moving line."""
        text = f"round {number} of {self.rounds}, {done} of {given} devices are done"
        if number != self.playing:
            self.playing = number
            self.ticker.begin(text)
        self.ticker.update(text)
        if self.line.moves and self.ticker.due and not self.call.json:
            self.ticker.note_line()
            self.line.show(self.ticker.doing)

    def on_round(self, event: RoundFinished) -> None:
        due = self.ticker.due
        if (self.call.json and not due) or not (
            self.line.moves or event.step % 10 in (0, 1) or event.step == self.rounds or due
        ):
            return
        self.ticker.note_line()
        assert self.step is not None, "a round is told of after its step"
        self.line.show(self.text(event, self.step)[: (screen_of(sys.stderr).width or 100_000) - 1])

    def text(self, event: RoundFinished, step: Stepped) -> str:
        from shoestring.core.units import about, bytes_text
        from shoestring.show.terminal import bar, number_text

        parts = [f"{bar(event.step / self.rounds, 12)} {event.step}/{self.rounds}", f"loss {step.loss:.3f}"]
        parts += [
            f"held out: {', '.join(f'{name} {number_text(value)}' for name, value in self.metrics.items())}"
        ] * bool(self.metrics)
        parts += [
            f"{event.participants} devices"
            + (f", {event.missing} missing" if event.missing else "")
            + (f", {len(event.rejected)} rejected" if event.rejected else "")
        ]
        parts += [f"{bytes_text(event.up)} up"]
        if event.epsilon is not None:
            parts.append(
                f"epsilon {event.epsilon:.3g}"
                + (f" of {self.epsilon:g}" if self.epsilon else "")
                + (f" ({event.epsilon_in_all:.3g} in all)" if event.epsilon_in_all is not None else "")
            )
        parts.append(f"about {about((self.rounds - event.step) * sum(self.seconds) / len(self.seconds))} left")
        return "  ".join(parts)


def report_text(report: Mapping[str, Any], screen: Screen) -> str:
    """Predicted and measured figures, and the results."""
    from shoestring.core.units import bytes_text
    from shoestring.federated.quantities import FEDERATED
    from shoestring.planning.quantities import compare_figures
    from shoestring.show.terminal import beside, number_text

    lines = ["", beside(compare_figures(report["predicted"], report["measured"], quantities=FEDERATED), screen), ""]
    if report["metrics"]:
        last = report["metrics"][-1]
        found = ", ".join(
            f"{name} {number_text(value)}" for name, value in last.items() if name not in ("step", "epoch")
        )
        lines.append(f"held out, after round {last['step']}: {found}")
    for when in ("before", "after"):
        if report[when]:
            last = report[when][-1]
            found = ", ".join(f"{name} {number_text(value)}" for name, value in last.items() if name != "round")
            lines.append(f"devices on what they hold out, {when} their own work, round {last['round']}: {found}")
    if report["ended"] != "rounds":
        lines.append(f"ended after {report['rounds']} rounds: {report['ended']}")
    away, turned = sum(report["missing"]), sum(report["rejected"])
    lines += [f"{away} answers were missing, {turned} updates were rejected"] * bool(away or turned)
    lines += [f"  round {one['round']}, {one['name']}: {one['why']}" for one in report["turned_away"][-3:]]
    spent = f"; epsilon {report['epsilon']:.4g} spent" if report["epsilon"] is not None else ""
    spent += (
        f", {report['epsilon_in_all']:.4g} by all runs on the ledger"
        if report.get("epsilon_in_all") is not None
        else ""
    )
    lines += ["NOT PRIVATE: the noise followed from --insecure-seed, so this epsilon means nothing"] * (
        report.get("private") is False
    )
    lines.append(f"{bytes_text(report['bytes_up'])} up and {bytes_text(report['bytes_down'])} down in all{spent}")
    losses = [loss for loss in report["losses"] if loss is not None]  # a round without participants has no loss
    lines.append(
        (f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {report['rounds']} rounds, " if losses else "")
        + f"{report['clients_per_second'] or 0:.0f} clients/s; weights {report['weights_sha256'][:12]}"
    )
    return "\n".join([*lines, *([report["shown"]] if report["shown"] else [])])


def verdict_text(found: FederatedVerdict, screen: Screen) -> str:
    from shoestring.show.terminal import table

    rows = [["", "largest difference", "stated", "verdict"]]
    rows += [[one.what, f"{one.difference:.2g}", one.stated.word, VERDICTS[one.kept]] for one in found.verdicts]
    losses = [f"  {plain:.6f}  {ours:.6f}" for plain, ours in found.losses]
    note = f"after {found.rounds} rounds; a difference is a share of the way that the weights went"
    return "\n".join([table(rows, right=(1,), screen=screen), "", note, "losses, plain and planned:", *losses])
