"""Clients per second of a simulated federated round: shoestring beside a plain loop, pfl 0.6.0 and Flower 1.41.

    python benchmarks/federated/speed.py --peers /tmp/peers/bin/python

Every contestant is a process of its own, on the same cores, one thread each, with the same clients. They take turns, a round each, several
times over, because machines are noisy; the median of each one's turns counts, and its best turn stands beside it. A model is measured in
one go, and kept in speed.json: `--cases cnn` measures that one anew.
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
from tables import inserted, machine

HERE = Path(__file__).parent
KEPT = HERE / "speed.json"
NAMES = {
    "loop": "plain loop",
    "engine": "shoestring, engine",
    "round": "shoestring, round",
    "pfl": "pfl 0.6.0",
    "flower": "Flower 1.41",
}


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


# Flower's are apart, with a loop of their own: it leaves processes at work between its turns
GROUPS = (
    (("loop", 1), ("engine", 1), ("round", 1), ("pfl", 1), ("round", 2)),
    (("loop", 1), ("flower", 1), ("flower", 2)),
)


def measured(case: str, group: Sequence[tuple[str, int]], turns: int, peers: str) -> list[dict[str, Any]]:
    """Of every contestant on so many cores, clients per second, and how many times those of the group's loop they are."""
    contestants = []
    for name, cores in group:
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
    loop = contestants[0].seconds
    return [
        {
            "case": case,
            "contestant": one.name,
            "cores": one.cores,
            "clients_per_second": clients / statistics.median(one.seconds),
            "times": statistics.median(loop) / statistics.median(one.seconds),
            "best": min(loop) / min(one.seconds),
        }
        for one in contestants
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table, each beside the plain loop on one core."""
    lines = ["| model | contestant | cores | clients/s | x the loop | best turns |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row['case']} | {NAMES[row['contestant']]} | {row['cores']} | {row['clients_per_second']:.0f} | "
            f"{row['times']:.2f} | {row['best']:.2f} |"
        )
    return "\n".join(lines)


def ratios(rows: Sequence[dict[str, Any]]) -> str:
    """What was asked for, beside what was found: whole rounds, as users run them."""
    found = {(row["case"], row["contestant"], row["cores"]): row["times"] for row in rows}
    lines = ["| asked | found |", "|---|---|"]
    for case, other, least in (
        ("mlp", "loop", 6),
        ("mlp", "pfl", 7),
        ("mlp200", "loop", 6),
        ("mlp200", "pfl", 7),
        ("mlp200e5", "loop", 6),
        ("mlp200e5", "pfl", 7),
        ("cnn", "loop", 2),
        ("transformer", "loop", 1.5),
    ):
        if (case, "round", 1) in found and (case, other, 1) in found:
            lines.append(
                f"| {case}, one core: {least} times {NAMES[other]} | {found[case, 'round', 1] / found[case, other, 1]:.2f} |"
            )
    for case in dict.fromkeys(row["case"] for row in rows):
        if (case, "round", 2) in found:
            lines.append(
                f"| {case}, two cores: 1.8 times one | {found[case, 'round', 2] / found[case, 'round', 1]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", default="", help="an interpreter that has pfl and Flower; without it they are left out"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in given.cases:
        rows = [
            row
            for group in (GROUPS if given.peers else GROUPS[:1])
            for row in measured(case, group, given.turns, given.peers)
        ]
        kept[case] = {"rows": rows, "turns": given.turns, "machine": machine()}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    found = [row for case in CASES if case in kept for row in kept[case]["rows"]]
    where = " or ".join(dict.fromkeys(f"{one['turns']} turns each on {one['machine']}" for one in kept.values()))
    text = f"\n{markdown(found)}\n\n{ratios(found)}\nMedians of {where}.\n"
    inserted(
        HERE / "README.md", "speed", "python benchmarks/federated/speed.py --peers PYTHON_WITH_PFL_AND_FLOWER", text
    )


if __name__ == "__main__":
    main()
