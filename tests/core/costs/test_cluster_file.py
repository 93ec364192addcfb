"""Plans on paper: for machines that somebody described."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

import shoestring
from shoestring import Mistake
from shoestring.core.costs.cluster_file import EXAMPLE, KEYS, Description
from shoestring.core.costs.hardware import Hardware, cluster
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import OverBudget
from shoestring.measure.tracker import Log, StorageEvent
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.rehearse import STEPS
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.planning.plan import load_plan
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.predict import Predictor
from tests.models import job


def described(folder: Path, **changes: object) -> Path:
    path = folder / "cluster.json"
    path.write_text(
        json.dumps({key: value for key, value in {**json.loads(EXAMPLE), **changes}.items() if value is not None})
    )
    return path


def test_a_description_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="does not say memory of the cluster"):
        cluster(described(tmp_path, memory=None), 8)
    with pytest.raises(Mistake, match="describes colour, which is nothing of a cluster"):
        cluster(described(tmp_path, colour="red"), 8)
    with pytest.raises(Mistake, match=r"describes memmory, which is nothing of a cluster; did you mean memory\?"):
        cluster(described(tmp_path, memmory="80GiB"), 8)
    with pytest.raises(Mistake, match="there is no"):
        cluster(tmp_path / "nothing.json", 8)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(Mistake, match="does not describe a cluster"):
        cluster(tmp_path / "list.json", 8)
    (tmp_path / "list.json").write_text("[" * 100_000)
    with pytest.raises(Mistake, match="does not describe a cluster"):
        cluster(tmp_path / "list.json", 8)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("flops", "many", 'says flops "many": it must be a number'),
        ("flops", True, "says flops true: it must be a number"),
        ("flops", -1, "it must be a number more than 0"),
        ("flops", float("nan"), "says flops NaN"),
        ("flops", float("inf"), "says flops Infinity"),
        ("memory", 80, "it must be bytes with their unit"),
        ("memory", "80 gigs", "it must be bytes with their unit"),
        ("link", [1], "it must be bytes per second with their unit"),
        ("devices", 2.5, "it must be a whole number of at least 1"),
        ("devices", 0, "it must be a whole number of at least 1"),
        ("latency", -1e-6, "it must be a number of at least 0"),
        ("device", "gpu", 'it must be "cpu" or "cuda"'),
        ("name", 3, "it must be text"),
        ("peak", 3e14, "it must be an object by precision"),
        ("peak", {"bf61": 3e14}, "there is no bf61; did you mean bf16?"),
        ("peak", {"bf16": "fast"}, "it must be a number"),
        ("efficiency", {"bf16": 70}, "and at most 1"),
        ("attention", 0, "it must be a number more than 0 and at most 1"),
        ("processors", "108", "it must be a whole number"),
        ("devices", 10**400, "it must be a whole number of at least 1 and at most"),
        ("flops", 10**400, "it must be a number more than 0 and at most 1e+30"),
        ("sending", 109, "says sending 109 of 108 processors"),
        *((key, 10**400, f"says {key} 1000") for key in sorted(KEYS.keys() - {"name", "device"})),
        *((key, {"a": 1}, f'says {key} {{"a": 1}}: it must be') for key in KEYS),
        ("efficiency", {"bf16": 10**400}, "and at most 1"),
        ("name", "\ud800", "it must be text of one line"),
    ],
)
def test_a_value_that_can_not_be_is_refused_with_what_it_must_be(
    tmp_path: Path, key: str, value: object, why: str
) -> None:
    with pytest.raises(Mistake, match=re.escape(why)):
        cluster(described(tmp_path, **{key: value}), 8)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(EXAMPLE.replace('{"name"', '{"memory": "8GiB", "name"'))
    with pytest.raises(Mistake, match="it says memory twice"):
        cluster(path, 8)
    path.write_text(EXAMPLE.replace('"250GB"', '"250GB/s"').replace('"1GiB"', "0"))
    assert cluster(path, 8).base == 0 and cluster(path, 8).links["8"] == cluster(described(tmp_path), 8).links["8"]


def test_every_key_is_read_and_documented() -> None:
    assert KEYS.keys() == {one.name for one in fields(Description)}
    written = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text()
    assert all(f"| `{name}` |" in written for name in KEYS)
    assert EXAMPLE in written


def test_past_one_machine_the_network_is_what_counts(tmp_path: Path) -> None:
    path = described(tmp_path)
    inside, outside = cluster(path, 8).links["8"], cluster(path, 16).links["16"]
    assert inside[0] == pytest.approx(1 / 250e9) and outside[0] == pytest.approx(1 / 25e9) and outside[1] > inside[1]
    assert outside[1] == pytest.approx(2 * 4 * 3e-5, rel=1e-3), "a library's tree of 16"


def test_cpus_add_up_in_two_levels_where_the_network_is_slow(tmp_path: Path) -> None:
    found = cluster(described(tmp_path, device="cpu"), 16).links["16"]
    two_levels = (
        2 * 7 / 8 / 250e9 + 2 * 1 / 2 / 25e9
    )  # seconds per byte that is added up, inside and between two machines
    assert found[0] * 2 * 15 / 16 == pytest.approx(two_levels, rel=1e-6)
    alone = cluster(described(tmp_path, device="cpu", devices=1), 4).links["4"]
    assert alone[0] == pytest.approx(1 / 25e9, rel=1e-6), "a ring where each is alone"


def test_a_plan_for_a_cluster_says_how_its_workers_add_up(tmp_path: Path) -> None:
    found = shoestring.plan(
        job("llama"), devices=4, use=["DataParallel()"], hardware=described(tmp_path, devices=1, device="cpu")
    ).chosen
    assert "sums of 4 workers on 4 machines: tree up to" in found.basis and "ring above" in found.basis
    assert found.details.speeds is not None and len(found.details.ranks) == 4, "each worker sends an amount of its own"
    assert (
        found.details.ranks[0].sent_bytes == found.predicted["sent_bytes"]
        and len({one.sent_bytes for one in found.details.ranks}) > 1
    )
    found.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").details.speeds == found.details.speeds, (
        "a run keeps to what its plan chose by"
    )


def test_a_plan_for_machines_that_are_not_here(tmp_path: Path) -> None:
    fast = shoestring.plan(job("llama"), devices=4, hardware=described(tmp_path))
    assert "sums of 4 workers: library" in fast.chosen.basis, "GPUs have their own"
    assert (
        fast.chosen.details.world == 4
        and fast.chosen.predicted["sent_bytes"] > 0
        and "the hardware is not here" in fast.chosen.basis
    )
    assert fast.chosen.predicted["process_bytes"] <= fast.budget.memory == int(0.9 * (80 << 30))
    slow = shoestring.plan(
        job("llama"), devices=4, use=["DataParallel()"], hardware=described(tmp_path, link="1MB", latency=0.01)
    )
    assert slow.chosen.predicted["step_seconds"] > 10 * fast.chosen.predicted["step_seconds"]
    whole, parts = (
        shoestring.plan(job("llama"), devices=4, use=[use], hardware=described(tmp_path)).chosen.predicted["peak_bytes"]
        for use in ("DataParallel()", "Shard(stage=3)")
    )
    assert parts < whole
    with pytest.raises(Mistake, match="batches of 4 samples for 512 workers"):
        shoestring.plan(job("llama"), devices=512, hardware=described(tmp_path))


def test_what_would_take_minutes_to_rehearse_for_a_cluster_is_planned_by_arithmetic(tmp_path: Path) -> None:
    log = Log(events=[StorageEvent(1, 1)] * 10_000)

    def too_long(hardware: Hardware, *techniques: Accumulate) -> bool:
        return Predictor(Rehearsals(job("llama"), hardware), Evidence(Ledger(()), log)).too_long(techniques)

    away = cluster(described(tmp_path), 8)
    assert too_long(away, Accumulate(64)) and not too_long(away, Accumulate(8)) and not too_long(away)
    assert not too_long(Hardware(), Accumulate(64)), "what is here is rehearsed"


def test_a_disk_that_is_not_described_is_not_used(tmp_path: Path) -> None:
    use = ["DataParallel()", "OffloadActivations()"]
    with pytest.raises(Mistake, match='does not say how fast a device\'s disk is: add "disk"'):
        shoestring.plan(job("llama"), devices=2, use=use, hardware=described(tmp_path))
    for disk in ("1GB", "2GB/s"):
        plan = shoestring.plan(job("llama"), devices=2, use=use, hardware=described(tmp_path, disk=disk)).chosen
        assert plan.details.disk_speed == pytest.approx(float(disk[0]) * 1e9), "as it is described"


def test_operations_and_seconds_of_a_described_device_are_those_of_one_step(tmp_path: Path) -> None:
    flops = 1e9
    planner = Planner(job("llama"), cluster(described(tmp_path, flops=flops), 1))
    ledger, log = planner.ledger(), planner.evidence.plain
    each = sum(log.flops.values()) / STEPS
    assert ledger.flops == pytest.approx(each)
    assert sum(block.forward + block.backward for block in ledger.blocks) == pytest.approx(each / flops)


def test_a_step_that_is_hopelessly_too_large_is_not_rehearsed_before_others_are_ranked(tmp_path: Path) -> None:
    machine = cluster(described(tmp_path), 2)
    for memory, times in ((1 << 20, 0), (1 << 40, 1)):
        told: list[str] = []
        planner = Planner(job("llama"), machine, devices=2, here=2, catalogue=(DataParallel,), tell=told.append)
        with suppress(OverBudget):  # nothing fits a megabyte
            planner.outcome(memory)
        before = told[: told.index("ranking all combinations of techniques")]
        assert sum("rehearsing DataParallel()" in one for one in before) == times, memory
