"""Healing: train the compressed model towards the original's outputs, with the ordinary training loop, and pack it
again in the same formats.

    plan -> formats -> trainable formats -> a run beside the folder: NAME-healing -> formats -> folder

No labels are needed: the loss is the damage itself, plus the distance of hidden states from the original's
(calibration/hidden_states.py). The run has its own folder, so that the same command resumes a healing that was killed;
`shoestring watch` shows it meanwhile.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.compression.calibration.fidelity import BINARY, COSINE, KL, R2
from shoestring.compression.calibration.hidden_states import healing_objective, matching_states
from shoestring.compression.distillation.heal import cosine_decay, healing_job
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.manifest import manifest
from shoestring.compression.formats.packed_modules import SUFFIX, formats_of, place_formats
from shoestring.compression.quantization.trainable import TrainableFormat, trainable_formats
from shoestring.compression.report.compress_report import Healed
from shoestring.compression.room import compressed_model
from shoestring.compression.session import CompressSession
from shoestring.core.errors import Mistake
from shoestring.core.files.files import write_whole
from shoestring.core.files.regular import read_regular
from shoestring.core.files.seal import Damaged, seal, unseal
from shoestring.core.job import Job
from shoestring.core.running.random_state import drawing_apart
from shoestring.core.units import parse_seconds
from shoestring.runs.options import RunOptions
from shoestring.training.execution.scripts.script_steps import kept_steps, steps_here

OBJECTIVES = {COSINE: "cosine", KL: "kl", BINARY: "mse", R2: "mse"}  # measure of an output -> the distillation loss
BEGUN = "begun.json"
RATES = (1.0, 3.0, 10.0)  # factors on the learning rate that a format proposes; each is tried
TRIED = 0.04  # fraction of the steps for each trial;
FEWEST = 8  # with fewer steps, a trial tells nothing


def heal_session(session: CompressSession, time: str, folder: Path) -> CompressSession:
    """The session with weights that were trained towards the original for `time`."""
    seconds = parse_seconds(time)
    plan = session.plan
    forms = {name: one.what.way.form for name, one in plan.details.allocation.items()}
    if not trainable_formats(forms):
        raise Mistake(
            f"--heal trains numbers on grids and plain ones, and {plan} has none of them: heal before it, or leave --heal out"
        )
    lesson = HealingSettings(session, student_of(session, forms), folder)
    job = lesson.begin_job(seconds)
    model = lesson.student()
    kept = RunOptions(run=folder / "run", save_every=f"{max(min(30.0, seconds / 10), 0.001):.3f}s")
    for _ in drawing_apart(kept_steps(job, (), model, kept)):
        pass
    model.cpu()
    session.source.model.cpu()  # the teacher must be on the student's device
    learned = {name: one.pack() if isinstance(one, TrainableFormat) else one for name, one in formats_of(model).items()}
    return with_forms(session, learned, seconds, job.steps, folder)


def student_of(session: CompressSession, forms: dict[str, WeightFormat]) -> Callable[[], nn.Module]:
    """A factory that always makes the same trainable model, because a resumed run makes it again."""
    study = session.plan.details.cost.study
    base = copy.deepcopy(study.model)

    def make_student() -> nn.Module:
        trainable = trainable_formats(forms)
        model = place_formats(
            copy.deepcopy(base), {**{name: copy.deepcopy(form) for name, form in forms.items()}, **trainable}
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[0].endswith(SUFFIX))
        return answering(model)

    return make_student


def answering(model: nn.Module) -> nn.Module:
    """The model, fixed in evaluation mode during training: random dropout and new batch norm statistics would not be
    packed."""
    model.eval()
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    return model


@dataclass(frozen=True)
class HealingSettings:
    """The settings of a healing: number of steps, and learning rate."""

    session: CompressSession
    student: Callable[[], nn.Module]
    folder: Path

    def begin_job(self, seconds: float) -> Job:
        """The healing's job, determined once: other timings and trials would lead to other weights."""
        plan = digest(self.session, seconds)
        kept = kept_beginning(self.folder, plan)
        if kept is None:
            kept = {"plan": plan, **self.choose_settings(seconds)}
            write_whole(self.folder / BEGUN, seal(kept))
        return self.job(kept["rate"], kept["objective"], steps=kept["steps"])

    def choose_settings(self, seconds: float) -> dict[str, Any]:
        """What to learn, the number of steps, and the learning rate, found by trying each rate for a few steps."""
        source, batch = self.session.source, self.session.given.calibration[0]
        states = matching_states(
            self.student(), source.model, source.job.forward, batch, self.session.plan.details.cost.about["edits"]
        )
        wanted = healing_objective(OBJECTIVES[self.session.plan.details.cost.study.measures[0].measure], states)
        steps = self.job(1.0, wanted, seconds=seconds).steps
        few = int(TRIED * steps)
        if few < FEWEST:
            return {"steps": steps, "rate": 1.0, "objective": wanted}
        tried = {rate: self.damage_after(self.job(rate, wanted, steps=few)) for rate in RATES}
        return {
            "steps": steps - few * len(RATES),
            "rate": min(tried, key=lambda rate: tried[rate]),
            "objective": wanted,
        }

    def damage_after(self, job: Job) -> float:
        """The damage after a trial."""
        model = self.student()
        for _ in drawing_apart(steps_here(job, (), model)):
            pass
        study, batches = self.session.plan.details.cost.study, self.session.given.checked
        return study.comparison(batches, model.cpu(), self.session.source.model.cpu()).fidelity.damage

    def job(self, rate: float, wanted: str, steps: int = 0, seconds: float = 0.0) -> Job:
        source = self.session.source
        rates = {
            f"{name}{SUFFIX}.{part}": rate * each
            for name, form in formats_of(self.student()).items()
            if isinstance(form, TrainableFormat)
            for part, each in form.learning_rates().items()
        }

        def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            groups = [{"params": [one], "lr": rates[name]} for name, one in named_parameters]
            return torch.optim.Adam(groups, betas=(0.9, 0.98))

        job = healing_job(
            source.job, lambda: source.model, self.student, objective=wanted, lr=1e-4, steps=steps, seconds=seconds
        )
        return replace(
            job,
            optimizer=optimizer,
            schedule=cosine_decay,
            held_out=None,
            metrics=None,
            validate=None,
            goal="min loss",
            origin=None,
        )


