"""Pipeline schedules: who does what when, as pure functions of the number of workers and micro-batches.

A model is cut into consecutive *chunks*; with V chunks each, worker w of S holds the chunks w, w + S, w + 2 S, ... A
batch passes through them in micro-batches (`pieces`). An order lists each worker's actions; a worker waits until the
data for its next action are there.

    naive        one micro-batch after the other, through all chunks and back: one worker computes at a time (model parallelism)
    gpipe        all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965)
    1f1b         forward and backward alternate, so worker w holds at most S - w micro-batches (Narayanan et al. 2019, PipeDream-flush)
    interleaved  1f1b with several chunks per worker: less idle time, more sent (Narayanan et al. 2021, arXiv 2104.04473)
    zero-bubble  1f1b with each backward in two halves, the second of which fills idle time (Qi et al. 2023, arXiv 2401.10241, ZB-H1)
    pipedream    1f1b that never drains between batches; weights are updated after every micro-batch (Narayanan et al. 2019). Its order
                 is that of 1f1b over all micro-batches of the run: give those of all batches at once, or continue with the next
                 batch's forwards in place of this batch's missing ones. A micro-batch meets weights `staleness` updates old.

In every schedule each chunk runs its backwards, and so sums its gradients, in the order of the micro-batches. The GPipe
paper runs the last micro-batch's backward first, which takes the same time and memory; with our order all exact
schedules add the same numbers in the same order, and end with the same bits.

Messages over one cut are received in the order in which they were sent. So are all messages from one worker to another,
except between two workers of an interleaved schedule: one sends the other both outputs of its forwards and gradients,
and these overtake each other.

Contract: In every schedule a chunk adds its gradients in the order of the pieces
(tests/training/pipeline/test_schedule.py). What is sent is held until as many messages over the same cut followed as
`unread` says.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.workers.actions import HALVES, Action, ActionSpan, Kind, Timeline

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")


Orders = tuple[tuple[Action, ...], ...]  # of every worker
Step = tuple[Kind, int, int]  # kind, piece and chunk of an action: a ranking plays too many to make objects of them


def orders(schedule: str, stages: int, pieces: int, chunks: int = 1) -> Orders:
    """The actions of each worker, in order. `stages` is the number of workers, `chunks` the number of chunks on each.

    >>> print(*(" ".join(f"{one.kind}{one.piece}" for one in own) for own in orders("1f1b", 2, 3)), sep="; ")
    F0 F1 B0 F2 B1 B2; F0 B0 F1 B1 F2 B2
    """
    check_schedule(schedule, stages, pieces, chunks)
    return tuple(
        tuple(Action(*step) for step in one_worker(schedule, worker, stages, pieces, chunks))
        for worker in range(stages)
    )


def check_schedule(schedule: str, stages: int, pieces: int, chunks: int) -> None:
    if schedule not in SCHEDULES:
        raise Mistake(
            f"there is no schedule {schedule!r}: a pipeline runs by {', '.join(SCHEDULES)}{did_you_mean(schedule, SCHEDULES)}"
        )
    for name, count in (("stages", stages), ("pieces", pieces), ("chunks", chunks)):
        if count < 1:
            raise Mistake(f"a pipeline with {name}={count} computes nothing: give 1 or more")
    if chunks > 1 and schedule != "interleaved":
        raise Mistake(
            f"schedule={schedule!r} has one chunk of the model on each worker, and {chunks} were asked for: only 'interleaved' "
            f"takes several; use it, or chunks=1"
        )


def one_worker(schedule: str, worker: int, stages: int, pieces: int, chunks: int) -> Iterator[Step]:
    later = stages - 1 - worker  # workers after this one
    if schedule == "zero-bubble":
        return zero_bubble_order(worker, later, pieces)
    if schedule == "interleaved" and chunks > 1:
        return interleaved_order(worker, stages, pieces, chunks)
    ahead = {"naive": 0, "gpipe": pieces - 1}.get(schedule, later)
    return in_turn([(piece, worker) for piece in range(pieces)], [(piece, worker) for piece in range(pieces)], ahead)


def in_slices(orders: Orders, slices: int) -> Orders:
    """The same schedule with every micro-batch cut into slices of its sequences: slice j of micro-batch i is number i x
    slices + j.

    Slices of a micro-batch run forward in order and backward in reverse, because the gradients of keys and values that
    later slices leave enter the backward of earlier ones. So forwards and backwards of one micro-batch's slices never
    alternate; those of different micro-batches may. A backward in two halves would need both halves of all later
    slices: it is refused.

    >>> print(*(" ".join(f"{one.kind}{one.piece}" for one in own) for own in in_slices(orders("1f1b", 2, 2), 2)), sep="; ")
    F0 F1 F2 F3 B1 B0 B3 B2; F0 F1 B1 B0 F2 F3 B3 B2
    """
    return tuple(
        tuple(
            Action(*step)
            for step in sliced_steps(((action.kind, action.piece, action.chunk) for action in own), slices)
        )
        for own in orders
    )


def sliced_steps(own: Iterable[Step], slices: int) -> Iterator[Step]:
    """One worker's steps with every micro-batch cut into slices."""
    if slices == 1:
        yield from own
        return
    forward, backward = range(slices), range(slices)[::-1]
    for kind, piece, chunk in own:
        if kind in HALVES:
            raise Mistake("slices of a sequence can't go backward in two halves: use schedule='gpipe' or '1f1b'")
        for number in forward if kind is Kind.FORWARD else backward:
            yield kind, piece * slices + number, chunk


