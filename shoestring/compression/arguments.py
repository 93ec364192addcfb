"""Options of a compression: flags of `shoestring compress` and arguments of `shoestring.compress`.

Imports nothing heavy, so that a wrong flag is reported at once.
"""

from __future__ import annotations

from typing import Any

from shoestring.core.budget import PERCENTILE, Budget, parsed_latency
from shoestring.core.command_line.arguments import argument, arguments_of, dataclass, group
from shoestring.core.errors import Mistake
from shoestring.core.units import parse_seconds

HOW = ("fresh", "use")  # how a run is started; and techniques, which a request stores in a field of its own


@dataclass(frozen=True)
class CompressArguments:
    size: str | int | None = argument("BYTES", "largest size on disk, such as 16MB")
    latency: str | float | None = argument(
        "TIME", "largest latency of one sample, such as 5ms (99th percentile) or 5ms@90%%"
    )
    keep: str | float | None = argument("SHARE", "least fidelity to the original on unseen data, such as 0.998")
    metric: str | None = argument("NAME>=VALUE", "bound on a metric of the job, such as 'accuracy>=0.91'")
    fidelity: str = argument(
        "",
        "how outputs are compared: cosine of vectors, exp(-KL) of softmax (kl) or sigmoid (binary), R^2; "
        "auto (default): inferred for each output from the job's loss",
        "auto",
        choices=("auto", "cosine", "kl", "binary", "r2"),
    )
    output: tuple[str, ...] = argument(
        "NAME", "compare this output; may be repeated (default: all; the most damaged one counts)", (), repeated=True
    )
    axis: str | int | None = argument("N", "axis of an output's classes or vectors (default: inferred)")
    use: tuple[str, ...] | None = argument(
        "TECHNIQUE",
        'exactly these techniques instead of choosing, such as "Quantize(bits=4)"; may be repeated',
        repeated=True,
    )
    heal: str | None = argument(
        "TIME", "train the small model towards the original for this long (10m), without labels"
    )
    to: str | None = argument(
        "",
        "also write an ONNX file for onnxruntime, within --size too; onnx-int8: with int8 products, for speed",
        choices=("onnx", "onnx-int8"),
    )
    newest: bool = argument("", "for a run: its newest weights, not those that were best in validation", False)
    samples: str | int = argument("N", "number of unseen samples to measure the report on (default 1024)", 1024)
    fresh: bool = argument("", "start over in --out; what is there is renamed, not deleted", False)

    def check(self) -> None:
        """Refuse what can be refused without inspecting a model."""
        if self.to not in (None, "onnx", "onnx-int8"):
            raise Mistake(f"--to {self.to!r}: give onnx or onnx-int8")
        if self.to:
            from shoestring.core.command_line.extras import require

            require("onnx")
        if not str(self.samples).isdecimal() or int(self.samples) < 2:
            raise Mistake(f"--samples {self.samples}: give a whole number, 2 or more")
        limits = (self.size, self.latency, self.keep, self.metric, self.use)
        if all(one is None or one == "" for one in limits):
            raise Mistake(
                "no limit was given: give --size 16MB, --latency 5ms or --keep 0.998 (or techniques by --use)"
            )
        if self.heal is not None:
            parse_seconds(self.heal)

    def as_asked(self) -> dict[str, Any]:
        """The part of the options that a run stores and compares when it is resumed; False counts as not given."""
        budget = self.budget()
        found = {name: getattr(self, name) for name in arguments_of(type(self)) if name not in HOW} | {
            "size": budget.size,
            "latency": budget.latency if budget.percentile == PERCENTILE else f"{budget.latency}@{budget.percentile}",
            "keep": budget.quality,
            "samples": int(self.samples),
            "axis": self.whole_axis(),
            "output": list(self.output) or None,
        }
        return {name: False if value is None else value for name, value in found.items()}

    def budget(self) -> Budget:
        time, share = self.latency, None
        if isinstance(self.latency, str) and "@" in self.latency:
            time, share = parsed_latency(self.latency)
        return Budget.parse(size=self.size, latency=time, percentile=share, quality=self.keep)

    def whole_axis(self) -> int | None:
        try:
            return None if self.axis is None else int(self.axis)
        except ValueError:
            raise Mistake(f"--axis {self.axis}: give the number of a dimension, such as 1 or -1") from None


@dataclass(frozen=True)
class CompressCommand:
    job: str = argument(
        "RUN|JOB|WEIGHTS",
        "folder of a run, whose best weights are taken; a job with weights; or weights with --job: a safetensors file, a state dict "
        "that torch.save wrote, a Hugging Face folder, or an ONNX file",
        positional=True,
    )
    job_of_run: str | None = argument(
        "FILE",
        "for a run or weights: the job that makes the model and its data, a file or a built-in one; "
        "a file that a run names is never executed",
        flag="--job",
        command_only=True,
    )
    asked: CompressArguments = group(CompressArguments)
    out: str | None = argument(
        "DIR", "folder to write (default: NAME-compressed); a compression that was killed is resumed", command_only=True
    )
    plan_only: bool = argument("", "show the plan and write nothing", False, command_only=True)
