"""Schedules of a pipeline: who does what when, as pure functions of the number of workers and pieces.

A model is cut into *chunks*, one after the other; with V chunks each, worker w of S holds the chunks w, w + S, w + 2 S, ... A batch goes
through them in *pieces*. An order is what every worker does, one action after the other; data that an action needs are waited for.

    naive        one piece after the other, through all chunks and back: one worker computes at a time (plain model parallelism)
    gpipe        all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965)
    1f1b         a forward and a backward in turn, so that worker w holds at most S - w pieces (Narayanan et al. 2019, PipeDream-flush)
    interleaved  1f1b with several chunks a worker: less idle time, more sent (Narayanan et al. 2021, arXiv 2104.04473)
    zero-bubble  1f1b whose backward is in two halves, of which the second fills idle time (Qi et al. 2023, arXiv 2401.10241, ZB-H1)
    pipedream    1f1b that never drains between batches; weights move after every piece (Narayanan et al. 2019). Its order is that
                 of 1f1b over all pieces that are ever computed: give the pieces of all batches at once, or go on with the next batch's
                 forwards where the last ones of this batch would be missing. A piece meets weights that are `staleness` updates old.

In every schedule each chunk does its backwards, and so adds its gradients, in the order of the pieces: the first piece first. The GPipe
paper goes backwards from the last piece instead, which takes as long and holds as much; in our order all schedules that are exact
add the same numbers in the same order, and end with the same bits.

What crosses a cut is taken in the order in which it was sent. So is all that one worker sends to another, with one exception: of two
workers that interleave, one sends the other both what comes out of its forwards and its gradients, and these overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from itertools import accumulate, pairwise

from shoestring.core.actions import HALVES, Action, ActionSpan, Kind, Timeline
from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")


Orders = tuple[tuple[Action, ...], ...]  # of every worker


def orders(schedule: str, stages: int, pieces: int, chunks: int = 1) -> Orders:
    """What each of the workers does, in order. `stages` is the number of workers, `chunks` how many chunks of the model each one holds.

    >>> print(*(" ".join(f"{one.kind}{one.piece}" for one in own) for own in orders("1f1b", 2, 3)), sep="; ")
    F0 F1 B0 F2 B1 B2; F0 B0 F1 B1 F2 B2
    """
    checked(schedule, stages, pieces, chunks)
    return tuple(tuple(one_worker(schedule, worker, stages, pieces, chunks)) for worker in range(stages))


def checked(schedule: str, stages: int, pieces: int, chunks: int) -> None:
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


def one_worker(schedule: str, worker: int, stages: int, pieces: int, chunks: int) -> Iterator[Action]:
    later = stages - 1 - worker  # workers behind this one
    if schedule == "zero-bubble":
        return split_backwards(worker, later, pieces)
    if schedule == "interleaved" and chunks > 1:
        return interleaved(worker, stages, pieces, chunks)
    ahead = {"naive": 0, "gpipe": pieces - 1}.get(schedule, later)
    return in_turn([(piece, worker) for piece in range(pieces)], [(piece, worker) for piece in range(pieces)], ahead)


def in_slices(orders: Orders, slices: int) -> Orders:
    """The same with every piece in so many slices of its sequences, which count as pieces: slice j of piece i is piece i x slices + j.

    A piece's slices run forward in order and backward in reverse, because what later ones leave as gradients of keys and values goes into
    the backward of earlier ones. So slices of one piece are never backward and forward in turn, as 1f1b would have pieces; those of
    different pieces may be. A backward in two halves would need both halves of all later slices: it is refused.

    >>> print(*(" ".join(f"{one.kind}{one.piece}" for one in own) for own in in_slices(orders("1f1b", 2, 2), 2)), sep="; ")
    F0 F1 F2 F3 B1 B0 B3 B2; F0 F1 B1 B0 F2 F3 B3 B2
    """
    if slices > 1 and any(action.kind in HALVES for own in orders for action in own):
        raise Mistake("slices of a sequence can't go backward in two halves: use schedule='gpipe' or '1f1b'")
    numbers = {Kind.FORWARD: range(slices)}
    return tuple(
        tuple(
            Action(action.kind, action.piece * slices + number, action.chunk)
            for action in own
            for number in numbers.get(action.kind, range(slices)[::-1])
        )
        for own in orders
    )


def in_turn(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], ahead: int) -> Iterator[Action]:
    """So many forwards ahead, then one forward and one backward in turn, then the backwards that are left; each of a (piece, chunk)."""
    for place, what in enumerate(forwards):
        yield Action(Kind.FORWARD, *what)
        if place >= ahead:
            yield Action(Kind.BACKWARD, *backwards[place - ahead])
    for what in backwards[max(0, len(forwards) - ahead) :]:
        yield Action(Kind.BACKWARD, *what)


def split_backwards(worker: int, later: int, pieces: int) -> Iterator[Action]:
    """ZB-H1: the order of 1f1b, where the backward to weights comes `worker` pieces after that to inputs: a worker further down the
    line, which has fewer forwards ahead, keeps more of them for the time when the line drains. So each worker holds at most as many
    pieces as the first one of 1f1b does, counted until the backward to weights is done."""
    for place in range(pieces + later):
        if place < pieces:
            yield Action(Kind.FORWARD, place, worker)
        if place >= later:
            yield Action(Kind.INPUTS, place - later, worker)
            if place - later >= worker:
                yield Action(Kind.WEIGHTS, place - later - worker, worker)
    for piece in range(max(0, pieces - worker), pieces):
        yield Action(Kind.WEIGHTS, piece, worker)


def interleaved(worker: int, stages: int, pieces: int, chunks: int) -> Iterator[Action]:
    """A round of pieces goes through the worker's first chunk, then through its second, and so on, before the next round begins."""
    rounds = rounds_of(stages, pieces)
    held = range(worker, stages * chunks, stages)
    forwards = [(piece, chunk) for one in rounds for chunk in held for piece in one]
    backwards = [(piece, chunk) for one in rounds for chunk in reversed(held) for piece in one]
    return in_turn(forwards, backwards, ahead_interleaved(worker, stages, pieces, chunks))


