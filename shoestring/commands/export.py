"""shoestring export: a run's weights or figures in other formats."""

from __future__ import annotations

from shoestring.core.command_line.arguments import argument, dataclass
from shoestring.core.command_line.command import ExportFormat, named_object
from shoestring.core.command_line.exit_codes import DONE
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.rooms import installed_rooms, room_entries, room_named
from shoestring.show.output import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.runs.folder import Folder

COURSE = ("csv", "json")  # what happened, and no weights
EVERY_RUN = (
    ExportFormat("safetensors", "the weights", ".safetensors", "shoestring.runs.reports.export:export_safetensors"),
    ExportFormat("hf", "a folder for from_pretrained", "-hf", "shoestring.runs.reports.export:export_hugging_face"),
)


def known_formats() -> dict[str, ExportFormat]:
    """The formats of weights by name; ours, which come first, can't be replaced."""
    found: dict[str, ExportFormat] = {}
    for one in (*EVERY_RUN, *(one for room in installed_rooms() for one in room.exports())):
        found.setdefault(one.name, one)
    return found


FORMATS = known_formats()


@dataclass(frozen=True)
class ExportCommand:
    run: str = argument("run", "folder of a run", positional=True)
    job: str | None = argument(
        "FILE",
        "where the format needs the model: the job that the run was trained with, a file or a built-in one, and its flags; no file "
        "that a run names is ever run",
    )
    to: str = argument(
        "",
        "; ".join(f"{one.name}: {one.help}" for one in FORMATS.values()) + "; csv: steps; json: all that happened",
        choices=(*FORMATS, *COURSE),
        required=True,
    )
    out: str | None = argument("PATH", "output path (default: RUN/export.KIND)")
    trained: bool = argument("", "the trained weights instead of their averages (EMA)", False)
    step: int | None = argument("STEP", "the checkpoint of this step (default: the newest good one)", read=int)
    best: bool = argument("", "the weights that were best in validation, by the job's goal", False)


def run(asked: ExportCommand, call: Call) -> int:
    from shoestring.show.watch.places import is_run

    if asked.best and (asked.step is not None or asked.to in COURSE):
        raise Mistake(f"--best names the weights to export: give it without --step, and with --to {', '.join(FORMATS)}")
    if call.words and not asked.job:
        meant = did_you_mean(call.words[0].partition("=")[0], call.own_flags)
        raise Mistake(
            f"{call.words[0]!r} is no option of export{meant}; flags of the run's job are given with --job FILE"
        )
    if not is_run(asked.run):
        raise Mistake(f"{asked.run} is not a run of shoestring: give the folder of one")
    import json
    from pathlib import Path

    from shoestring.runs.folder import Folder
    from shoestring.runs.reports.export import export_steps

    folder = Folder(Path(asked.run))
    warn(cautions(folder))
    ending = FORMATS[asked.to].ending if asked.to in FORMATS else f".{asked.to}"
    target = Path(asked.out) if asked.out else folder.path / f"export{ending}"
    if asked.to in FORMATS:
        return weights(asked, call, folder, target)
    made, damage = export_steps(folder, asked.to, target)
    warn(damage)
    print(json.dumps({"path": str(made)}) if call.json else f"written: {made}")
    return DONE


def cautions(folder: Folder) -> tuple[str, ...]:
    """What the run's room has to say wherever its weights or figures go."""
    request = folder.request()
    return room_named(request.room).cautions(request) if request is not None and request.room in room_entries() else ()


def weights(asked: ExportCommand, call: Call, folder: Folder, target: Path) -> int:
    import json
    from functools import partial

    from shoestring.runs.reports.export import Exported, WeightsExport, best_weights, checkpoint_of, newer_weights

    checkpoint = best_weights(folder) if asked.best else checkpoint_of(folder, asked.step)
    job = partial(job_of, asked, call, folder)
    made: Exported = named_object(FORMATS[asked.to].write)(WeightsExport(checkpoint, job, target, asked.trained))
    newer = "" if asked.step is not None or asked.best else newer_weights(folder, checkpoint)
    notes = [*filter(None, [newer]), *made.notes]
    warn(notes)
    told = {"path": str(made.path), "step": checkpoint.step, **made.about, "notes": notes}
    size = f", {made.about['bytes']:,} bytes" if "bytes" in made.about else ""
    which = ", the best in validation" if asked.best else ""
    print(
        json.dumps(told)
        if call.json
        else f"written: {made.path}{size}, the weights after step {checkpoint.step}{which}"
    )
    return DONE


def job_of(asked: ExportCommand, call: Call, folder: Folder) -> Job:
    """The job that the user names for a run."""
    from shoestring.jobfile import job_path, parse_flags
    from shoestring.processes.named_job import claim_of_run, named_job

    flags = parse_flags(job_path(asked.job), call.words, call.own_flags) if asked.job else {}
    job, notes = named_job(claim_of_run(folder), asked.job, flags)
    warn(notes)
    return job