def in_turn(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], ahead: int) -> Iterator[Step]:
    """`ahead` forwards, then alternately one forward and one backward, then the remaining backwards; each a
    (micro-batch, chunk)."""
    for place, what in enumerate(forwards):
        yield Kind.FORWARD, *what
        if place >= ahead:
            yield Kind.BACKWARD, *backwards[place - ahead]
    for what in backwards[max(0, len(forwards) - ahead) :]:
        yield Kind.BACKWARD, *what


def zero_bubble_order(worker: int, later: int, pieces: int) -> Iterator[Step]:
    """ZB-H1: the order of 1f1b, with the weight gradients of a micro-batch `worker` micro-batches after its input
    gradients. A worker nearer to the end has fewer forwards ahead and keeps more weight gradients for the time when the
    pipeline drains. So each worker holds at most as many micro-batches as 1f1b's first worker, counted until their
    weight gradients are done."""
    for place in range(pieces + later):
        if place < pieces:
            yield Kind.FORWARD, place, worker
        if place >= later:
            yield Kind.INPUTS, place - later, worker
            if place - later >= worker:
                yield Kind.WEIGHTS, place - later - worker, worker
    for piece in range(max(0, pieces - worker), pieces):
        yield Kind.WEIGHTS, piece, worker


def interleaved_order(worker: int, stages: int, pieces: int, chunks: int) -> Iterator[Step]:
    """A round of micro-batches passes through the worker's first chunk, then its second, and so on, before the next
    round begins."""
    rounds = rounds_of(stages, pieces)
    held = range(worker, stages * chunks, stages)
    forwards = [(piece, chunk) for one in rounds for chunk in held for piece in one]
    backwards = [(piece, chunk) for one in rounds for chunk in reversed(held) for piece in one]
    return in_turn(forwards, backwards, ahead_interleaved(worker, stages, pieces, chunks))