def rounds_of(stages: int, pieces: int) -> list[range]:
    """Pieces in rounds of `stages`, as the paper has them. Where that does not divide them, rounds are longer, the first ones by most:
    were a later one longer than the first, the last worker would wait for a piece that is behind it in its own order.

    >>> rounds_of(4, 8), rounds_of(4, 11), rounds_of(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    count = max(1, pieces // stages)
    least, longer = divmod(pieces, count)
    ends = [least * place + min(place, longer) for place in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def ahead_interleaved(worker: int, stages: int, pieces: int, chunks: int) -> int:
    return min((chunks - 1) * len(rounds_of(stages, pieces)[0]) + 2 * (stages - 1 - worker), pieces * chunks)


def timed(orders: Orders, seconds: Callable[[Action], float], sending: float = 0.0) -> Timeline:
    """When everything happens: an action begins when its worker is free and what it needs has come. What another worker computed takes
    `sending` seconds to come, while both go on computing. ValueError for orders in which somebody waits for ever."""
    ended: dict[Action, tuple[float, int]] = {}  # and by whom
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    for worker, action, needed in doable(orders):
        came = [end + (sending if owner != worker else 0.0) for end, owner in map(ended.__getitem__, needed)]
        begin = max([*came, spans[worker][-1].end if spans[worker] else 0.0])
        spans[worker].append(ActionSpan(action, begin, begin + seconds(action)))
        ended[action] = spans[worker][-1].end, worker
    return tuple(map(tuple, spans))


def doable(orders: Orders) -> Iterator[tuple[int, Action, list[Action]]]:
    """All that is done, each worker's in its order and nothing before what it needs: who does it, what, and what it needs. ValueError for
    orders in which somebody waits for ever."""
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
def unread(orders: Orders) -> int:
    """How many messages over one cut must be under way at once so that nobody waits for ever: with fewer, whoever sends waits for somebody
    who waits for him. One, but for interleaved orders whose rounds are uneven.

    >>> unread(orders("1f1b", 4, 8)), unread(orders("interleaved", 2, 5, chunks=2))
    (1, 2)
    """
    most = max((len(own) for own in orders), default=1)
    return next((count for count in range(1, most + 1) if all_end(orders, count)), 1)


def all_end(orders: Orders, unread: int) -> bool:
    """Whether all get to the end, where a message over a cut can only be sent when at most `unread` - 1 before it have yet to be taken. It
    is taken when its receiver begins the action that needs it."""
    last = max((action.chunk for own in orders for action in own), default=0)
    done = [0] * len(orders)
    sent: dict[tuple[bool, int], list[int]] = {}  # pieces, in order, by (whether forward, chunk that receives)
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
    """The actions whose results this one takes; `last` is the model's last chunk, `known` what is done at all."""
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
    """What every worker waits for that is not done with its order."""
    for worker, own in enumerate(orders):
        for action in [one for one in own if one not in ended][:1]:
            missing = next(one for one in needs(action, last, owner) if one not in ended)
            whose = f"worker {owner[missing]} has yet to do" if missing in owner else "nobody does"
            yield f"worker {worker} can't do {named(action)} before {named(missing)}, which {whose}"


