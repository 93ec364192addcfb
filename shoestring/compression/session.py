"""One compression from start to end: calibrate the model, choose a plan, pack, measure, report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shoestring.compression.calibration.calibration import same
from shoestring.compression.calibration.fidelity import MEASURES, Fidelity, FidelitySums, error_among_few
from shoestring.compression.calibration.latency import Latency, latencies, one_sample
from shoestring.compression.calibration.metric import (
    BatchMetrics,
    Floor,
    MetricValue,
    batch_metrics,
    combine_batches,
    metric_after_change,
    metrics,
)
from shoestring.compression.calibration.model_outputs import select_outputs
from shoestring.compression.calibration.output_kinds import AUTO
from shoestring.compression.calibration.scratch import trim
from shoestring.compression.edit_registry import apply_edits
from shoestring.compression.exits.measured import ExitsMeasurement, exits_measured
from shoestring.compression.formats.manifest import MANIFEST, TENSORS
from shoestring.compression.formats.packed_folder import PackedModel, write_into
from shoestring.compression.formats.packed_modules import memory_of
from shoestring.compression.loading.source import CalibrationSamples, ModelSource
from shoestring.compression.report.compress_report import (
    Amount,
    CompressReport,
    FidelityReport,
    FrontierPoint,
    Healed,
    LatencyReport,
    LayerReport,
    MetricReport,
    OutputReport,
    PlainLatency,
    PlainReport,
)
from shoestring.compression.room import CompressOutcome, CompressPlan, compressed_model
from shoestring.compression.technique import CompressTechnique
from shoestring.core.batch import Batch
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.figures import Figures, Quantity, figures
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.technique import technique_json
from shoestring.runs.reports.plan_summary import UsedTechnique

QUANTITIES = (
    Quantity("size_bytes", "size on disk", counted=True),
    Quantity("memory_bytes", "weights in memory", counted=True),
    Quantity("p50_seconds", "an answer, median", "seconds"),
    Quantity("p99_seconds", "an answer, 99 of 100", "seconds"),
    Quantity("damage", "damage (1 - fidelity)", "share"),
)


@dataclass(frozen=True)
class CompressOptions:
    budget: Budget
    floor: Floor | None = None
    use: tuple[str | CompressTechnique, ...] | None = None
    measure: str = AUTO  # for all outputs; auto: inferred for each
    unseen: int = 1024
    outputs: tuple[str, ...] = ()  # outputs to compare; empty: all
    axis: int | None = None  # axis of classes or vectors; None: inferred
    bits: tuple[int, ...] = ()  # of the integers that the file to write has; empty: any

    def __post_init__(self) -> None:
        if self.measure not in (AUTO, *MEASURES):
            raise Mistake(f"fidelity is measured as {', '.join((AUTO, *MEASURES))}, not as {self.measure!r}")
        if not self.budget.limits() and self.floor is None and self.use is None:
            raise Mistake(
                "no limit was given: give --size 16MB, --latency 5ms or --keep 0.998 (or techniques by --use)"
            )


@dataclass(frozen=True)
class CompressedMeasurement:
    """The measurements, on samples on which nothing was chosen."""

    size: int
    memory: int
    latency: Latency
    fidelity: Fidelity
    metrics: Mapping[str, MetricValue]
    original: Mapping[str, MetricValue]
    predicted: Mapping[
        str, MetricValue
    ]  # the original's metrics plus the change seen on the samples that confirm plans; only predictable ones
    notes: tuple[str, ...] = ()
    exits: ExitsMeasurement | None = None


@dataclass(frozen=True)
class CompressSession:
    source: ModelSource
    asked: CompressOptions
    given: CalibrationSamples
    outcome: CompressOutcome
    plain_latency: Latency | None  # None: not measured yet
    healed: Healed | None = None  # the effect of healing, if requested

    @property
    def plan(self) -> CompressPlan:
        return self.outcome.chosen

    @property
    def plain(self) -> CompressPlan:
        assert self.outcome.plain is not None, "it was planned"
        return self.outcome.plain

    @property
    def original(self) -> nn.Module:
        """The model that results are compared with."""
        return self.source.model

    def write_and_measure(self, target: Path) -> CompressedMeasurement:
        """Write the folder, load it back, and measure the loaded model; if that fails, the folder is removed."""
        plan = self.plan
        made = compressed_model(plan)
        size = write_into(
            target,
            plan.details.cost.about,
            plan.details.cost.specs(plan.details.allocation),
            made.forms,
            plan.details.cost.buffers,
            self.job_copy(),
        )
        try:
            return self.measure_folder(target, made.model, size)
        except BaseException:
            for name in (MANIFEST, TENSORS):
                (target / name).unlink(missing_ok=True)
            raise

    def measure_folder(self, target: Path, made: nn.Module, size: int) -> CompressedMeasurement:
        """The measurements of a folder; `made` is the model in memory."""
        loaded = self.reload(target, made)
        mine, plain = latencies([loaded, self.original], self.source.job.forward, one_sample(self.given.unseen[0]))
        busy = (
            (f"{mine.warning}; the plain model took {1e3 * plain.p50:.3g} ms in turns with it",) if mine.warning else ()
        )
        notes: list[str] = []
        found, now, original = self.compare_loaded(loaded, notes)
        edits = self.plan.details.cost.about.get("edits", ())
        exits = exits_measured(loaded, self.source.model, edits, self.given.unseen, self.source.job.forward)
        notes += [exits.text] if exits is not None else []
        predicted = self.predicted_metrics(made, original)
        return CompressedMeasurement(
            size, memory_of(loaded), mine, found, now, original, predicted, (*busy, *notes), exits
        )

    def compare_loaded(
        self, loaded: nn.Module, notes: list[str]
    ) -> tuple[Fidelity, Mapping[str, MetricValue], Mapping[str, MetricValue]]:
        """Fidelity, and the metrics of the model and of the original, on unseen samples, from one forward pass of each.
        Only one batch of outputs is in memory at a time."""
        job, models = self.source.job, (loaded, self.original)
        comparison = FidelitySums(self.plan.details.cost.study.measures)
        told = [compared_batch(job, models, batch, comparison, notes) for batch in self.given.unseen]
        if job.validate is not None:
            now, original = (metrics(job, model, ()) for model in models)
        else:
            now, original = (combine_batches(one) for one in zip(*told, strict=True))
        return comparison.fidelity, now, original

    def predicted_metrics(self, made: nn.Module, original: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        """Predicted metrics on unseen samples: the original's there, plus the change seen on the samples for deciding.
        A job with its own validation can't be predicted."""
        job, batches = self.source.job, self.given.deciding or self.given.checked
        if job.validate is not None:
            return {}
        before, after = (metrics(job, model, batches) for model in (self.original, made))
        return {
            name: metric_after_change(original[name], before[name], after[name])
            for name in original
            if name in before and name in after
        }

    def reload(self, target: Path, made: nn.Module) -> nn.Module:
        """The folder as a user will load it; its outputs must be bit-equal to those of the model in memory."""
        loaded = loaded_model(self.source, target)
        study, sample = self.plan.details.cost.study, self.given.unseen[:1]
        if not same(study.outputs(sample, loaded)[0], study.outputs(sample, made)[0]):
            raise Mistake(
                f"the model that was written to {target} gives other outputs than the one in memory: it has state that is neither "
                f"a weight nor a buffer (or its factory draws numbers); keep such tensors in buffers"
            )
        return loaded

    def job_copy(self) -> dict[str, bytes]:
        origin = self.source.job.origin
        return {"job.py": Path(origin.file).read_bytes()} if origin is not None else {}

    def missed_limits(self, measured: CompressedMeasurement) -> list[str]:
        """Requested limits that the result misses, as text. Latency is judged by the requested percentile."""
        budget = self.asked.budget
        tail = measured.latency.p99 if budget.percentile > 0.5 else measured.latency.p50
        doubt = f" ({measured.latency.warning})" if measured.latency.warning else ""
        found = [
            f"measured on unseen data, {one}{doubt if one.limit.name == 'latency' else ''}"
            for one in budget.broken_limits(
                {"size_bytes": measured.size, "latency_seconds": tail, "quality": max(measured.fidelity.mean, 0.0)}
            )
        ]
        floor = self.asked.floor
        if floor is not None and not floor.keeps((metric := measured.metrics[floor.name]).value):
            found.append(
                f"measured on unseen data, {floor.name} is {metric}, and {floor} was asked for"
                + (f": {few}" if (few := floor.undecided_note(metric)) else "")
            )
        return found

    # The report

    def figures(self, measured: CompressedMeasurement) -> Figures:
        known = self.plan.details.cost.known_figures
        predicted: dict[str, float | None] = dict(known)
        if (median := known.get("median_seconds")) is not None:
            tail = self.plan.details.cost.clock.tail(0.99)
            predicted |= {"p50_seconds": median, "p99_seconds": median * tail}
        if (
            self.plan.details.checked is not None
        ):  # measured for the whole model on the samples that confirm plans, which is better than a sum
            predicted["damage"] = self.plan.details.checked.damage
        if self.healed is not None:  # the effect of training is not predicted
            predicted["damage"] = None
        return figures(QUANTITIES, predicted).with_measured(
            {
                "size_bytes": measured.size,
                "memory_bytes": measured.memory,
                "p50_seconds": measured.latency.p50,
                "p99_seconds": measured.latency.p99,
                "damage": measured.fidelity.damage,
            }
        )

    def metric_report(self, name: str, measured: CompressedMeasurement) -> MetricReport:
        guess = measured.predicted.get(name) if self.healed is None else None
        found, floor = measured.metrics[name], self.asked.floor
        decides = floor is not None and floor.name == name
        return MetricReport(
            original=measured.original[name].value,
            predicted=guess.value if guess is not None else None,
            predicted_standard_error=guess.standard_error if guess is not None else None,
            measured=found.value,
            n=found.count,
            of=found.unit,
            standard_error=found.standard_error,
            interval=found.interval,
            decided_by=str(floor) if decides else "",
            undecided=floor.undecided_note(found) if decides and floor is not None else "",
        )

    def outputs(self, measured: CompressedMeasurement) -> Iterator[OutputReport]:
        """Every output with its measure and the reason for it; predicted on the samples that confirm plans, and
        measured."""
        checked = self.plan.details.checked.outputs if self.plan.details.checked is not None else ()
        predicted = {one.name: one for one in checked if one.count}
        for one, how in zip(measured.fidelity.outputs, self.plan.details.cost.study.measures, strict=True):
            guess = predicted.get(one.name)
            yield OutputReport(
                name=one.name,
                by=how.measure,
                axis=how.axis,
                why=how.why,
                n=one.count,
                samples=one.samples,
                standard_error=one.standard_error,
                predicted_standard_error=error_among_few(guess, one) if guess is not None else None,
                mean=Amount(guess.mean if guess is not None else None, one.mean),
                worst=Amount(guess.worst if guess is not None else None, one.worst),
            )

    def fidelity_report(self, measured: CompressedMeasurement, damage: float | None) -> FidelityReport:
        """`damage`: predicted; None: not predicted."""
        found, leading, checked = measured.fidelity, measured.fidelity.leading, self.plan.details.checked
        assert leading is not None, "measurements have outputs"
        return FidelityReport(
            by=leading.measure,
            output=leading.name,
            n=leading.count,
            samples=leading.samples,
            standard_error=leading.standard_error,
            outputs=tuple(self.outputs(measured)),
            mean=Amount(None if damage is None else 1 - damage, found.mean),
            worst=Amount(None if checked is None or self.healed else checked.worst, found.worst),
        )

    def no_smaller(self, size: int) -> tuple[str, ...]:
        """Message about techniques that the user named and that save no bytes: of a small model, the description of its
        new structure can take more than was cut."""
        plain = int(self.plain.numbers()["size_bytes"])
        if not self.asked.use or size < plain:
            return ()
        return (f"{self.plan} makes the folder no smaller: {size:,} bytes, where the model as it is takes {plain:,}",)

    def report(self, measured: CompressedMeasurement, folder: Path) -> CompressReport:
        """The whole report, as printed by `compress --json`."""
        told, plan, plain = self.figures(measured), self.plan, self.plain
        both = partial(amount, told)
        return CompressReport(
            folder=str(folder),
            size_bytes=both("size_bytes"),
            memory_bytes=both("memory_bytes"),
            latency_ms=LatencyReport(both("p50_seconds", 1e3), both("p99_seconds", 1e3)),
            fidelity=self.fidelity_report(measured, told["damage"].predicted),
            metric={name: self.metric_report(name, measured) for name in measured.metrics},
            techniques=tuple(UsedTechnique(**technique_json(one), why=one.why) for one in plan.techniques),
            plain=PlainReport(
                plain.numbers()["size_bytes"],
                plain.details.cost.known_figures["memory_bytes"],
                plain_latency(self.plain_latency),
            ),
            layers=tuple(LayerReport(**one) for one in plan.details.layers()),
            frontier=tuple(FrontierPoint(**one) for one in plan.details.cost.frontier()),
            exits=measured.exits.as_json() if measured.exits is not None else None,
            healed=self.healed,
            asked={one.name: one.value for one in self.asked.budget.limits()}
            | ({"metric": str(self.asked.floor)} if self.asked.floor is not None else {}),
            missed=tuple(self.missed_limits(measured)),
            notes=(
                *self.source.notes,
                *self.given.notes,
                *plan.details.cost.messages,
                *measured.notes,
                *self.no_smaller(measured.size),
            ),
            files=(TENSORS, MANIFEST),
        )