def rounds_of(stages: int, pieces: int) -> list[range]:
    """Micro-batches in rounds of `stages`, as in the paper. If that does not divide evenly, rounds are longer, the
    first ones most: if a later round were longer than the first, the last worker would wait for a micro-batch that
    comes later in its own order.

    >>> rounds_of(4, 8), rounds_of(4, 11), rounds_of(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    count = max(1, pieces // stages)
    least, longer = divmod(pieces, count)
    ends = [least * place + min(place, longer) for place in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def ahead_interleaved(worker: int, stages: int, pieces: int, chunks: int) -> int:
    return min((chunks - 1) * len(rounds_of(stages, pieces)[0]) + 2 * (stages - 1 - worker), pieces * chunks)


def timeline_of(orders: Orders, seconds: Callable[[Action], float], sending: float = 0.0) -> Timeline:
    """When everything happens: an action begins when its worker is free and its inputs have come. Another worker's
    result takes `sending` seconds to come, while both go on computing. ValueError if the orders deadlock."""
    ended: dict[Action, tuple[float, int]] = {}  # action -> time, worker
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    for worker, action, needed in doable(orders):
        came = [end + (sending if owner != worker else 0.0) for end, owner in map(ended.__getitem__, needed)]
        begin = max([*came, spans[worker][-1].end if spans[worker] else 0.0])
        spans[worker].append(ActionSpan(action, begin, begin + seconds(action)))
        ended[action] = spans[worker][-1].end, worker
    return tuple(map(tuple, spans))


def doable(orders: Orders) -> Iterator[tuple[int, Action, list[Action]]]:
    """All actions, each worker's in its order and none before its inputs: (worker, action, its inputs). ValueError if
    the orders deadlock."""
    owner = {action: worker for worker, own in enumerate(orders) for action in own}
    last = max((action.chunk for action in owner), default=0)
    ended: set[Action] = set()
    places = [0] * len(orders)
    while len(ended) < len(owner):
        before = len(ended)
        for worker, own in enumerate(orders):
            for action in own[places[worker] :]:
                needed = needs(action, last, owner)
                if not ended.issuperset(needed):
                    break
                ended.add(action)
                places[worker] += 1
                yield worker, action, needed
        if len(ended) == before:
            raise ValueError(f"these orders never end: {', and '.join(waits(orders, ended, last, owner))}")


@cache
def buffer_needed(orders: Orders) -> int:
    """Smallest message buffer per cut that avoids deadlock: 1, except for interleaved orders with uneven rounds.

    >>> buffer_needed(orders("1f1b", 4, 8)), buffer_needed(orders("interleaved", 2, 5, chunks=2))
    (1, 2)
    """
    most = max((len(own) for own in orders), default=1)
    return next((count for count in range(1, most + 1) if all_end(orders, count)), 1)


def all_end(orders: Orders, unread: int) -> bool:
    """Whether all orders finish if at most `unread` messages over a cut may be sent and not yet received. A message is
    received when its receiver begins the action that needs it."""
    last = max((action.chunk for own in orders for action in own), default=0)
    done = [0] * len(orders)
    sent: dict[tuple[bool, int], list[int]] = {}  # (is forward, receiving chunk) -> micro-batches in order
    taken: set[tuple[bool, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for worker, own in enumerate(orders):
            while done[worker] < len(own):
                action = own[done[worker]]
                if action.kind is not Kind.WEIGHTS:
                    forward = action.kind is Kind.FORWARD
                    if action.chunk != (0 if forward else last) and (forward, action.chunk, action.piece) not in taken:
                        if action.piece not in sent.get((forward, action.chunk), ()):
                            break
                        taken.add((forward, action.chunk, action.piece))
                        moved = True
                    if action.chunk != (last if forward else 0):
                        to = action.chunk + 1 if forward else action.chunk - 1
                        before = sent.setdefault((forward, to), [])
                        if sum((forward, to, piece) not in taken for piece in before) >= unread:
                            break
                        before.append(action.piece)
                done[worker] += 1
                moved = True
    return all(count == len(own) for count, own in zip(done, orders, strict=True))


def needs(action: Action, last: int, known: Container[Action]) -> list[Action]:
    """The actions whose results this one needs; `last` is the model's last chunk, `known` holds all scheduled
    actions."""
    kind, piece, chunk = action.kind, action.piece, action.chunk
    if kind is Kind.FORWARD:
        return [Action(kind, piece, chunk - 1)] if chunk else []
    if kind is Kind.WEIGHTS:
        return [Action(Kind.INPUTS, piece, chunk)]
    forward = Action(Kind.FORWARD, piece, chunk)
    if chunk == last:
        return [forward]
    behind = Action(Kind.INPUTS, piece, chunk + 1)
    return [forward, behind if behind in known else Action(Kind.BACKWARD, piece, chunk + 1)]


def waits(orders: Orders, ended: Container[Action], last: int, owner: Mapping[Action, int]) -> Iterator[str]:
    """For every unfinished worker, a sentence that says what it waits for."""
    for worker, own in enumerate(orders):
        for action in [one for one in own if one not in ended][:1]:
            missing = next(one for one in needs(action, last, owner) if one not in ended)
            whose = f"worker {owner[missing]} has yet to do" if missing in owner else "nobody does"
            yield f"worker {worker} can't do {action_text(action)} before {action_text(missing)}, which {whose}"


def action_text(action: Action) -> str:
    return f"{action.kind}{action.piece} of chunk {action.chunk}"


def activation_counts(orders: Orders) -> tuple[int, ...]:
    """The largest number of (micro-batch, chunk) pairs whose activations each worker holds at once: from the forward
    until the backward, or until its weight half.

    >>> activation_counts(orders("1f1b", 3, 8)), activation_counts(orders("gpipe", 3, 8))
    ((3, 2, 1), (8, 8, 8))
    """
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: -1, Kind.INPUTS: 0}
    return tuple(max(accumulate((change[action.kind] for action in own), initial=0)) for own in orders)


def activation_counts_by_formula(schedule: str, stages: int, pieces: int, chunks: int = 1) -> tuple[int, ...]:
    """The result of `activation_counts`, by formula, without writing the orders down."""
    check_schedule(schedule, stages, pieces, chunks)
    if schedule == "interleaved" and chunks > 1:
        return tuple(
            min(ahead_interleaved(worker, stages, pieces, chunks) + 1, pieces * chunks) for worker in range(stages)
        )
    same = {"naive": 1, "gpipe": pieces, "zero-bubble": min(stages, pieces)}
    return tuple(same.get(schedule, min(stages - worker, pieces)) for worker in range(stages))


def bubble(schedule: str, stages: int, pieces: int, chunks: int = 1) -> float:
    """The fraction of time in which a worker is idle if all chunks are equal, a backward takes twice its forward (each
    half as long as the forward) and sending takes no time. With S workers, M micro-batches and V chunks a worker:

        naive          1 - 1/S                  one worker computes at a time
        gpipe, 1f1b    (S-1) / (M + S-1)        GPipe, section 2; PipeDream-flush has the same (Megatron, arXiv 2104.04473, section 2.2)
        interleaved    (S-1) / (V M + S-1)      the same paper: 1/V of the idle time, for the same computation
        zero-bubble    (S-1) / (3 M + S-1)      ZB-H1 is idle for (S-1) (F + I - W) (arXiv 2401.10241, section 2): a third of 1f1b
        pipedream      0                        once the pipeline is full; it fills only once in a training

    The papers assume at least as many micro-batches as workers; with fewer, the last two formulas are too small because
    the pipeline is never full. The value computed here holds for any number (tests play the orders).
    """
    check_schedule(schedule, stages, pieces, chunks)
    if schedule in ("naive", "pipedream"):
        return 1 - 1 / stages if schedule == "naive" else 0.0
    if schedule == "zero-bubble":
        busy, whole = 3 * pieces, 2 * pieces + max(pieces, stages) + stages - 1
    else:
        busy, whole = chunks * pieces, chunks * max(pieces, stages) + min(pieces, stages) - 1
    return 1 - busy / whole


def staleness(stages: int, stage: int) -> int:
    """Pipedream: updates of a stage's weights between a micro-batch's forward and its backward, once the pipeline is
    full. The backward therefore uses weights kept from the forward. With vertical sync, where every stage uses the
    version that the first stage used, it is `stages - 1` at every stage."""
    return stages - 1 - stage
