"""Events of a played round, and warnings about losses that do not fall. Devices of a private round are never named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoestring.core.files.codec import finite_json
from shoestring.federated.events import RoundFinished
from shoestring.federated.playing.play import RoundResult
from shoestring.federated.round import Sums, Tensors
from shoestring.measure.process import status
from shoestring.runs.events.event import Event, Stepped, Warned

NAMED_IN_TEXT = 3
NAMED = 20  # most missing devices per round whose names are noted
# Suffixes of keys in the server's state: a technique's simulated time, and rounds in which it made no update
CLOCK, SKIPPED = ".clock", ".skipped"


def events_of_round(
    played: RoundResult, before: Tensors, seconds: float, spent: Mapping[str, float] | None
) -> list[Event]:
    """`before`: the server's state before the round; `spent`: epsilon spent by a private run, None: not private."""
    number, clocks = played.server.round, increased_counters(before, played.server.state, CLOCK)
    simulated = max(clocks.values(), default=played.seconds)
    named, figures = spent is None, spent or {}
    finished = RoundFinished(
        step=number,
        participants=len(played.participants),
        samples=played.samples if named else 0.0,  # a sum of record counts may reveal who took part
        up=played.up,
        senders=played.senders,
        down=played.down,
        ordered=played.ordered,
        missing=len(played.missing),
        missing_names=played.missing[:NAMED] if named else (),
        rejected=tuple((one.name if named else "", one.why) for one in played.rejected),
        epsilon=figures.get("epsilon"),
        epsilon_in_all=figures.get("epsilon_in_all"),
        before=means(played.before) or None,
        after=means(played.after) or None,
        simulated=simulated if simulated not in (0.0, 1.0) else None,
    )
    stepped = Stepped(number, played.loss, seconds, status("VmRSS"), status("VmHWM"))
    return [
        stepped,
        finished,
        *map(Warned, round_warnings(played, named, increased_counters(before, played.server.state, SKIPPED))),
    ]


def round_warnings(played: RoundResult, named: bool, skipped: Mapping[str, float]) -> list[str]:
    """`named`: devices may be named; `skipped`: techniques that made no update in this round."""
    number, found = played.server.round, []
    if played.restored:
        found.append(
            f"in round {number} the work of {len(played.restored)} devices was not finite"
            f"{f' ({some_of(played.restored)})' * named}: what they keep is that of before the round"
        )
    if played.rare:
        found.append(
            f"in round {number} too few devices measured {played.rare} metric{'s' * (played.rare > 1)}, which may be named after "
            f"a record: left out"
        )
    if played.without_loss:
        found.append(
            f"in round {number} the loss of {played.without_loss} device{'s' * (played.without_loss > 1)} was not finite (a batch "
            f"may have had no target): their updates are finite and were used, and the round's loss is that of the others"
        )
    if not played.participants:
        found.append(
            f"nobody's update is in round {number}: {len(played.missing)} devices did not answer, "
            f"{len(played.rejected)} could not be used; the weights stay as they were" + ", but for noise" * (not named)
        )
    return found + [
        f"round {number} moved no weights: too few devices answered for {rule}; choose more a round, or let it expect "
        f"fewer malicious ones"
        for rule in skipped
    ]


def stagnation_warning(losses: Sequence[float]) -> str:
    """A warning if losses did not fall; empty if they did, or if there are too few rounds to tell.

    >>> stagnation_warning([2.0, 2.1, 2.2, 2.3, 2.2, 2.4]), stagnation_warning([2.0, 2.1, 1.0]), stagnation_warning([1.0, 2.0])
    ('the loss did not fall: 2.05 in the first 2 rounds, 2.3 in the last 2', '', '')
    """
    third = len(losses) // 3
    first, last = sum(losses[:third]) / max(third, 1), sum(losses[len(losses) - third :]) / max(third, 1)
    return f"the loss did not fall: {first:.3g} in the first {third} rounds, {last:.3g} in the last {third}" * bool(
        third and last >= first
    )


def increased_counters(before: Tensors, after: Tensors, word: str) -> dict[str, float]:
    """Counters of techniques with this suffix that increased in a round, and by how much."""
    found = {
        name.removesuffix(word): float(value) - float(before.get(name, torch.zeros(())))
        for name, value in after.items()
        if name.endswith(word)
    }
    return {name: by for name, by in found.items() if by}


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_IN_TEXT]) + ", …" * (len(names) > NAMED_IN_TEXT)


def means(sums: Sums) -> dict[str, float | None]:
    """Means of metrics; None: NaN or infinite."""
    found: dict[str, float | None] = finite_json(
        {name: total / weight for name, (total, weight) in sums.items() if weight}
    )
    return found
