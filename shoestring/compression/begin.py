"""Begin a compression: calibrate the model and choose a plan within its limits, or the smallest that keeps a metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoestring.compression.calibration.metric import Floor, MetricValue, metric_after_change, metrics
from shoestring.compression.loading.source import CalibrationSamples, ModelSource, samples_of
from shoestring.compression.room import (
    CompressionDetails,
    CompressOutcome,
    CompressPlan,
    compressed_model,
    plain_cost,
    plan_compression,
)
from shoestring.compression.session import CompressOptions, CompressSession
from shoestring.compression.technique import ModelCost
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.planning.plan import Plan

LEVELS = (1e-5, 0.3)  # range of damages searched for a metric's bound


STEPS = 9  # steps of the bisection


def begin_session(
    source: ModelSource, asked: CompressOptions, cost: ModelCost | None = None, given: CalibrationSamples | None = None
) -> CompressSession:
    """Calibrate a model and choose how to compress it. Raises OverBudget if nothing keeps the budget."""
    given = given or samples_of(source.job, asked.unseen, asked.floor is not None)
    if source.check is not None:
        source.check(given.calibration[0])
    cost = replace(cost, wanted=asked.budget) if cost is not None else cost_of(source, given, asked, asked.budget)
    outcome = (
        plan_compression(cost, source.model, given.checked, asked.use)
        if asked.floor is None
        else for_metric(source, asked, given, cost)
    )
    return CompressSession(source, asked, given, outcome, cost.clock.plain if cost.study.timed else None)


def cost_of(source: ModelSource, given: CalibrationSamples, asked: CompressOptions, budget: Budget) -> ModelCost:
    cost = plain_cost(source, given, budget, asked.measure, asked.outputs, asked.axis)
    return replace(cost, bits=asked.bits)


def nearest_session(source: ModelSource, asked: CompressOptions, error: OverBudget) -> CompressSession | None:
    """The session of the nearest plan, if it only misses the fidelity."""
    plan = error.nearest
    if not isinstance(plan, Plan) or any(
        one.limit.name != "quality" for one in asked.budget.broken_limits(plan.numbers())
    ):
        return None
    given = samples_of(source.job, asked.unseen, asked.floor is not None)
    cost = cost_of(source, given, asked, Budget())
    plain = CompressPlan((), Exactness.BITS, cost.known_figures, CompressionDetails(cost, cost.study))
    return CompressSession(source, asked, given, CompressOutcome(plan, plain, asked=True), cost.clock.plain)


def for_metric(
    source: ModelSource, asked: CompressOptions, given: CalibrationSamples, cost: ModelCost
) -> CompressOutcome:
    """The smallest model whose metric, on the samples for deciding, keeps its bound; with a size limit, the best within
    it."""
    wanted, batches = asked.floor, given.deciding or given.checked
    assert wanted is not None, "who asks has one"
    everywhere = metrics(source.job, source.model, [*batches, *given.unseen])
    if wanted.name not in everywhere:
        raise Mistake(
            f"--metric {wanted}: the job measures {', '.join(everywhere) or 'nothing'}; name one of them, or give the Job "
            f"metrics=..."
        )
    original, before = everywhere[wanted.name], metrics(source.job, source.model, batches)[wanted.name]

    def plan_within(budget: Budget) -> tuple[CompressOutcome, MetricValue]:
        found = plan_compression(replace(cost, wanted=budget), source.model, given.checked, asked.use)
        return found, metric_after_change(
            original, before, metrics(source.job, compressed_model(found.chosen).model, batches)[wanted.name]
        )

    def refusal(found: CompressPlan, metric: MetricValue, why: str) -> OverBudget:
        few = wanted.undecided_note(metric)
        return OverBudget(
            f"{why} {wanted.name} {metric}, where {wanted} is asked for (the original: {original})"
            f"{f': {few}, give the Job more held_out' if few else ''}; allow more bytes, or --heal 10m",
            found,
        )

    if asked.budget.size is not None or asked.use is not None or asked.budget.quality is not None:
        found, metric = plan_within(asked.budget)
        if not wanted.keeps(metric.value):
            raise refusal(found.chosen, metric, f"{found.chosen} keeps the rest of the budget and gives")
        return found
    return smallest_keeping(asked, wanted, plan_within, refusal)


def smallest_keeping(
    asked: CompressOptions,
    wanted: Floor,
    tried: Callable[[Budget], tuple[CompressOutcome, MetricValue]],
    refused: Callable[[CompressPlan, MetricValue, str], OverBudget],
) -> CompressOutcome:
    """Bisection over damages. The metric must keep its bound with a margin of one standard error of the change, so that
    unseen samples rarely contradict; if not even the least damage leaves that margin, the measured value must keep it."""
    low, high = LEVELS
    best: CompressOutcome | None = None
    margin = 1.0
    for step in range(STEPS):
        level = low if not step else (low * high) ** 0.5
        last, metric = tried(replace(asked.budget, quality=1 - level))
        if not step and not wanted.keeps(metric.value):
            raise refused(last.chosen, metric, "no smaller model keeps the metric; the nearest gives")
        if not step and not wanted.keeps_surely(metric, margin):
            margin = 0.0
        if wanted.keeps_surely(metric, margin):
            best, low = last, level
        else:
            high = level
    assert best is not None, "the first one was, or it was refused"
    return best
