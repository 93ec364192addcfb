"""What server optimizers share: moments in the server's state, and a step computed from them and the combined update.

A round without any update (its combined weight is 0) makes no step: weights and moments stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.round import Combined, Round, ServerState

Moments = Mapping[str, Tensor]  # (size) each, named by the paper's letter
Step = Callable[[Tensor, Moments], tuple[Tensor, Moments]]  # combined update (size), moments -> step, moments after it


def with_server_optimizer(round: Round, name: str, step: Step, start: Callable[[Tensor], Moments]) -> Round:
    """The round with a server optimizer; `start` makes its initial moments from the weights."""

    def initial(server: ServerState) -> ServerState:
        made = round.initial(server)
        return replace(made, state={**made.state, **named_moments(start(made.weights))})

    def advance(server: ServerState, combined: Combined) -> ServerState:
        if not combined.weight:
            return round.advance(server, combined)
        before = {letter: server.state[f"{name}.{letter}"] for letter in start(server.weights[:0])}
        moved, after = step(combined.update, before)
        return round.advance(server, replace(combined, update=moved, state={**combined.state, **named_moments(after)}))

    def named_moments(moments: Moments) -> dict[str, Tensor]:
        return {f"{name}.{letter}": value for letter, value in moments.items()}

    return round.with_(initial=initial, advance=advance)


def check_rates(name: str, **rates: float) -> None:
    for knob, value in rates.items():
        if not 0.0 < value < float("inf"):
            raise Mistake(f"{name}({knob}={value}): give a finite number above 0")