def named(action: Action) -> str:
    return f"{action.kind}{action.piece} of chunk {action.chunk}"


def held(orders: Orders) -> tuple[int, ...]:
    """The most (piece, chunk)s whose activations each worker holds at once: from the forward until the backward, or until that to weights.

    >>> held(orders("1f1b", 3, 8)), held(orders("gpipe", 3, 8))
    ((3, 2, 1), (8, 8, 8))
    """
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: -1, Kind.INPUTS: 0}
    return tuple(max(accumulate((change[action.kind] for action in own), initial=0)) for own in orders)


def held_at_most(schedule: str, stages: int, pieces: int, chunks: int = 1) -> tuple[int, ...]:
    """What `held` finds, by formula, for who does not want to write the orders down."""
    checked(schedule, stages, pieces, chunks)
    if schedule == "interleaved" and chunks > 1:
        return tuple(
            min(ahead_interleaved(worker, stages, pieces, chunks) + 1, pieces * chunks) for worker in range(stages)
        )
    same = {"naive": 1, "gpipe": pieces, "zero-bubble": min(stages, pieces)}
    return tuple(same.get(schedule, min(stages - worker, pieces)) for worker in range(stages))


def bubble(schedule: str, stages: int, pieces: int, chunks: int = 1) -> float:
    """The share of time in which a worker is idle, where all chunks take as long, a backward takes twice its forward (each half of it as
    long as the forward) and sending takes no time. With S workers, M pieces and V chunks a worker:

        naive          1 - 1/S                  one worker computes at a time
        gpipe, 1f1b    (S-1) / (M + S-1)        GPipe, section 2; PipeDream-flush has the same (Megatron, arXiv 2104.04473, section 2.2)
        interleaved    (S-1) / (V M + S-1)      the same paper: idle time is 1/V of it, computing as much as before
        zero-bubble    (S-1) / (3 M + S-1)      ZB-H1 is idle for (S-1) (F + I - W) (arXiv 2401.10241, section 2): a third of 1f1b
        pipedream      0                        once the line is full; it fills only once in a training

    The papers have at least as many pieces as workers; with fewer the last two forms are too small, as the line is never full. What is
    computed here holds for any number (tests play the orders).
    """
    checked(schedule, stages, pieces, chunks)
    if schedule in ("naive", "pipedream"):
        return 1 - 1 / stages if schedule == "naive" else 0.0
    if schedule == "zero-bubble":
        busy, whole = 3 * pieces, 2 * pieces + max(pieces, stages) + stages - 1
    else:
        busy, whole = chunks * pieces, chunks * max(pieces, stages) + min(pieces, stages) - 1
    return 1 - busy / whole


def staleness(stages: int, stage: int) -> int:
    """In pipedream: how many updates the weights of a stage have moved between the forward and the backward of a piece, once the line is
    full. The backward therefore uses weights that were kept from the forward. With vertical sync, where a piece meets everywhere the
    version that it met at the first stage, it is `stages - 1` at every stage."""
    return stages - 1 - stage