def plain_latency(found: Latency | None) -> PlainLatency:
    return PlainLatency() if found is None else PlainLatency(1e3 * found.p50, 1e3 * found.p99)


def amount(told: Figures, name: str, times: float = 1.0) -> Amount:
    one = told[name]
    return Amount(*(None if value is None else value * times for value in (one.predicted, one.measured)))


def loaded_model(source: ModelSource, target: Path) -> nn.Module:
    """The folder's model, built by the job; of an ONNX file, the file as onnxruntime runs it."""
    if source.file is not None:
        from shoestring.compression.onnx.file_module import OnnxFileModule

        return OnnxFileModule(target / "model.onnx")
    packed = PackedModel(target)
    trim()  # before a whole model is allocated
    with random_state.fork_rng():
        found = packed.fill(apply_edits(source.job.model(), packed.edits))
    trim()  # frees its initial weights
    return found


def compared_batch(
    job: Job, models: Sequence[nn.Module], batch: Batch, comparison: FidelitySums, notes: list[str]
) -> list[BatchMetrics]:
    """Add one batch's outputs of a compressed model and the original to the comparison; return the metrics of both,
    unless the job validates by itself."""
    with torch.no_grad():
        said = [job.forward(model, batch) for model in models]
        found, wanted = (select_outputs(one, [output.how.name for output in comparison.outputs]) for one in said)
        comparison.add(found, wanted)
        return [batch_metrics(job, one, batch, notes) for one in said] if job.validate is None else []
