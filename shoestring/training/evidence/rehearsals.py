"""Rehearsals of a job, on fake tensors if those can run it, else on real ones: in a child process, or here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake, error_sentence, first_line
from shoestring.core.files.codec import to_json
from shoestring.core.job import Job
from shoestring.core.private import load_compiler
from shoestring.core.running import random_state
from shoestring.core.user_code.foreign import copy_module
from shoestring.core.workers.mesh import Mesh, imagined_mesh
from shoestring.data.lengths import STATED, Lengths
from shoestring.measure.fake import LooksAtValues
from shoestring.measure.process import memory_free
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import Log
from shoestring.planning.answers import MeasuredAnswers
from shoestring.planning.plan import techniques_text
from shoestring.processes.standstill import NoAnswer
from shoestring.processes.task import R, Task, Worker
from shoestring.training.catalogue import close_environment
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.evidence.step import half_log, mesh_of_largest, traits_of
from shoestring.training.evidence.tasks import Position, RehearseTask, specs_of
from shoestring.training.group_technique import mesh_sizes, uniting
from shoestring.training.technique import TrainingTechnique as Technique

COPIES = 8  # real steps in this process need room for so many times the weights: gradients, moments, activations
CLOSE = 0.8  # fraction of the largest peak: batches that need less are not rehearsed again
PATIENCE = 40.0  # seconds: a real step that is expected to take longer is not run
Tell = Callable[[str], None]


class NoRoom(Mistake):
    """Fake tensors can't run a model, and this process has no room to try it."""


def silent(doing: str) -> None:
    """A `Tell` that prints nothing."""


