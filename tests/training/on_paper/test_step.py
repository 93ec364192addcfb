"""Clusters on paper: the formulas by hand, the simulated allocator by its rules, and the two published tables within what is promised."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import util
from math import ceil
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from shoestring import Mistake
from shoestring.core.costs.hardware import cluster
from shoestring.training.on_paper.best_mesh import best_mesh, meshes, plan_on_paper
from shoestring.training.on_paper.block import bytes_moved, weight_products
from shoestring.training.on_paper.calibrate import calibrate
from shoestring.training.on_paper.machines import START, Machines, machines
from shoestring.training.on_paper.memory import device_memory, pieces_held, saved_activations, state_bytes
from shoestring.training.on_paper.mesh import PaperMesh
from shoestring.training.on_paper.products import MatrixProduct, PaperDevice, product_seconds
from shoestring.training.on_paper.step import PaperJob, bubble_share, overlap_excess, rate_per_device, step
from shoestring.training.on_paper.sums import all_gather_seconds, all_reduce_seconds, send_seconds
from shoestring.training.on_paper.trace import allocations, simulate_memory
from shoestring.training.on_paper.transformer import Transformer, read_transformer, transformer
from shoestring.training.pipeline.schedule import activation_counts_by_formula, bubble

FOLDER = Path(__file__).parents[3] / "benchmarks" / "on_paper"
A100 = FOLDER / "clusters" / "a100_80gb.json"
SMALL = Machines(
    memory=1e9,
    bandwidth=1e9,
    devices=2,
    link=100.0,
    latency=1.0,
    network=10.0,
    network_latency=3.0,
    base=0.0,
    peak={"bf16": 1e12},
    efficiency={"bf16": 1.0},
    processors=4,
    sending=1,
)


@pytest.fixture(scope="module")
def published() -> ModuleType:
    told = util.spec_from_file_location("published", FOLDER / "published.py")
    assert told is not None and told.loader is not None
    module = util.module_from_spec(told)
    sys.modules["published"] = module  # its dataclasses look themselves up there
    told.loader.exec_module(module)
    return module


# Models


def test_a_transformer_has_as_many_weights_as_the_published_ones(published: ModuleType) -> None:
    assert {row.job.model.parameters() - row.parameters for row in published.foundry()} == {0}
    for row in published.megatron():  # 12 l h^2 (1 + 13/12h + (V+s)/12lh), the paper's formula 2
        model = row.job.model
        assert model.parameters() - 2 * model.hidden == pytest.approx(row.billions * 1e9, rel=0.03)
        rest = model.hidden * (13 * model.layers + 51_200 + 2048)
        assert model.parameters() - 2 * model.hidden == 12 * model.layers * model.hidden**2 + rest


def test_a_llama_has_gated_blocks_few_key_value_heads_and_no_biases() -> None:
    told = Transformer(
        64, 3, 8, 100, 32, kv_heads=2, feedforward=96, gated=True, tied=False, positions=False, biases=False
    )
    block = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64
    assert told.parameters() == 3 * block + 2 * 100 * 64 + 64


def test_operations_are_counted_as_the_paper_counts_them() -> None:
    model = Transformer(2304, 24, 24, 51_200, 2048)
    assert model.counted_operations(512) == pytest.approx(1.5467e16, rel=1e-3)
    dense = sum(one.operations for one in weight_products(model, 2048, 1))
    scores = 2 * 2.0 * 2048 * 2048 * 2304
    head = 2.0 * 2048 * 2304 * 51_200
    assert model.counted_operations(1) == pytest.approx(24 * 4 * (dense + scores) + 3 * head, rel=1e-12), (
        "formula 3 is the sum of products"
    )


def test_a_description_that_can_not_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    whole = {"hidden": 64, "layers": 2, "heads": 8, "vocabulary": 10, "sequence": 8}
    for told, why in (
        (whole | {"hidden": 65}, "can't be split over 8 heads"),
        ({"hidden": 64}, "does not say heads"),
        (whole | {"colour": 1}, "says colour"),
        (whole | {"hidden": "64"}, "must be a whole number"),
        (whole | {"flash": 1}, "must be true or false"),
        (whole | {"layers": 0}, "must be at least 1"),
        (whole | {"layers": 10**400}, "must be at least 1 and at most"),
        (whole | {"kv_heads": -1}, "must be at least 0"),
        ([1], "does not describe a transformer"),
    ):
        path.write_text(json.dumps(told))
        with pytest.raises(Mistake, match=why):
            read_transformer(path)
    path.write_text("{")
    with pytest.raises(Mistake, match="does not describe a transformer"):
        read_transformer(path)
    with pytest.raises(Mistake, match="there is no"):
        read_transformer(tmp_path / "none.json")
    with pytest.raises(Mistake, match="3 key-value heads"):
        transformer(whole | {"kv_heads": 3}, "here")


def test_a_cluster_file_serves_both_ways_of_planning(tmp_path: Path) -> None:
    assert cluster(A100, 8).memory == int(79.15 * 2**30) == int(machines(A100).memory)
    told = json.loads(A100.read_text())
    for change, why in (({"peak": {}}, "does not say the peak"), ({"colour": 1}, "colour")):
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(told | change))
        with pytest.raises(Mistake, match=why):
            machines(path)
    with pytest.raises(Mistake, match="what share of its peak it reaches in bf16"):
        machines(A100).rate("bf16")
    with pytest.raises(Mistake, match="has no peak for fp8"):
        machines(A100).rate("fp8")


# Seconds


def test_a_product_takes_whole_waves_of_tiles_and_the_time_to_write_them() -> None:
    unit = PaperDevice(rate=4e9, bandwidth=1e9, processors=4)
    tile = 2 * 128 * 256 * 64 / 1e9 + 128 * 256 * 2 / (1e9 / 4)  # of one processor
    assert product_seconds(MatrixProduct(512, 256, 64), unit) == pytest.approx(tile), "four tiles at once"
    assert product_seconds(MatrixProduct(512, 256, 64, count=2), unit) == pytest.approx(2 * tile)
    small = 2 * 128 * 128 * 64 / 1e9 + 128 * 128 * 2 / (1e9 / 4)
    assert product_seconds(MatrixProduct(640, 256, 64), unit) == pytest.approx(3 * small), (
        "ten smaller tiles: three waves"
    )
    split = 2 * 128 * 128 * 512 / 1e9 + 128 * 128 * 4 / (1e9 / 4)
    assert product_seconds(MatrixProduct(128, 256, 1024), unit) == pytest.approx(split), (
        "two tiles for four processors: split"
    )
    slow = PaperDevice(rate=1e15, bandwidth=1e9, processors=4)
    assert product_seconds(MatrixProduct(128, 256, 64), slow) >= (128 * 64 + 64 * 256) * 2 / 1e9, (
        "never less than its bytes take"
    )


def test_longer_inner_dimensions_are_more_efficient() -> None:
    unit = PaperDevice(rate=2e14, bandwidth=2e12, processors=108)
    rates = [
        one.operations / product_seconds(one, unit)
        for one in (MatrixProduct(8192, 4096, inner) for inner in (256, 1024, 4096, 16384))
    ]
    assert rates == sorted(rates) and rates[-1] < 2e14


def test_a_wave_that_starts_late_costs_large_products_a_smaller_share() -> None:
    early, late = (PaperDevice(rate=2e14, bandwidth=2e12, processors=108, start=start) for start in (0.0, 3e-6))
    products = [MatrixProduct(8192, 4096, inner) for inner in (256, 1024, 4096, 16384)]
    waits = [product_seconds(one, late) - product_seconds(one, early) for one in products]
    shares = [wait / product_seconds(one, late) for wait, one in zip(waits, products, strict=True)]
    waves = [ceil(8192 * 4096 / tile / 108) for tile in (128 * 256, 128 * 128)]
    assert all(waves[0] * 3e-6 < 1.0001 * wait < waves[1] * 3.1e-6 for wait in waits), "once a wave"
    assert shares == sorted(shares, reverse=True) and shares[0] > 5 * shares[-1]
    assert machines(A100).start == START > 0, "clusters wait too"


def test_sums_beside_weight_gradients_hide_a_third_of_them_at_most() -> None:
    cluster = machines(A100).with_efficiency("fp16", 0.7)
    for hidden in (768, 6144, 25_600):
        job = PaperJob(Transformer(hidden, 8, 32, 51_200, 2048, flash=False), batch=8, precision="fp16")
        mesh = PaperMesh(1, tensor=8, micro_batch=4, checkpointing=True)
        after, beside = (step(replace(job, sums_beside=beside), mesh, cluster) for beside in (False, True))
        assert 2 / 3 * after.tensor < beside.tensor < after.tensor, hidden
        assert beside.compute == after.compute
        alone = replace(mesh, data=8, tensor=1, micro_batch=1)
        assert step(replace(job, sums_beside=True), alone, cluster) == step(job, alone, cluster), "nothing to sum"


def test_backward_of_a_product_is_twice_its_operations() -> None:
    one = MatrixProduct(10, 20, 30)
    assert [half.operations for half in one.backward()] == [one.operations] * 2


def test_rings_take_what_their_formulas_say() -> None:
    assert all_gather_seconds(SMALL, 2, 2, 1000) == 1 * (500 / 100 + 1.0), "inside a machine: by its link"
    assert all_gather_seconds(SMALL, 4, 1, 1000) == 3 * (250 / 10 + 3.0), (
        "one member a machine: by one device's network"
    )
    assert all_gather_seconds(SMALL, 4, 2, 1000) == 3 * (250 / 20 + (2 * 3.0 + 2 * 1.0) / 4), (
        "two members a machine: by two devices' network"
    )
    assert (
        all_reduce_seconds(SMALL, 4, 1, 1000) == 2 * all_gather_seconds(SMALL, 4, 1, 1000)
        and all_reduce_seconds(SMALL, 1, 1, 1000) == 0
    )
    assert send_seconds(SMALL, 50, same_machine=True) == 1.5 and send_seconds(SMALL, 50, same_machine=False) == 8.0


def test_hidden_sums_take_the_processors_they_run_on() -> None:
    assert (
        overlap_excess(10.0, 4.0, SMALL) == 1.0
        and overlap_excess(4.0, 10.0, SMALL) == 6.0 + 1.0
        and overlap_excess(10.0, 0.0, SMALL) == 0.0
    )


@pytest.mark.parametrize(("stages", "pieces", "virtual"), [(1, 4, 1), (4, 8, 1), (8, 8, 1), (4, 8, 2), (16, 64, 3)])
def test_the_bubble_and_the_pieces_held_are_those_of_the_schedules(stages: int, pieces: int, virtual: int) -> None:
    share = bubble("interleaved" if virtual > 1 else "1f1b", stages, pieces, virtual)
    assert bubble_share(stages, pieces, virtual) == pytest.approx(share / (1 - share))
    most = activation_counts_by_formula("interleaved" if virtual > 1 else "1f1b", stages, pieces, virtual)[0]
    assert pieces_held(PaperMesh(stage=stages, virtual=virtual), pieces) * virtual == pytest.approx(most)


def test_bytes_beside_products_are_counted_by_hand() -> None:
    model = Transformer(8, 1, 2, 10, 4, biases=False)
    assert bytes_moved(model, 1, 1, "bf16") == (2.0 * (10 * 8 + 2 * 32), 2.0 * (12 * 8 + 3 * 32))


def test_parts_add_up_and_more_of_anything_bad_is_slower() -> None:
    cluster, job = machines(A100).with_efficiency("bf16", 0.7), PaperJob(Transformer(4096, 32, 32, 51_200, 2048), 256)
    plain = PaperMesh(data=4, stage=4, tensor=4, micro_batch=1, virtual=2)
    parts = step(job, plain, cluster)
    assert parts.total == pytest.approx(
        parts.compute + parts.tensor + parts.bubble + parts.sends + parts.data + parts.optimizer
    )
    assert step(job, replace(plain, checkpointing=False), cluster).compute < parts.compute
    assert step(job, replace(plain, virtual=1), cluster).bubble == pytest.approx(2 * parts.bubble, rel=0.05)
    for name in ("link", "network", "bandwidth"):
        assert step(job, plain, replace(cluster, **{name: getattr(cluster, name) / 10})).total > parts.total
    less, more = (step(other, plain, cluster) for other in (replace(job, stops_early=True), replace(job, metrics=2)))
    assert less.compute < parts.compute < more.compute
    with pytest.raises(Mistake, match="can't be divided"):
        step(job, replace(plain, stage=5), cluster)


# Memory


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_block_keeps_what_the_paper_says(tensor: int) -> None:
    model = Transformer(12_288, 96, 96, 51_200, 2048, flash=False, dropout=True)
    s, h, a, b = 2048, 12_288, 96, 2
    formula = s * b * h * (10 + 24 / tensor + 5 * a * s / (h * tensor))  # arXiv 2205.05198, formula 2
    assert sum(saved_activations(model, b * s, tensor).values()) == formula


def test_weights_gradients_and_moments_take_what_megatron_documents() -> None:
    assert sum(state_bytes(2.0, 8, 0)) == 20 and sum(state_bytes(2.0, 8, 1)) == 4 + 16 / 8
    assert sum(state_bytes(4.0, 8, 0)) == 18 and sum(state_bytes(4.0, 8, 1)) == 6 + 12 / 8
    assert sum(state_bytes(4.0, 8, 3)) == 16 / 8


def test_a_traced_step_leaves_nothing_behind_but_state() -> None:
    job = PaperJob(Transformer(64, 3, 4, 100, 32, flash=False, dropout=True, fused_loss=False), 8, metrics=2)
    for checkpointing in (True, False):
        alive: dict[str, int] = {}
        for name, size, _ in allocations(job, PaperMesh(data=2, checkpointing=checkpointing, sharding=3)):
            if size:
                assert name not in alive
                alive[name] = size
            else:
                del alive[name]
        assert {name.split(".")[1] for name in alive} == {"shard", "moment1", "moment2"}
        assert sum(alive.values()) == pytest.approx(12 * job.model.parameters() / 2, rel=1e-3)


def test_the_formula_agrees_with_the_trace(published: ModuleType) -> None:
    for row in published.foundry()[::7]:
        cluster = machines(FOLDER / "clusters" / f"{row.gpu}.json")
        assert device_memory(row.job, row.mesh, cluster).total - cluster.base == pytest.approx(
            simulate_memory(row.job, row.mesh, cluster).tensors, rel=0.1
        )


# The published tables


def test_the_tables_agree_with_themselves(published: ModuleType) -> None:
    for row in published.table("megatron.csv"):
        assert float(row["teraflops_per_gpu"]) * int(row["gpus"]) / 1000 == pytest.approx(
            float(row["petaflops"]), rel=0.006
        )
    peak = {"fp8": 1.979e15, "h100": 9.895e14, "a100": 3.12e14}
    for told, row in zip(published.table("llm_foundry.csv"), published.foundry(), strict=True):
        model = row.job.model
        operations = (
            6 * row.parameters + 12 * model.layers * model.hidden * model.sequence
        )  # a token, as the source counts its MFU
        share = operations * row.published / peak["fp8" if row.job.precision == "fp8" else row.gpu[:4]]
        assert 100 * share == pytest.approx(float(told["mfu_percent"]), rel=0.004)


def test_megatron_is_predicted_from_one_of_its_rows(published: ModuleType) -> None:
    rows = published.megatron()
    cluster = published.megatron_cluster(rows[0])
    wrong = [published.off(row, cluster) for row in rows]
    assert wrong[0] == pytest.approx(0, abs=1e-6) and len(rows) == 10
    assert median(map(abs, wrong)) < 0.08 and max(map(abs, wrong)) < 0.15


def test_the_second_table_is_predicted_with_the_constant_of_the_first(published: ModuleType) -> None:
    cluster = published.megatron_cluster(published.megatron()[0])
    for told, row in zip(published.table("megatron_zero.csv"), published.megatron("megatron_zero.csv"), strict=True):
        days = 8 * 300e9 * row.billions * 1e9 / (row.gpus * row.published) / 86_400  # the paper's formula 4
        assert days == pytest.approx(float(told["days"]), rel=0.04)
        if not row.sharding:
            assert abs(published.off(row, cluster)) < 0.15


def test_llm_foundry_is_predicted_from_one_row_a_kind_of_gpu(published: ModuleType) -> None:
    wrong = []
    for (gpu, precision), rows in published.kinds().items():
        cluster = published.foundry_cluster(gpu, precision)
        here = [published.off(row, cluster) for row in rows]
        assert median(map(abs, here)) < 0.08, (gpu, precision)
        wrong += here
    assert len(wrong) == 201 and median(map(abs, wrong)) < 0.06 and max(map(abs, wrong)) < 0.35


def fits(published: ModuleType, row: object, times: int = 1) -> bool:
    cluster = machines(FOLDER / "clusters" / f"{row.gpu}.json")  # type: ignore[attr-defined]
    job, mesh = row.job, row.mesh  # type: ignore[attr-defined]
    return simulate_memory(
        replace(job, batch=times * job.batch), replace(mesh, micro_batch=times * mesh.micro_batch), cluster
    ).fits


def test_what_ran_is_predicted_to_fit(published: ModuleType) -> None:
    assert all(fits(published, row) for row in published.foundry()[::4])


@pytest.mark.slow
def test_everything_that_ran_is_predicted_to_fit(published: ModuleType) -> None:
    assert all(fits(published, row) for row in published.foundry())


def test_much_more_than_what_ran_is_predicted_not_to_fit(published: ModuleType) -> None:
    rows = [row for row in published.foundry() if row.job.model.sequence == 2048]
    assert sum(fits(published, row, 2) for row in rows) < len(rows) / 4, (
        "the published micro-batches are close to the largest that fit"
    )
    assert not any(
        fits(published, row, 4) for row in rows if row.model not in ("125m", "70b")
    )  # which stay far below their GPUs


# The choice


def test_the_planner_finds_the_papers_own_mesh_for_its_largest_model(published: ModuleType) -> None:
    rows = published.megatron()
    cluster, largest = published.megatron_cluster(rows[0]), rows[-1]
    bound = best_mesh(
        largest.job, largest.gpus, cluster, lambda mesh: mesh.checkpointing and not mesh.sharding
    ).chosen.mesh
    assert (bound.tensor, bound.stage, bound.data) == (8, 64, 6)
    free = best_mesh(largest.job, largest.gpus, cluster)
    assert (
        free.chosen.parts.total <= step(largest.job, bound, cluster).total and free.chosen.held.total <= cluster.memory
    )
    assert free.why().startswith(str(free.chosen.mesh)) and "meshes fit" in free.why()
    assert rate_per_device(largest.job, bound, step(largest.job, bound, cluster).total) == pytest.approx(
        163e12, rel=0.15
    )


def test_no_mesh_that_fits_is_faster_than_the_chosen_one() -> None:
    cluster, job = machines(A100).with_efficiency("bf16", 0.7), PaperJob(Transformer(2048, 24, 16, 50_304, 2048), 64)
    plan = best_mesh(job, 16, cluster)
    every = [mesh for mesh in meshes(job, 16, cluster) if device_memory(job, mesh, cluster).total <= cluster.memory]
    assert len(every) == plan.fitting and plan.chosen.parts.total == min(
        step(job, mesh, cluster).total for mesh in every
    )
    assert all(mesh.world == 16 and not mesh.wrong(job.model, 64, cluster) for mesh in every)


def test_what_fits_nowhere_is_refused_with_the_least_that_is_needed(tmp_path: Path) -> None:
    cluster, job = machines(A100).with_efficiency("bf16", 0.7), PaperJob(Transformer(8192, 80, 64, 50_368, 2048), 8)
    with pytest.raises(Mistake, match=r"nothing fits .* the least demanding needs"):
        best_mesh(job, 2, cluster)
    with pytest.raises(Mistake, match="can't be spread over"):
        best_mesh(job, 7, cluster)
    model = tmp_path / "model.json"
    model.write_text('{"hidden": 2048, "layers": 24, "heads": 16, "vocabulary": 50304, "sequence": 2048}')
    told = tmp_path / "cluster.json"
    told.write_text(json.dumps(json.loads(A100.read_text()) | {"efficiency": {"bf16": 0.7}}))
    assert plan_on_paper(model, told, 8, 64).chosen.mesh.world == 8
    with pytest.raises(Mistake, match="both must be at least 1"):
        plan_on_paper(model, told, 0, 64)


def test_a_figure_that_would_need_more_than_the_peak_is_refused() -> None:
    job, mesh = PaperJob(Transformer(2048, 24, 16, 50_304, 2048), 64), PaperMesh(data=8, micro_batch=8)
    with pytest.raises(Mistake, match="which can't be"):
        calibrate(
            machines(A100), "bf16", 1e15, lambda cluster: rate_per_device(job, mesh, step(job, mesh, cluster).total)
        )
