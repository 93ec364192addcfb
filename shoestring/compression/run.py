"""A compression as a run in a folder: resumed after a kill, refused to a second process, watched and reported like any
other run.

A killed compression calibrates the model again and arrives at the same weights; a healing is resumed from its last
checkpoint, in a run of its own beside the folder (healing.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from shoestring.compression.arguments import CompressArguments
from shoestring.compression.begin import begin_session, nearest_session
from shoestring.compression.calibration.metric import parse_floor
from shoestring.compression.healing import heal_session
from shoestring.compression.loading.source import ModelSource
from shoestring.compression.onnx.export import ExportedFile
from shoestring.compression.onnx.sized import OnnxFile, onnx_file
from shoestring.compression.report.compress_report import CompressReport
from shoestring.compression.report.sections import compression_page
from shoestring.compression.room import CompressOutcome, CompressPlan
from shoestring.compression.session import CompressOptions, CompressSession
from shoestring.compression.technique import CompressTechnique
from shoestring.core.errors import OverBudget
from shoestring.core.files.codec import Unreadable, finite_json, to_json
from shoestring.core.units import bytes_text
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.events.event import Begun, Finished, Planning, Warned
from shoestring.runs.events.event_log import note
from shoestring.runs.modules import note_modules, refusal
from shoestring.runs.reports.report import Report
from shoestring.runs.resume import OpenedRun, open_run
from shoestring.runs.session import Execution, Session
from shoestring.show.page import page
from shoestring.training.execution.scripts.script_run import request_of

Use = tuple[str | CompressTechnique, ...] | None  # techniques that the user named; a script may name its own
Tell = Callable[[str], None]
ONNX_BITS = (4, 8)  # of ONNX's integers: a plan of 3 bits would store them in 4


def options_of(arguments: CompressArguments, use: Use) -> CompressOptions:
    """The options in parsed form."""
    return CompressOptions(
        arguments.budget(),
        parse_floor(arguments.metric) if arguments.metric else None,
        use,
        arguments.fidelity,
        int(arguments.samples),
        tuple(arguments.output),
        arguments.whole_axis(),
        ONNX_BITS if arguments.to == "onnx" else (),
    )


def held_folder(source: ModelSource, out: Path, arguments: CompressArguments) -> OpenedRun:
    """The locked folder of a compression: a new one, or the existing one if its request is the same."""
    request, job = request_of(source.job, source.model)
    asked = replace(
        request,
        room="compression",
        asked=arguments.as_asked(),
        use=arguments.use,
        weights=weights_sha256(source.model.state_dict()),
    )
    held = open_run(out, asked, job, arguments.fresh, adopt=False, place="--out")
    if left_out := sorted(set(held.request.flags) - set(asked.flags)):
        held.lock.release()
        raise refusal(
            held.folder, [f"--{name} was {held.request.flags[name]} and is not given now" for name in left_out]
        )
    return held


def onnx_session(work: CompressSession, made: ExportedFile, draft: Path) -> CompressSession:
    from shoestring.compression.onnx.onnx_source import session_of_file

    return session_of_file(work, made, draft)


def check_source(source: ModelSource, arguments: CompressArguments) -> None:
    """Refuse options that do not apply to the source."""
    if source.file is not None:
        from shoestring.compression.onnx.onnx_source import check_applies

        check_applies(vars(arguments))


def draw_page(told: Report) -> str:
    """The page of a compression: the model's if it exists, before that the run's."""
    return compression_page(told.of_room) if isinstance(told.of_room, CompressReport) else page(told)


@dataclass(frozen=True)
class CompressResult:
    """The result of a compression."""

    report: CompressReport
    unfinished: ClassVar[bool] = False  # a killed compression starts again


@dataclass
class CompressRun(Execution[CompressPlan, CompressResult]):
    """A compression in a folder that a session holds."""

    keeps_plan: ClassVar[bool] = False

    session: Session
    source: ModelSource
    arguments: CompressArguments
    use: Use  # the technique objects, which only a script has
    say: Tell = lambda text: None  # receives messages
    warn: Tell = lambda text: None
    show: Callable[[CompressSession], None] = lambda work: None  # called with the chosen plan
    doing: Callable[[str], AbstractContextManager[object]] = nullcontext  # entered while something takes long
    work: CompressSession | None = None  # set once there is a plan

    @property
    def folder(self) -> Path:
        return self.session.folder.path

    def begin(self) -> None:
        note(self.folder, Planning())
        for told in self.source.notes:
            note(self.folder, Warned(told))
        if (job := self.source.job.origin) is not None:
            note_modules(self.session.folder, Path(job.file).parent, True, self.warn_and_note, begins=True)

    def read_plan(self, file: Mapping[str, Any]) -> CompressPlan:
        raise Unreadable("a plan of a compression needs what was measured of the model")

    def choose(self) -> CompressOutcome:
        with self.doing("looking at the model"):
            self.work = plan(self.source, options_of(self.arguments, self.use), self.arguments.heal, self.say)
        return self.work.outcome

    def note_plan(self, outcome: CompressOutcome) -> None:
        assert self.work is not None, "it was chosen"
        self.show(self.work)

    def execute(self, plan: CompressPlan) -> CompressResult:
        """Heal, write the model and measure it."""
        work = self.work
        assert work is not None, "there is a plan"
        if self.arguments.heal is not None:
            work = self.heal(work, self.arguments.heal)
        with self.onnx(work) as (work, file, draft):
            note(self.folder, Begun(pid=os.getpid(), steps=1, step=0, how=calibration_text(work)))
            measured = work.write_and_measure(self.folder)
            report = work.report(measured, self.folder)
            if file is not None and self.source.file is None:
                draft.replace(self.folder / "model.onnx")
                onnx = file.report(self.folder / "model.onnx")
                report = replace(report, onnx=onnx, missed=(*report.missed, *file.unmet_limits(work)))
        note(self.folder, Finished(step=1))
        return CompressResult(report)

    def report(self, plan: CompressPlan, ended: CompressResult) -> Mapping[str, Any]:
        found: dict[str, Any] = finite_json(to_json(ended.report))
        return found

    def warn_and_note(self, told: str) -> None:
        note(self.folder, Warned(told))
        self.warn(told)

    def heal(self, work: CompressSession, time: str) -> CompressSession:
        folder = self.folder.with_name(f"{self.folder.name}-healing")
        self.say(f"healing for {time}; kept in {folder}, and the same command goes on with it")
        return heal_session(work, time, folder)

    @contextmanager
    def onnx(self, work: CompressSession) -> Iterator[tuple[CompressSession, OnnxFile | None, Path]]:
        """The draft of the ONNX file, if requested, with the session of its plan, which may be a smaller one because of
        the file's size."""
        draft = self.folder / f"model.onnx.tmp-{os.getpid()}"
        try:
            if self.arguments.to is None and self.source.file is None:
                yield work, None, draft
                return
            with self.doing("writing the ONNX file"):
                smaller, file = onnx_file(work, draft, self.arguments.to == "onnx-int8")
            if smaller.plan is not work.plan:
                self.warn_and_note("a smaller plan was taken, so that the ONNX file keeps --size")
            for told in file.made.notes:
                self.warn_and_note(told)
            yield (smaller if self.source.file is None else onnx_session(smaller, file.made, draft)), file, draft
        finally:
            draft.unlink(missing_ok=True)


def plan(source: ModelSource, options: CompressOptions, heal: str | None, say: Tell) -> CompressSession:
    """The plan. With healing, if only fidelity falls short, the nearest plan, because healing repairs that."""
    if source.file is not None:
        options = replace(options, bits=ONNX_BITS)
    try:
        return begin_session(source, options)
    except OverBudget as error:
        if heal is None or (found := nearest_session(source, options, error)) is None:
            raise
        say(f"{error}; healing may mend that")
        return found


def calibration_text(work: CompressSession) -> str:
    """One line about the calibration."""
    known, given = work.plain.numbers(), work.given
    return (
        f"{len(work.plan.details.allocation)} weights of {work.source.name}, {bytes_text(known['size_bytes'])} as they are, looked at on "
        f"{len(given.calibration)} batches: {work.plan}"
    )
