"""shoestring export: a run's weights or figures in other formats."""

from __future__ import annotations

from shoestring.core.arguments import argument, dataclass
from shoestring.core.errors import Mistake
from shoestring.core.exit_codes import DONE
from shoestring.core.suggest import did_you_mean
from shoestring.show.output import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from shoestring.core.command import Call
    from shoestring.core.job import Job
    from shoestring.runs.checkpoints import RunCheckpoint
    from shoestring.runs.folder import Folder


@dataclass(frozen=True)
class ExportCommand:
    run: str = argument("run", "folder of a run", positional=True)
    job: str | None = argument(
        "FILE",
        "for hf, peft and onnx: the run's job, a file or a built-in one, with its flags; a file that a run names is never executed",
    )
    to: str = argument(
        "",
        "safetensors: the weights; hf: a folder for from_pretrained; peft: the low-rank adapter of LowRank; "
        "onnx: a file for onnxruntime (onnx-int8: with int8 products); csv: the steps; json: the whole report",
        choices=("safetensors", "hf", "peft", "onnx", "onnx-int8", "csv", "json"),
        required=True,
    )
    out: str | None = argument("PATH", "output path (default: RUN/export.KIND)")
    trained: bool = argument("", "the trained weights instead of their averages (EMA)", False)
    step: int | None = argument("STEP", "the checkpoint of this step (default: the newest good one)", read=int)
    best: bool = argument("", "the weights that were best in validation, by the job's goal", False)


def run(asked: ExportCommand, call: Call) -> int:
    from shoestring.show.watch.places import is_run

    if asked.best and (asked.step is not None or asked.to in ("csv", "json")):
        raise Mistake(
            "--best names the weights to export: give it without --step, and with --to safetensors, hf or onnx"
        )
    if call.words and not asked.job:
        meant = did_you_mean(call.words[0].partition("=")[0], call.own_flags)
        raise Mistake(
            f"{call.words[0]!r} is no option of export{meant}; flags of the run's job are given with --job FILE"
        )
    if not is_run(asked.run):
        raise Mistake(f"{asked.run} is not a run of shoestring: give the folder that `shoestring train` named")
    import json
    from pathlib import Path

    from shoestring.runs.export import export_steps
    from shoestring.runs.folder import Folder

    folder = Folder(Path(asked.run))
    warn(privacy_notes(folder))
    ends = {"hf": "-hf", "peft": "-peft", "onnx-int8": "-int8.onnx"}  # of a folder, or a file
    usual = f"export{ends.get(asked.to, f'.{asked.to}')}"
    target = Path(asked.out) if asked.out else folder.path / usual
    if asked.to not in ("csv", "json"):
        return weights(asked, call, folder, target)
    made, damage = export_steps(folder, asked.to, target)
    warn(damage)
    print(json.dumps({"path": str(made)}) if call.json else f"written: {made}")
    return DONE


def privacy_notes(folder: Folder) -> list[str]:
    """A remark if the run's noise follows from a seed, to go with its weights and figures."""
    from shoestring.federated.techniques.private.release import NOT_PRIVATE

    request = folder.request()
    return [NOT_PRIVATE] * (request is not None and request.asked.get("insecure_seed") is not None)


def weights(asked: ExportCommand, call: Call, folder: Folder, target: Path) -> int:
    import json

    from shoestring.runs.export import (
        best_weights,
        checkpoint_of,
        export_hugging_face,
        export_peft,
        export_weights,
        newer_weights,
        not_in_file,
    )

    checkpoint = best_weights(folder) if asked.best else checkpoint_of(folder, asked.step)
    unnamed = ""
    if asked.to == "safetensors":
        names, unnamed = names_of_model(asked, call, folder, checkpoint)
        made = export_weights(checkpoint, target, names, asked.trained)
    else:
        job = job_of(asked, call, folder)
        if asked.to.startswith("onnx"):
            return onnx_file(asked, call, folder, checkpoint, job, target)
        made = (export_hugging_face if asked.to == "hf" else export_peft)(checkpoint, job, target, asked.trained)
    newer = "" if asked.step is not None or asked.best else newer_weights(folder, checkpoint)
    more = "; ".join(filter(None, (newer, not_in_file(checkpoint), unnamed)))
    warn([more] if more else [])
    told = {"path": str(made), "step": checkpoint.step} | ({"warning": more} if more else {})
    which = ", the best in validation" if asked.best else ""
    print(json.dumps(told) if call.json else f"written: {made}, the weights after step {checkpoint.step}{which}")
    return DONE


def job_of(asked: ExportCommand, call: Call, folder: Folder) -> Job:
    """The job that the user names for a run."""
    from shoestring.jobfile import job_path, parsed_flags
    from shoestring.processes.named_job import claim_of_run, named_job

    flags = parsed_flags(job_path(asked.job), call.words, call.own_flags) if asked.job else {}
    job, notes = named_job(claim_of_run(folder), asked.job, flags)
    warn(notes)
    return job


def onnx_file(
    asked: ExportCommand, call: Call, folder: Folder, checkpoint: RunCheckpoint, job: Job, target: Path
) -> int:
    """Export the job's model with a checkpoint's weights as an ONNX file, which is run and compared."""
    import json

    from shoestring.compression.onnx.export import export_onnx
    from shoestring.compression.source import model_of_checkpoint, prepare_model, samples_of
    from shoestring.core.extras import require
    from shoestring.runs.export import new, newer_weights

    require("onnx")
    new(target)
    fast = asked.to == "onnx-int8"
    given = samples_of(job, 2)
    made = export_onnx(
        prepare_model(model_of_checkpoint(job, checkpoint, asked.trained)),
        job.forward,
        given.unseen[0],
        target,
        fast=fast,
        calibration=given.calibration if fast else (),
    )
    newer = "" if asked.step is not None or asked.best else newer_weights(folder, checkpoint)
    warn([*([newer] if newer else []), *made.notes])
    told = {
        "path": str(made.path),
        "step": checkpoint.step,
        "bytes": made.bytes,
        "tolerance": made.tolerance,
        "largest_difference": made.largest_difference,
        "notes": list(made.notes),
    }
    print(
        json.dumps(told)
        if call.json
        else f"written: {made.path}, {made.bytes:,} bytes, the weights after step {checkpoint.step}"
    )
    return DONE


def names_of_model(
    asked: ExportCommand, call: Call, folder: Folder, checkpoint: RunCheckpoint
) -> tuple[frozenset[str] | None, str]:
    """The names of the model's state_dict for a checkpoint of an earlier version, which does not record them; and a
    remark if the model can't be made."""
    from shoestring.runs.export import tells_names, weights_of_model

    if tells_names(checkpoint):
        return None, ""
    try:
        return weights_of_model(job_of(asked, call, folder).model), ""
    except Exception as error:  # whatever the job's own code raises
        return None, (
            f"the checkpoint is of an earlier version and the job's model could not be made ({error}): buffers that are not in "
            f"its state_dict may be in the file; load it with strict=False"
        )
