"""The library function `shoestring.compress`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.arguments import CompressArguments
from shoestring.compression.loading.load import load
from shoestring.compression.loading.source import (
    ModelSource,
    copy_every_model,
    copy_model,
    from_onnx,
    from_weights,
    is_run,
    job_file_entries,
    open_source,
    prepare_model,
)
from shoestring.compression.loading.weight_source import is_onnx, is_weights, job_needed
from shoestring.compression.run import CompressRun, check_source, draw_page, held_folder, options_of
from shoestring.compression.session import loaded_model
from shoestring.compression.technique import CompressTechnique
from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running.random_state import fork_rng as random_state_kept
from shoestring.core.technique import text
from shoestring.processes.named_job import Named
from shoestring.runs.session import Session
from shoestring.runs.weights.initial_weights import fresh_model

__all__ = ["Smaller", "compress", "load"]


@dataclass(frozen=True)
class Smaller:
    """A compressed model."""

    model: nn.Module = field(repr=False)  # computes from packed weights, as returned by `shoestring.load(folder)`
    folder: Path
    report: Mapping[str, Any] = field(repr=False)  # everything that `shoestring compress --json` prints


@speaking_of_arguments()
@random_state_kept()
def compress(
    source: Job | str | Path,
    out: str | Path,
    *,
    job: Named | None = None,
    size: str | int | None = None,
    latency: str | float | None = None,
    keep: str | float | None = None,
    metric: str | None = None,
    use: Iterable[str | CompressTechnique] | None = None,
    fidelity: str = "auto",
    output: str | Iterable[str] = (),
    axis: int | None = None,
    samples: int = 1024,
    heal: str | None = None,
    to: str | None = None,
    newest: bool = False,
    fresh: bool = False,
    model: nn.Module | None = None,
    **flags: Any,
) -> Smaller:
    """Compress a model within limits on size, latency and quality, and write it to the folder `out`.

        small = shoestring.compress(job, "small", size="16MB", keep=0.998, model=trained)
        print(small.report["fidelity"]["mean"])

    source      a Job, the path of a job file, the name of a built-in one, or the folder of a run; `flags` are the file's own. With job=:
                weights, as a safetensors file, a state dict that torch.save wrote, a Hugging Face folder, or an ONNX file
    job         for a run or weights: the job file, a Job, or a function that returns one; it makes the model and its data.
                A run of a built-in job needs none; a job file that a run names is not executed. Number flags are the run's, text flags must
                be given again
    size, latency, keep    limits: bytes on disk, latency of one sample (99th percentile), least fidelity on unseen data
    metric      bound on a metric of the job: "accuracy>=0.91"
    use         exactly these techniques instead of choosing: ["Quantize(bits=4)"]
    fidelity    how outputs are compared: "cosine", "kl", "binary" or "r2"; "auto": inferred for each output from the job's loss
    output      names of the outputs to compare; default: all. The most damaged one counts
    axis        an output's axis of classes, or of its vectors, if the inferred one is wrong
    samples     number of samples for the report, on which nothing was chosen
    heal        train the small model towards the original for this time ("10m"), without labels; its run is stored beside `out`
    to          also write an ONNX file into the folder: "onnx", or "onnx-int8" for int8 products
    newest      use a run's newest weights instead of those that were best in validation
    fresh       start over in `out`, and rename what is there. Without it, the same call resumes a compression that was killed,
                and returns a finished one unchanged
    model       the trained model, if the job does not make it; it is not changed. For weights: the model that they belong to,
                whose own weights are ignored

    Raises Mistake if something can't work, and OverBudget if nothing fits.
    """
    given = None if use is None else tuple(use)
    arguments = CompressArguments(
        size=size,
        latency=latency,
        keep=keep,
        metric=metric,
        fidelity=fidelity,
        output=(output,) if isinstance(output, str) else tuple(output),
        axis=axis,
        use=None if given is None else tuple(one if isinstance(one, str) else text(one) for one in given),
        heal=heal,
        to=to,
        newest=newest,
        samples=samples,
        fresh=fresh,
    )
    arguments.check()
    options_of(arguments, given)  # reports a mistake in it now
    found = source_of(source, model, flags, job, newest)
    check_source(found, arguments)
    with Session(held_folder(found, Path(out), arguments), draw_page, by_script=True) as session:
        played = session.play(CompressRun(session, found, arguments, given))
        assert played.report is not None, "a compression that ends is finished"
        return Smaller(loaded_model(found, Path(out)), Path(out), played.report)


def source_of(
    job: Job | str | Path,
    model: nn.Module | None,
    flags: Mapping[str, Any],
    of_run: Named | None = None,
    newest: bool = False,
) -> ModelSource:
    if of_run is not None and (
        isinstance(job, Job) or not (is_run(str(job)) or is_weights(str(job)) or is_onnx(str(job)))
    ):
        raise Mistake("job= makes the model of a run, or of weights: give those first, or one job alone")
    if not isinstance(job, Job) and (is_weights(str(job)) or is_onnx(str(job))):
        if of_run is None:
            raise job_needed(str(job), "job=")
        if is_onnx(str(job)):
            if model is not None:
                raise Mistake("model= makes the model of weights, and an ONNX file has its own: leave model= out")
            return from_onnx(str(job), of_run, flags)
        return from_weights(str(job), of_run, flags, model)
    if not isinstance(job, Job):
        found = open_source(str(job), flags, not newest, of_run)
        return found if model is None else replace(found, model=prepare_model(copy_model(model)), notes=())
    job = job if job.origin is not None else copy_every_model(job)
    made = fresh_model(job) if model is None else copy_model(model)
    origin = job.origin
    how = (
        job_file_entries(Path(origin.file), dict(origin.flags))
        if origin is not None
        else {"job": None, "edits": [], "decoded": 0}
    )
    return ModelSource(job, prepare_model(made), how, (), "model")