def digest(session: CompressSession, seconds: float) -> str:
    """A digest of the healing's start: packed weights, formats and duration. That the job's modules are unchanged is
    checked where the run's folder is opened."""
    plan = session.plan
    about = dict(plan.details.cost.about)
    if about.get("job"):
        about["job"] = {**about["job"], "modules": {}}
    found = hashlib.sha256(manifest(about, plan.details.cost.specs(plan.details.allocation), plan.details.cost.buffers))
    found.update(f"{[one.measure for one in plan.details.cost.study.measures]} {seconds}".encode())
    for one in plan.details.allocation.values():
        for tensor in one.what.way.form.tensors().values():
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def kept_beginning(folder: Path, plan: str) -> dict[str, Any] | None:
    """The settings of a healing that was started here; None if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        kept = unseal(read_regular(folder / BEGUN))[0]
    except FileNotFoundError:
        return None
    except Damaged as error:
        raise Mistake(f"{folder / BEGUN} is damaged ({error}): remove {folder} to heal anew") from error
    if kept.get("plan") != plan:
        raise Mistake(
            f"{folder} holds the healing of another plan or of another time (a latency that was asked for is measured, so its "
            f"plan may come out otherwise): remove it to heal anew, or name another folder with --out"
        )
    if (
        type(kept.get("steps")) is not int
        or not 0 < kept["steps"] < 1 << 40
        or not isinstance(kept.get("objective"), str)
        or not (isinstance(kept.get("rate"), float) and 0 < kept["rate"] < float("inf"))
    ):
        raise Mistake(f"{folder / BEGUN} has impossible content ({str(kept)[:120]}): remove {folder} to heal anew")
    return kept


def with_forms(
    session: CompressSession, learned: dict[str, WeightFormat], seconds: float, steps: int, folder: Path
) -> CompressSession:
    """The session with other numbers in the same formats."""
    plan, study, batches = session.plan, session.plan.details.cost.study, session.given.checked
    made = plan.with_details(learned=learned)
    found = study.comparison(batches, compressed_model(made).model, session.source.model).fidelity
    before = plan.details.checked.mean if plan.details.checked is not None else plan.predicted["quality"]
    chosen = made.predicting(quality=found.mean, damage=found.damage).with_details(checked=found)
    return replace(
        session,
        outcome=replace(session.outcome, chosen=chosen),
        healed=Healed(seconds, steps, before, found.mean, str(folder)),
    )
