"""Every simulation method agrees with the plain loop, and a device's result does not depend on its chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring.core.clients.local import Local
from shoestring.core.job import Job
from shoestring.federated.round import DeviceView, Objective, Order
from shoestring.federated.simulation.cohort import Engine, MethodChoice, choose_method, engine_work
from tests.federated.simulation.cohort.cases import (
    CLOSE,
    COUNTS,
    Transformer,
    apart,
    cnn,
    devices_of,
    engine,
    images,
    job_of,
    mlp,
    of_tokens,
    started,
    tokens,
)


def disagreement(
    job: Job,
    kind: str,
    objective: Objective | None = None,
    counts: Sequence[int] = COUNTS,
    data: Callable[..., Any] = images,
) -> float:
    records, (_, row) = devices_of(job, counts, data), started(job)
    objective, seeds = objective or Objective(job.local), list(range(len(counts)))
    start = row.expand(len(counts), -1)
    plain = engine(job, "sequential").train_weights(start, records, objective, seeds)
    found = engine(job, kind).train_weights(start, records, objective, seeds)
    assert torch.equal(plain.steps, found.steps)
    assert torch.allclose(plain.losses, found.losses, rtol=1e-5)
    return apart(found.rows, plain.rows, start)


@pytest.mark.parametrize(
    "local",
    [
        Local(lr=0.1),
        Local(epochs=3, batch=4),
        Local(batch=0, epochs=2),
        Local(batch=7, steps=3, epochs=2),
        Local(batch=1, lr=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["fused", "stacked"])
def test_linear_layers_end_where_the_plain_loop_does(kind: str, local: Local) -> None:
    assert disagreement(job_of(mlp, local), kind) < CLOSE


@pytest.mark.parametrize(
    "model",
    [
        lambda: mlp(nn.GELU(), nn.Sigmoid()),
        lambda: mlp(nn.GELU("tanh"), nn.Tanh()),
        lambda: mlp(bias=False),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5)),
    ],
)
def test_hand_written_steps_know_every_activation_layers_without_bias_and_a_single_layer(
    model: Callable[[], nn.Module],
) -> None:
    assert disagreement(job_of(model, Local(batch=5)), "fused") < CLOSE


def test_many_epochs_of_few_samples_are_trained_by_sample_and_end_where_the_plain_loop_does() -> None:
    wide = lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 60), nn.ReLU(), nn.Linear(60, 5))  # noqa: E731
    for local in (Local(batch=5, epochs=5), Local(batch=5, epochs=5, steps=13), Local(batch=0, epochs=8)):
        assert disagreement(job_of(wide, local), "fused", counts=(12, 20, 7, 1)) < CLOSE


def test_more_samples_than_a_block_holds_bring_the_first_layer_up_to_date_in_between() -> None:
    assert disagreement(job_of(mlp, Local(batch=10)), "fused", counts=(300, 128, 129, 20)) < CLOSE


@pytest.mark.parametrize("kind", ["fused", "stacked"])
def test_devices_are_pulled_to_an_anchor_and_corrected_as_the_plain_loop_does_it(kind: str) -> None:
    job = job_of(mlp, Local(batch=5, epochs=2))
    layout, row = started(job)
    correction = 0.01 * torch.randn(len(COUNTS), layout.trained_count, generator=torch.Generator().manual_seed(0))
    for objective in (
        Objective(job.local, pull=0.7, anchor=0.8 * row),
        Objective(job.local, correction=correction),
        Objective(job.local, pull=0.7, anchor=0.8 * row, correction=correction),
    ):
        assert disagreement(job, kind, objective) < CLOSE


@pytest.mark.parametrize("kind", ["fused", "stacked"])
def test_every_device_may_begin_from_weights_of_its_own(kind: str) -> None:
    job = job_of(mlp, Local(batch=5))
    records, (_, row) = devices_of(job), started(job)
    start = row * torch.linspace(0.5, 1.5, len(records)).unsqueeze(1)
    plain, found = (
        engine(job, way).train_weights(start, records, Objective(job.local), range(5)) for way in ("sequential", kind)
    )
    assert apart(found.rows, plain.rows, start) < CLOSE


def test_convolutions_in_groups_end_where_the_plain_loop_does() -> None:
    assert disagreement(job_of(cnn, Local(batch=6, epochs=2)), "stacked") < CLOSE


@pytest.mark.parametrize("masks", [True, False])
def test_batches_that_are_shorter_than_others_are_filled_up_or_called_by_themselves(masks: bool) -> None:
    job = job_of(cnn, Local(batch=6))
    records, (layout, row) = devices_of(job), started(job)
    stacked = Engine(job, layout, MethodChoice("stacked", 8, "", masks=masks))
    plain, found = (
        one.train_weights(row.expand(5, -1), records, Objective(job.local), range(5))
        for one in (engine(job, "sequential"), stacked)
    )
    assert apart(found.rows, plain.rows, row) < CLOSE


def test_a_transformer_with_shared_weights_ends_where_the_plain_loop_does() -> None:
    assert disagreement(job_of(Transformer, Local(batch=6), loss=of_tokens), "stacked", data=tokens) < CLOSE


def two_rates(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """By the number of dimensions, which stacked weights have one more of."""
    groups = [
        {"params": [one for one in parameters if (one.dim() > 1) == many], "lr": 0.01 + 0.01 * many}
        for many in (True, False)
    ]
    return torch.optim.Adam(groups, eps=1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
        two_rates,
    ],
)
def test_optimizers_with_moments_keep_them_for_every_device(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    assert disagreement(job_of(mlp, Local(batch=5, optimizer=optimizer)), "stacked") < CLOSE


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    batch=st.integers(0, 9),
    epochs=st.integers(1, 3),
    steps=st.integers(0, 6),
)
def test_hand_written_steps_agree_for_any_sizes(counts: list[int], batch: int, epochs: int, steps: int) -> None:
    assert disagreement(job_of(mlp, Local(batch=batch, epochs=epochs, steps=steps)), "fused", counts=counts) < CLOSE


@pytest.mark.parametrize(("kind", "model"), [("sequential", mlp), ("fused", mlp), ("stacked", cnn)])
def test_a_chunk_gives_the_same_bits_every_time(kind: str, model: Callable[[], nn.Module]) -> None:
    job = job_of(model, Local(batch=5, epochs=2))
    records, (_, row) = devices_of(job), started(job)
    one, two = (
        engine(job, kind).train_weights(row.expand(5, -1), records, Objective(job.local), range(5)) for _ in range(2)
    )
    assert torch.equal(one.rows, two.rows) and torch.equal(one.losses, two.losses)


@pytest.mark.parametrize(("kind", "model"), [("sequential", mlp), ("fused", mlp), ("stacked", cnn)])
def test_the_order_of_devices_in_a_chunk_changes_no_bit_of_theirs(kind: str, model: Callable[[], nn.Module]) -> None:
    job = job_of(model, Local(batch=5, epochs=2))
    records, (_, row) = devices_of(job), started(job)
    work, mixed = engine(job, kind), [3, 1, 4, 0, 2]
    one = work.train_weights(row.expand(5, -1), records, Objective(job.local), range(5))
    two = work.train_weights(row.expand(5, -1), [records[place] for place in mixed], Objective(job.local), mixed)
    assert torch.equal(one.rows[mixed], two.rows)


def test_buffers_of_a_batch_norm_are_in_the_row_and_begin_anew_with_every_device() -> None:
    def model():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 5)
        )

    job = job_of(model, Local(batch=6))
    records, (layout, row) = devices_of(job, (12, 18)), started(job)
    both = engine(job, "sequential").train_weights(row.expand(2, -1), records, Objective(job.local), range(2))
    alone = engine(job, "sequential").train_weights(row.expand(1, -1), records[1:], Objective(job.local), [1])
    assert torch.equal(both.rows[1], alone.rows[0])
    assert not torch.equal(layout.views(both.rows)["2.running_mean"][0], layout.views(row)["2.running_mean"])


def test_work_gives_updates_counts_and_metrics_before_and_after() -> None:
    metrics = lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()}  # noqa: E731
    job = job_of(mlp, Local(batch=5, held_out=0.25, lr=0.2), metrics=metrics, held_out=list)
    records, (layout, row) = devices_of(job), started(job)
    work = engine_work(Engine(job, layout, choose_method(job, layout, records)))
    found = work(Order(1, 0, row, judges=True), [DeviceView(one) for one in records], Objective(job.local))
    assert found.counts.tolist() == [one.count for one in records] and found.rows.shape == (5, layout.size)
    assert [sums["accuracy"][1] for sums in found.before[:3]] == [len(one.held_out) for one in records[:3]]
    assert not found.before[3] and not found.after[3]  # one sample: nothing is held out
    model, one = job.model(), records[0]
    layout.load(model, row + found.rows[0])
    batch = one.batch(one.held_out)
    right = nn.functional.cross_entropy(model(batch[0]), batch[1]).item() * len(one.held_out)
    assert found.after[0]["loss"][0] == pytest.approx(right, rel=1e-4) and found.after[0] != found.before[0]
