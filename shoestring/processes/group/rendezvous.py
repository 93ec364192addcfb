"""The rendezvous of launchers on several machines: who takes part in a round of training, and in which order.

Node 0 hosts a store and alone decides. Every node sends a heartbeat twice a second, writes which round it is ready for,
and waits for node 0 to announce it. A round ends as soon as a node is ready for the next one, because one of its
workers died, or when a node falls silent.

    node 0   forming 1 ......... round 1: 0 1 2          forming 2 ... round 2: 0 2
    node 1         wants 1 ...^                   x (no more beats)
    node 2   wants 1 .........^                     wants 2 .........^

This is a rendezvous handler for torch's elastic agent. Torch's own orders machines by name, polls once a second, and
does not notice a machine that is gone (pytorch issues 67742, 111646, 147064); a group with a fixed leader needs less.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import from_json, to_json
from shoestring.core.units import seconds_text
from shoestring.processes.group.round import Invitation
from shoestring.processes.group.store import connect_store, give_up_after, host_store, torchrun_key, torchrun_store
from shoestring.processes.messages import NONSENSE, Closing, Message, message_text, read_message
from shoestring.processes.nodes import Nodes

BEAT = 0.5  # seconds between heartbeats
SILENT = 3.0  # seconds without a heartbeat after which nobody waits for a machine when the group re-forms
COME = 300.0  # seconds within which every machine must have arrived
PAUSE = 0.05


class Closed(Exception):
    """Node 0 ended the group; the closing says how."""

    def __init__(self, closing: Closing) -> None:
        super().__init__(closing.failure)
        self.closing = closing


class Rendezvous(RendezvousHandler):
    def __init__(self, nodes: Nodes = Nodes(), come: float = COME) -> None:
        self.nodes, self.come = nodes, come  # `come`: seconds within which every machine must have arrived
        self.round = -1  # the present round; -1 before the first
        self.members: list[int] = []  # machines that take part in it
        self.pausing = False  # the round will end with a checkpoint, to let other machines in
        self.leaving = False  # nobody is waited for any more
        self.heard = 0  # number of messages read from other machines
        self.beats: dict[int, tuple[int, float]] = {}  # per node: its last heartbeat, and when it was first seen
        self.over = threading.Event()  # set to stop the heartbeats
        if nodes.rank == 0:
            self.store, self.port = host_store(nodes)
            if nodes.torchrun:
                torchrun_store(nodes, come).set(torchrun_key(nodes), str(self.port))
        else:
            self.port = int(torchrun_store(nodes, come).get(torchrun_key(nodes))) if nodes.torchrun else nodes.port
            self.store = connect_store(nodes.host, self.port, nodes, come)
            give_up_after(max(self.patience, SILENT), self.port)
            self.check_rank_is_free()
        self.beating = threading.Thread(target=self.beat, daemon=True)
        if nodes.of > 1:
            self.beating.start()

    # Methods that torch's agent calls

    def next_rendezvous(self) -> RendezvousInfo:
        self.pausing = False
        if not self.leads:
            give_up_after(max(self.patience, SILENT), self.port)
        with self.leader_may_be_gone():
            self.gather() if self.leads else self.join()
        return RendezvousInfo(
            PrefixStore(f"round/{self.round}", self.store),
            self.members.index(self.nodes.rank),
            len(self.members),
            RendezvousStoreInfo(self.nodes.host, self.port),
        )

    def num_nodes_waiting(self) -> int:
        """How many reasons there are to end this round at once and form another."""
        with self.leader_may_be_gone():
            if self.nodes.of == 1 or self.paused:
                return 0
            if not self.leads:
                return int(self.number("forming") > self.round)
            return sum(
                self.wants(node) > self.round or self.silence(node) > max(self.patience, SILENT)
                for node in self.members[1:]
            )

    def get_backend(self) -> str:
        return "shoestring"

    def get_run_id(self) -> str:
        return "shoestring"

    def is_closed(self) -> bool:
        return self.store.check(["closed"])

    def set_closed(self) -> None:
        self.close(Closing())

    def shutdown(self) -> bool:
        return True

    @property
    def use_agent_store(self) -> bool:
        return True

    # Rounds

    patience = 30.0  # seconds without a heartbeat after which a machine in a running round is given up

    @property
    def leads(self) -> bool:
        return self.nodes.rank == 0

    @property
    def newcomers(self) -> list[int]:
        """Machines that are present but not in this round."""
        if not self.leads or self.nodes.of == 1:
            return []
        return [
            node
            for node in range(1, self.nodes.of)
            if node not in self.members and self.wants(node) > self.round and self.silence(node) < SILENT
        ]

    def gather(self) -> None:
        """Node 0: wait for all machines at first, and later for all that are still present."""
        number, until = self.round + 1, time.monotonic() + self.come
        self.store.set("forming", str(number))
        while True:
            missing = [node for node in range(1, self.nodes.of) if self.wants(node) < number]
            if not missing or (self.round >= 0 and all(self.silence(node) > SILENT for node in missing)):
                break
            if time.monotonic() > until:
                if self.round >= 0:
                    break
                raise Mistake(
                    f"node {missing[0]} of {self.nodes.of} did not come to {self.nodes.host}:{self.port} within "
                    f"{seconds_text(self.come)}: give the same command there, with --nodes "
                    f"{self.nodes.host}:{self.port},{missing[0]}/{self.nodes.of}"
                )
            if self.round < 0 and self.store.check(["refused"]):
                raise Mistake(self.store.get("refused").decode())
            self.check_closed()
            time.sleep(PAUSE)
        self.round, self.members = number, [node for node in range(self.nodes.of) if node not in missing]
        self.store.set("round", json.dumps([self.round, self.members]))

    def join(self) -> None:
        """Other nodes: be ready for the next round until node 0 announces one with this node in it."""
        wanted = -1
        while True:
            number, members = self.announcement()
            if number > self.round and self.nodes.rank in members and number >= wanted >= 0:
                self.round, self.members = number, members
                return
            if max(number, self.round) + 1 > wanted:
                wanted = max(number, self.round) + 1
                self.store.set(f"wants/{self.nodes.rank}", str(wanted))
            self.check_closed()
            if self.silence(0) > max(self.patience, SILENT):
                raise Mistake(self.leader_gone())
            time.sleep(PAUSE)

    def pause(self) -> None:
        """Node 0: this round will end, and another follows."""
        self.pausing = True
        self.store.set("pausing", str(self.round))

    @property
    def paused(self) -> bool:
        return self.nodes.of > 1 and (self.pausing if self.leads else self.number("pausing") == self.round)

    def announcement(self) -> tuple[int, list[int]]:
        number, members = json.loads(self.store.get("round")) if self.store.check(["round"]) else (-1, [])
        return number, members

    def check_closed(self) -> None:
        if self.leaving:
            raise Closed(Closing(stopped=0))
        if self.store.check(["closed"]):
            raise Closed(from_json(Closing, json.loads(self.store.get("closed"))))

    def wants(self, node: int) -> int:
        return self.number(f"wants/{node}")

    def number(self, name: str) -> int:
        return int(self.store.get(name)) if self.store.check([name]) else -1

    # Messages

    def tell(self, message: Message) -> None:
        """Send node 0 a message."""
        with self.leader_may_be_gone():
            number = self.store.add("told", 1)
            self.store.set(f"news/{number}", message_text(message))

    def news(self) -> Iterator[Message]:
        """Node 0: new messages from the others."""
        while self.leads and self.nodes.of > 1 and self.store.check([f"news/{self.heard + 1}"]):
            self.heard += 1
            yield read_message(self.store.get(f"news/{self.heard}"))

    def invite(self, invitation: Invitation) -> None:
        """Node 0: tell the others what to do."""
        self.store.set("invitation", json.dumps(to_json(invitation)))

    def invitation(self) -> Invitation:
        """The invitation from node 0, once it is there: node 0 may still be planning."""
        with self.leader_may_be_gone():
            while not self.store.check(["invitation"]):
                self.check_closed()
                if self.silence(0) > max(self.patience, SILENT):
                    raise Mistake(self.leader_gone())
                time.sleep(PAUSE)
            try:
                return from_json(Invitation, json.loads(self.store.get("invitation")))
            except NONSENSE as error:
                raise Mistake(
                    f"what node 0 says is no invitation of this version ({error}): use the same shoestring everywhere"
                ) from error

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.leads and not self.over.is_set():
            with suppress(RuntimeError):
                self.store.set("refused", str(error))  # node 0 reports it, if it still waits for this machine
        self.close(Closing(failure=f"node 0 ended: {error}"))

    def close(self, closing: Closing) -> None:
        """Node 0: announce the end and its reason, and stay until the others have read it."""
        with suppress(RuntimeError):
            if self.leads and not self.over.is_set():
                self.store.set("closed", json.dumps(to_json(closing)))
                until = time.monotonic() + SILENT
                while any(
                    self.silence(node) < 3 * BEAT and not self.store.check([f"bye/{node}"])
                    for node in range(1, self.nodes.of)
                ):
                    if time.monotonic() > until:
                        break
                    time.sleep(PAUSE)
            elif not self.leads:
                self.store.set(f"bye/{self.nodes.rank}", "")
        self.over.set()
        if self.beating.is_alive():
            self.beating.join(SILENT)

    # Heartbeats

    def beat(self) -> None:
        with suppress(RuntimeError):  # node 0 is gone: whoever waits for it will say so
            own = TCPStore(self.nodes.host, self.port, is_master=False, timeout=timedelta(seconds=self.come))
            while not self.over.wait(BEAT):
                own.add(f"beat/{self.nodes.rank}", 1)

    def silence(self, node: int) -> float:
        """Seconds since a node's last heartbeat."""
        now, last = time.monotonic(), self.store.add(f"beat/{node}", 0)
        if self.beats.get(node, (-1, 0.0))[0] != last:
            self.beats[node] = (last, now)
        return now - self.beats[node][1]

    def check_rank_is_free(self) -> None:
        """Refuse to start if a node of this rank is present already."""
        rank = self.nodes.rank
        before = self.store.add(f"beat/{rank}", 0)
        if before:
            time.sleep(2.5 * BEAT)
            if self.store.add(f"beat/{rank}", 0) != before and not self.store.check([f"bye/{rank}"]):
                raise Mistake(
                    f"there is a {self.nodes} at {self.nodes.host}:{self.port} already: every machine has a number of its own, "
                    f"--nodes {self.nodes.host}:{self.port},0/{self.nodes.of} to {self.nodes.of - 1}/{self.nodes.of}"
                )

    @contextmanager
    def leader_may_be_gone(self) -> Iterator[None]:
        """If the store can't be reached any more, node 0 is gone."""
        try:
            yield
        except RuntimeError as error:
            raise Mistake(self.leader_gone()) from error

    def leader_gone(self) -> str:
        return (
            f"node 0 at {self.nodes.host}:{self.port}, which leads the group, is gone: start it again there, and this machine "
            f"with the same command; the run goes on from its last checkpoint"
        )
