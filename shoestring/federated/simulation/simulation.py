"""Simulates a federation's rounds by a fast method, and falls back to the plain loop if the method turns out to be
wrong.

The method was tried on a few devices before the first round. A trial can't show everything, so some rounds compare
devices with the plain loop (cohort/). If something differs, the plain loop plays the whole round again, and all later
rounds. So the result does not depend on which chunk or process noticed the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoestring.federated.planning.prepare import Prepared, parts_of
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.round import ServerState
from shoestring.federated.simulation.cohort import MethodDiffers, sequential_choice
from shoestring.federated.simulation.simulated_devices import SimulatedDevices, States
from shoestring.federated.technique import FederatedTechnique


@dataclass
class Simulation:
    given: Prepared
    techniques: Sequence[FederatedTechnique]
    states: States = field(default_factory=dict)  # the devices' state
    warn: Callable[[str], None] = lambda text: None
    fallback_reason: str = ""  # why the plain loop replaced the planned method; empty if it did not

    def __post_init__(self) -> None:
        self.parts = parts_of(self.given, self.techniques)
        self.devices: SimulatedDevices | None = None

    def play(
        self,
        server: ServerState,
        judges: bool = False,
        strict: bool = True,
        on_answer: Callable[[int, int], None] = lambda done, given: None,
    ) -> RoundResult:
        before, differs = dict(self.states), ""
        try:
            return play(
                self.parts,
                server,
                self.ensure_devices(),
                self.given.population,
                judges=judges,
                strict=strict,
                on_answer=on_answer,
            )
        except MethodDiffers as why:
            differs = self.given.may_tell(str(why))
        self.states.clear()
        self.states.update(before)
        self.fall_back(differs)
        self.warn(
            f"devices work one after the other from round {server.round + 1} on, which is slower: {differs}"
            + "; of the rounds before, some were compared and no difference was found" * bool(server.round)
        )
        return play(
            self.parts,
            server,
            self.ensure_devices(),
            self.given.population,
            judges=judges,
            strict=strict,
            on_answer=on_answer,
        )

    def ensure_devices(self) -> SimulatedDevices:
        """The simulated devices, made on first use."""
        if self.devices is None:
            self.devices = self.given.devices(self.parts, self.states)
        return self.devices

    def fall_back(self, why: str) -> None:
        """Use the plain loop from now on."""
        self.close()
        self.fallback_reason, self.given = why, replace(self.given, how=sequential_choice(self.given.how, why))
        self.parts, self.devices = parts_of(self.given, self.techniques), None

    def close(self) -> None:
        if self.devices is not None:
            self.devices.close()
