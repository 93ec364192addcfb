"""The one list of techniques. A new one is a new file and a line here.

It is the only file of planning that knows any technique by name; the few that the planner needs for something of its own are below.
"""
from __future__ import annotations

from collections.abc import Mapping

from shoestring.core.training import TrainingTechnique as Technique
from shoestring.memory.accumulate import Accumulate
from shoestring.memory.allocator import Allocator, following
from shoestring.memory.checkpoint import Checkpoint
from shoestring.memory.ema import Ema
from shoestring.memory.fused import Fused
from shoestring.memory.low_rank import LowRank
from shoestring.memory.offload import OffloadOptimizer
from shoestring.memory.precision import Precision
from shoestring.memory.spill import Spill
from shoestring.memory.step_in_backward import StepInBackward
from shoestring.memory.stream import Stream
from shoestring.parallel.asynchronous import Asynchronous
from shoestring.parallel.average import Average
from shoestring.parallel.compress_gradients import CompressGradients
from shoestring.parallel.drop_stragglers import DropStragglers
from shoestring.parallel.local_steps import LocalSteps
from shoestring.parallel.pipeline import Pipeline
from shoestring.parallel.shard import Shard
from shoestring.parallel.tensor import TensorParallel
from shoestring.parallel.tokens import Tokens

CATALOGUE: tuple[type[Technique], ...] = (
    Tokens,
    LowRank,
    Precision,
    Pipeline,
    Accumulate,
    Spill,
    Checkpoint,
    Fused,
    OffloadOptimizer,
    Stream,
    StepInBackward,
    Average,
    Shard,
    CompressGradients,
    LocalSteps,
    Asynchronous,
    DropStragglers,
    TensorParallel,
    Ema,
    Allocator,
)

TOGETHER: Technique = Average()                  # how workers train together where nothing else is asked for
ALL_BLOCKS_AGAIN: Technique = Checkpoint(every=1)   # one step under it shows whether blocks can be computed again


def close_environment() -> Mapping[str, str]:
    """Variables of a worker whose process follows its tensors, so that its size tells of them."""
    return following().environment
