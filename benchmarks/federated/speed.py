"""Clients per second of a simulated federated round: shoestring beside a plain loop, pfl 0.6.0 and Flower 1.41.

    python benchmarks/federated/speed.py --peers /tmp/peers/bin/python

Every contestant is a process of its own, on the same cores, one thread each, with the same clients. They take turns, a round each, several
times over, because machines are noisy; the median of each one's turns counts, and its best turn stands beside it.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speed_models import CASES

HERE = Path(__file__).parent
NAMES = {"loop": "plain loop", "engine": "shoestring, engine", "round": "shoestring, round", "pfl": "pfl 0.6.0", "flower": "Flower 1.41"}


class Contestant:
    def __init__(self, name: str, case: str, cores: int, interpreter: str) -> None:
        self.name, self.case, self.cores = name, case, cores
        command = [interpreter, str(HERE / "speed_contestant.py"), name, case, str(cores)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)
        self.seconds: list[float] = []

    def told(self) -> Any:
        """The next line that is ours: peers print things, too."""
        assert self.process.stdout is not None, "it was opened"
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise SystemExit(f"{self.name} ended while {self.case} was measured: run it by itself to see why")

    def turn(self) -> None:
        assert self.process.stdin is not None, "it was opened"
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.seconds.append(float(self.told()))

    def close(self) -> None:
        assert self.process.stdin is not None, "it was opened"
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measured(case: str, names: Sequence[str], cores: int, turns: int, peers: str) -> list[dict[str, Any]]:
    """Of every contestant, clients per second; those on more than one core are shoestring's rounds and Flower's."""
    contestants = []
    for name in names:
        if name in ("pfl", "flower") and not peers:
            continue
        contestants.append(Contestant(name, case, cores, peers if name in ("pfl", "flower") else sys.executable))
        assert contestants[-1].told() == "ready", f"{name} says something else first"
    for _ in range(turns):
        for one in contestants:
            one.turn()
    for one in contestants:
        one.close()
    clients = CASES[case].clients
    return [{"case": case, "contestant": one.name, "cores": cores, "clients_per_second": clients / statistics.median(one.seconds),
             "best": clients / min(one.seconds)} for one in contestants]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table, each beside the plain loop on one core."""
    loops = {row["case"]: row for row in rows if row["contestant"] == "loop"}
    lines = ["| model | contestant | cores | clients/s | x the loop | best turns |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        loop = loops[row["case"]]
        lines.append(f"| {row['case']} | {NAMES[row['contestant']]} | {row['cores']} | {row['clients_per_second']:.0f} | "
                     f"{row['clients_per_second'] / loop['clients_per_second']:.2f} | {row['best'] / loop['best']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="an interpreter that has pfl and Flower; without it they are left out")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="one, and as many as the rounds on several are to have")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in given.cases:
        for cores in given.cores:
            names = ("loop", "engine", "round", "pfl", "flower") if cores == 1 else ("round", "flower")
            rows += measured(case, names, cores, given.turns, given.peers)
    print(json.dumps(rows, indent=1))
    print(markdown(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
