"""shoestring export: the weights or the course of a run in other people's formats."""

from __future__ import annotations

from shoestring.commands import DONE
from shoestring.commands.output import warn
from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path

    from shoestring.core.job import Job
    from shoestring.runs.checkpoints import RunCheckpoint
    from shoestring.runs.folder import Folder

name = "export"
help = "the weights or the course of a run in other people's formats"


def flags(parser: ArgumentParser) -> None:
    parser.set_defaults(job_words=[], own_flags=[], given=set())
    parser.add_argument("run", help="folder of a run")
    parser.add_argument(
        "--job",
        metavar="FILE",
        help="for hf, peft and onnx: the job that the run was trained with, a file or a built-in "
        "one, and its flags; no file that a run names is ever run",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=["safetensors", "hf", "peft", "onnx", "onnx-int8", "csv", "json"],
        help="safetensors: the weights; hf: a folder for from_pretrained; peft: what LowRank "
        "trained, as an adapter; onnx: a file for onnxruntime (onnx-int8: with products of "
        "whole numbers); csv: steps; json: all that happened",
    )
    parser.add_argument("--out", metavar="PATH", help="where to (default: RUN/export.KIND)")
    parser.add_argument(
        "--trained", action="store_true", help="the weights that were trained, where the run averaged them (EMA)"
    )
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest good one)")
    parser.add_argument(
        "--best", action="store_true", help="the weights that were best in validation, by the job's goal"
    )


def run(options: Namespace) -> int:
    from shoestring.show.watch.places import is_run

    if options.best and (options.step is not None or options.to in ("csv", "json")):
        raise Mistake(
            "--best names the weights to export: give it without --step, and with --to safetensors, hf or onnx"
        )
    if options.job_words and not options.job:
        meant = did_you_mean(options.job_words[0].partition("=")[0], options.own_flags)
        raise Mistake(
            f"{options.job_words[0]!r} is no option of export{meant}; flags of the run's job are given with --job FILE"
        )
    if not is_run(options.run):
        raise Mistake(f"{options.run} is not a run of shoestring: give the folder that `shoestring train` named")
    import json
    from pathlib import Path

    from shoestring.runs.export import export_steps
    from shoestring.runs.folder import Folder

    folder = Folder(Path(options.run))
    ends = {"hf": "-hf", "peft": "-peft", "onnx-int8": "-int8.onnx"}  # of a folder, or a file
    usual = f"export{ends.get(options.to, f'.{options.to}')}"
    target = Path(options.out) if options.out else folder.path / usual
    if options.to not in ("csv", "json"):
        return weights(options, folder, target)
    made, damage = export_steps(folder, options.to, target)
    warn(damage)
    print(json.dumps({"path": str(made)}) if options.json else f"written: {made}")
    return DONE


def weights(options: Namespace, folder: Folder, target: Path) -> int:
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

    checkpoint = best_weights(folder) if options.best else checkpoint_of(folder, options.step)
    unnamed = ""
    if options.to == "safetensors":
        names, unnamed = names_of_model(options, folder, checkpoint)
        made = export_weights(checkpoint, target, names, options.trained)
    else:
        job = job_of(options, folder)
        if options.to.startswith("onnx"):
            return onnx_file(options, folder, checkpoint, job, target)
        made = (export_hugging_face if options.to == "hf" else export_peft)(checkpoint, job, target, options.trained)
    newer = "" if options.step is not None or options.best else newer_weights(folder, checkpoint)
    more = "; ".join(filter(None, (newer, not_in_file(checkpoint), unnamed)))
    warn([more] if more else [])
    told = {"path": str(made), "step": checkpoint.step} | ({"warning": more} if more else {})
    which = ", the best in validation" if options.best else ""
    print(json.dumps(told) if options.json else f"written: {made}, the weights after step {checkpoint.step}{which}")
    return DONE


def job_of(options: Namespace, folder: Folder) -> Job:
    """The job that the user names for a run."""
    from shoestring.jobfile import job_path, parsed_flags
    from shoestring.processes.named_job import claim_of_run, named_job

    flags = parsed_flags(job_path(options.job), options.job_words, options.own_flags) if options.job else {}
    job, notes = named_job(claim_of_run(folder), options.job, flags)
    warn(notes)
    return job


def onnx_file(options: Namespace, folder: Folder, checkpoint: RunCheckpoint, job: Job, target: Path) -> int:
    """The job's model with the weights of a checkpoint, as an ONNX file that was run and compared."""
    import json

    from shoestring.compression.onnx.export import export_onnx
    from shoestring.compression.source import model_of_checkpoint, prepare_model, samples_of
    from shoestring.core.extras import require
    from shoestring.runs.export import new, newer_weights

    require("onnx")
    new(target)
    fast = options.to == "onnx-int8"
    given = samples_of(job, 2)
    made = export_onnx(
        prepare_model(model_of_checkpoint(job, checkpoint, options.trained)),
        job.forward,
        given.unseen[0],
        target,
        fast=fast,
        calibration=given.calibration if fast else (),
    )
    newer = "" if options.step is not None or options.best else newer_weights(folder, checkpoint)
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
        if options.json
        else f"written: {made.path}, {made.bytes:,} bytes, the weights after step {checkpoint.step}"
    )
    return DONE


def names_of_model(options: Namespace, folder: Folder, checkpoint: RunCheckpoint) -> tuple[frozenset[str] | None, str]:
    """The names of the model's state_dict for a checkpoint of an earlier version, which does not tell them, and what is to be said where
    the model can't be made."""
    from shoestring.runs.export import tells_names, weights_of_model

    if tells_names(checkpoint):
        return None, ""
    try:
        return weights_of_model(job_of(options, folder).model), ""
    except Exception as error:  # whatever the job's own code raises
        return None, (
            f"the checkpoint is of an earlier version and the job's model could not be made ({error}): buffers that are not in "
            f"its state_dict may be in the file; load it with strict=False"
        )