@dataclass
class Rehearsals:
    """A job, the machine, the worker that runs tasks, and what rehearsing this job has shown."""

    job: Job
    hardware: Hardware
    worker: Worker | None = (
        None  # runs tasks of a job file in a child process, or in as many as will train; None: all runs here
    )
    model: nn.Module | None = None  # use this model object instead of the job's factory
    real: bool = False  # whether plain steps, and so all others, need real tensors
    guessed: str = ""  # why fake tensors can't run the model
    measured: set[tuple[Technique, ...]] = field(default_factory=set)  # plans rehearsed on real tensors
    lengths: Lengths = field(default_factory=Lengths)  # sizes of the job's batches, as far as known
    # If several batches may be the one that needs most: (job planned for it, its number); `job` is the first of them
    candidates: tuple[tuple[int, Job], ...] = ()
    kept: MeasuredAnswers | None = None  # results of earlier plannings of this job; None: they can't be looked up
    tell: Tell = silent  # receives progress messages

    def log(self, techniques: tuple[Technique, ...], rank: int | None = None) -> Log:
        """The log of a rehearsal with the batch that needs most; of the worker that needs most, or the one with this
        rank."""
        if len(self.candidates) < 2:
            return self.log_of(self.job, self.numbers, techniques, rank)
        logs = [self.log_of(job, (number,), techniques, rank) for number, job in self.candidates]
        needs = [peak(log).bytes for log in logs]
        most = max(needs)
        if not techniques:  # a batch that needs far less in a plain step will do so under every plan
            ranked = sorted(zip(needs, self.candidates, strict=True), key=lambda one: -one[0])
            self.candidates = tuple(candidate for need, candidate in ranked if need >= CLOSE * most)
            self.job = self.candidates[0][1]
        return logs[needs.index(most)]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the planned batches, to tell a worker; empty if it knows them from the job."""
        return tuple(number for number, _ in self.candidates if number != STATED)

    def log_of(self, job: Job, numbers: tuple[int, ...], techniques: tuple[Technique, ...], rank: int | None) -> Log:
        place = job.link
        if rank is None and any(technique.serves for technique in uniting(techniques)):
            rank = place.world - 1
        if rank is not None:
            mesh = imagined_mesh(mesh_sizes(techniques, place.world), rank, place.same_machine, place.speeds)
        elif any(technique.across for technique in uniting(techniques)):
            mesh = mesh_of_largest(job, techniques, place)
        else:
            mesh = imagined_mesh(job.mesh.sizes, place.rank, place.same_machine, place.speeds)
        if not self.real:
            try:
                return self.rehearse_or_recall(replace(job, mesh=mesh), techniques, half=False, numbers=numbers)
            except Mistake:
                raise
            except Exception as error:
                if techniques and not isinstance(error, LooksAtValues):
                    raise
                self.guessed = first_line(error) if isinstance(error, LooksAtValues) else error_sentence(error)
                self.real = not techniques  # if plain steps run on fake tensors, other plans may too
        self.measured.add(techniques)
        if self.worker is not None:
            stands = {"position": position_of(mesh), "largest": numbers}
            return self.ask_worker(
                RehearseTask(**self.about_job(techniques) | stands),
                close_environment(),
                f"rehearsing {techniques_text(techniques)} on real tensors, because fake ones can't run it",
            )
        return self.log_here(replace(job, mesh=mesh), techniques)

    def half_log(self, techniques: tuple[Technique, ...] = ()) -> Log:
        """The log of one step with half the batch, on fake tensors."""
        return self.rehearse_or_recall(self.job, techniques, half=True, numbers=self.numbers[:1])

    def rehearse_or_recall(
        self, job: Job, techniques: tuple[Technique, ...], half: bool, numbers: tuple[int, ...]
    ) -> Log:
        """The log of a rehearsal on fake tensors, run only if it is not kept; `numbers`: of the batches it is planned
        for."""

        def work() -> Log:
            self.tell(f"rehearsing {techniques_text(techniques)} on fake tensors" + " with half the batch" * half)
            load_compiler()
            on_device = self.hardware.device != "cpu"
            return (
                half_log(job, techniques, self.model)
                if half
                else rehearse(job, techniques, model=self.model, on_device=on_device)
            )

        if self.kept is None:
            return work()
        place = position_of(job.mesh)
        question = {
            "rehearsal": to_json(specs_of(techniques)),
            "half": half,
            "position": to_json(place),
            "largest": list(numbers),
        }
        return self.kept.answer(question, Log, work)

    def traits(self, plain: Log) -> set[str]:
        """Traits of the model and the job that techniques depend on, as far as the log of plain steps shows them."""

        def work() -> set[str]:
            return traits_of(self.job, plain, self.worker is not None)

        return work() if self.kept is None else self.kept.answer({"traits": self.worker is not None}, set[str], work)

    def ask_worker(self, task: Task[R], environment: Mapping[str, str], doing: str) -> R:
        """The result of a task, run by the worker if it is not kept; `doing` is the progress message for that."""
        assert self.worker is not None, "there is a worker for tasks"
        worker = self.worker

        def work() -> R:
            self.tell(doing)
            try:
                return worker(task, environment)
            except NoAnswer as error:
                raise NoAnswer(f"{doing}: {error}") from error

        if self.kept is None:
            return work()
        question = {"task": task.kind, "environment": dict(environment)} | to_json(task)
        return self.kept.by_worker(question, task.result, work)  # type: ignore[no-any-return]

    def log_here(self, job: Job, techniques: tuple[Technique, ...]) -> Log:
        """The log of real steps in this process, of a copy of the model; refused if that might not fit."""
        with random_state.fork_rng(), as_found(job):
            if COPIES * self.weights() > memory_free():
                raise NoRoom(
                    f"the model can't be planned on fake tensors ({self.guessed}), and this process has no room to try it: write "
                    f"a job file, so that it can be tried elsewhere"
                )
            model = self.model_to_try()
            random_state.seed(job.seed)
            return track(job, techniques, model, original=self.model)

    def weights(self) -> int:
        """Bytes of the model's weights; 0 if only constructing it would tell."""
        if self.model is not None:
            return sum(one.nbytes for one in self.model.parameters())
        with suppress(Exception), torch.device("meta"):
            return sum(one.nbytes for one in self.job.model().parameters())
        return 0

    def model_to_try(self) -> nn.Module:
        random_state.seed(self.job.seed)
        return self.job.model() if self.model is None else copy_module(self.model, {})

    def fits_here(self, plain: Log) -> bool:
        """Whether real passes over the model are affordable in this process; `plain` is the log of plain steps."""
        if self.hardware.described:  # another machine, whose speed is not this one's
            return False
        seconds = sum(plain.flops.values()) / self.hardware.flops
        return 2 * peak(plain).bytes + 1e9 < 0.8 * memory_free() and 2 * seconds < PATIENCE

    def about_job(self, techniques: tuple[Technique, ...] = ()) -> dict[str, Any]:
        """The fields that every task about this job has in common."""
        assert self.job.origin is not None, "only a job from a file can be made again in a child process"
        return {
            "file": self.job.origin.file,
            "flags": dict(self.job.origin.flags),
            "techniques": specs_of(techniques),
            "position": position_of(self.job.mesh),
            "largest": self.numbers,
        }

    def how_real(self) -> str:
        """The basis of a figure that was measured on real tensors, as a sentence."""
        batches = "the first batches" if self.job.largest is None else "the largest batch"
        return f"measured on real tensors and {batches} alone, because fake ones could not run it ({self.guessed})"


def position_of(mesh: Mesh) -> Position:
    """A worker's position, for a process that makes its mesh again from its techniques."""
    return Position(mesh.link.rank, mesh.world, mesh.link.same_machine, mesh.sizes.get("stage", 1), mesh.link.speeds)
