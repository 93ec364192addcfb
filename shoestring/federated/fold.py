"""What a federated run came to so far, for its report:

asked               rounds, clients, per_round, upload, download, epsilon, delta as they were asked for; None: it was not
round               numbers of the rounds that count; of each, in columns of the same length:
participants, missing, rejected, samples, up, down, epsilon (None: nothing is private), epsilon_in_all (of all runs on the ledger;
                    None: there is no other), simulated (None: devices are all alike)
private             None: no epsilon was asked for; False: one was, and the noise followed from a seed, so it means nothing
before, after       metrics of devices on what they hold out, of the rounds in which they were asked for them:
                    [{"round": 10, "accuracy": 0.8, ...}]
away                [{"name", "rounds"}] devices that were missing most often, of those whose names were noted
turned_away         [{"round", "name", "why"}] the last updates that could not be used
bytes_up, bytes_down, missed, turned    sums over all rounds

Beside it, `comparisons`: A/B tables [{"title", "rows": [{metric, group, one, other, delta_percent, low, high, devices,
verdict}]}].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shoestring.federated.events import RoundFinished
from shoestring.runs.folder import Folder, Unusable

MOST = 20  # names that are told
COMPARISONS = "comparisons.json"  # in a run's folder: what its model was compared with
COLUMNS = ("participants", "missing", "samples", "up", "down", "epsilon", "epsilon_in_all", "simulated")


def federation(asked: Mapping[str, Any], rounds: Sequence[RoundFinished]) -> dict[str, Any]:
    away = Counter(name for one in rounds for name in one.missing_names)
    turned = [{"round": one.step, "name": name, "why": why} for one in rounds for name, why in one.rejected]
    columns = {name: [getattr(one, name) for one in rounds] for name in COLUMNS}
    return {
        "asked": dict(asked),
        "round": [one.step for one in rounds],
        **columns,
        "rejected": [len(one.rejected) for one in rounds],
        "before": [{"round": one.step, **one.before} for one in rounds if one.before],
        "after": [{"round": one.step, **one.after} for one in rounds if one.after],
        "away": [{"name": name, "rounds": count} for name, count in away.most_common(MOST)],
        "turned_away": turned[-MOST:],
        "private": private(asked),
        "bytes_up": sum(one.up for one in rounds),
        "bytes_down": sum(one.down for one in rounds),
        "missed": sum(one.missing for one in rounds),
        "turned": len(turned),
    }


def private(asked: Mapping[str, Any]) -> bool | None:
    return None if asked.get("epsilon") is None else asked.get("insecure_seed") is None


def comparisons_in(folder: Folder) -> list[Mapping[str, Any]]:
    """What a run's model was compared with; a file that can't be read is as good as none: the comparison can be made again."""
    try:
        return list(folder.read(COMPARISONS).get("comparisons", ()))
    except Unusable:
        return []
