"""The list of training techniques. To add one, write a file and add a line here.

This is the only file of planning that names techniques; the few that the planner itself needs are below.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.allocator import Allocator, following
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.sparse.l0 import L0
from shoestring.training.sparse.magnitude_prune import MagnitudePrune
from shoestring.training.sparse.random_prune import RandomPrune
from shoestring.training.sparse.variational_dropout import VariationalDropout
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel

CATALOGUE: tuple[type[Technique], ...] = (
    SequencePipeline,
    LowRank,
    Precision,
    Pipeline,
    Accumulate,
    OffloadActivations,
    Checkpoint,
    FusedOptimizer,
    OffloadOptimizer,
    OffloadModel,
    StepInBackward,
    DataParallel,
    Shard,
    CompressGradients,
    LocalSteps,
    Asynchronous,
    DropStragglers,
    TensorParallel,
    EMA,
    MagnitudePrune,
    RandomPrune,
    L0,
    VariationalDropout,
    Allocator,
)

TOGETHER: Technique = DataParallel()  # how workers train together by default
ALL_BLOCKS_AGAIN: Technique = Checkpoint(every=1)  # a step under it shows whether blocks can be recomputed


def close_environment() -> Mapping[str, str]:
    """Environment of a worker whose process size follows its tensors closely."""
    return following().environment
