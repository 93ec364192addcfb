"""The rounds of a federation, simulated, in the way that was found for its devices, until that way is found to be wrong.

Ways are tried before the first round, on a few devices; what no trial can know is compared with the plain loop in some rounds (cohort/).
A round in which something differs is played again by the plain loop, whole, and so are all rounds after it: which chunk found out, in
which process, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoestring.federated.prepare import Prepared, parts_of
from shoestring.federated.round import Played, ServerState, play
from shoestring.federated.simulation.cohort import Differs, plainly
from shoestring.federated.simulation.simulate import SimulatedDevices, States
from shoestring.federated.technique import FederatedTechnique


@dataclass
class Simulation:
    given: Prepared
    techniques: Sequence[FederatedTechnique]
    states: States = field(default_factory=dict)  # what techniques keep on devices
    warn: Callable[[str], None] = lambda text: None
    plainly: str = ""  # why the plain loop works instead of the way that was planned; empty: it does not

    def __post_init__(self) -> None:
        self.parts = parts_of(self.given, self.techniques)
        self.devices: SimulatedDevices | None = None

    def play(
        self,
        server: ServerState,
        judges: bool = False,
        strict: bool = True,
        heard: Callable[[int, int], None] = lambda done, given: None,
    ) -> Played:
        before, differs = dict(self.states), ""
        try:
            return play(self.parts, server, self.working(), self.given.population, judges, strict, heard)
        except Differs as why:
            differs = str(why)
        self.states.clear()
        self.states.update(before)
        self.work_plainly(differs)
        self.warn(
            f"devices work one after the other from round {server.round + 1} on, which is slower: {differs}"
            + "; of the rounds before, some were compared and no difference was found" * bool(server.round)
        )
        return play(self.parts, server, self.working(), self.given.population, judges, strict, heard)

    def working(self) -> SimulatedDevices:
        """The devices; they are there from the first round on."""
        if self.devices is None:
            self.devices = self.given.devices(self.parts, self.states)
        return self.devices

    def work_plainly(self, why: str) -> None:
        """From now on, by the plain loop."""
        self.close()
        self.plainly, self.given = why, replace(self.given, how=plainly(self.given.how, why))
        self.parts, self.devices = parts_of(self.given, self.techniques), None

    def close(self) -> None:
        if self.devices is not None:
            self.devices.close()
