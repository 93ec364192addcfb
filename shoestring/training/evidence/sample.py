"""A sample: one block of each kind, made and timed for real, for a model that is too large for a real step.

The model's forward is run on fake tensors to find the shapes of its blocks' inputs. Then the first block of every kind
gets real weights and real inputs of those shapes, and is run forward and backward. Blocks whose weights have the same
shapes, and the same ones frozen, are of one kind.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.job import Job
from shoestring.core.private import FakeTensor, own_buffers, tree_leaves, tree_map
from shoestring.core.running import random_state
from shoestring.core.user_code.foreign import copy_module
from shoestring.measure.calls import as_calls, without_caches
from shoestring.measure.fake import Stage
from shoestring.measure.holdings import Holders
from shoestring.measure.load import Timing, believed_timings, busy_share, effort, enough, timing
from shoestring.measure.process import forget_peak, status
from shoestring.measure.timeline import stretches
from shoestring.measure.tracker import Tracker
from shoestring.training.evidence.anchor import MORE, fastest, resident_bytes
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.evidence.step import first_batch
from shoestring.training.memory.optimizers.fused import can_be_fused

TIMES = 3
UPDATED = 4 << 20  # numbers whose update is timed


def kind(block: nn.Module) -> tuple[Any, ...]:
    return (
        type(block),
        *((name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in block.named_parameters()),
    )


def sample_blocks(job: Job) -> dict[str, Any]:
    """Seconds of every block forward and backward, of the update per byte of weights, and bytes of the process above
    its tensors."""
    found: dict[tuple[Any, ...], tuple[nn.Module, Any]] = {}
    stage = Stage()
    with random_state.fork_rng():
        random_state.seed(job.seed)
        run = build_run(job, (), stage.model(job.model))
        settings = dict(run.optimizer.param_groups[0])
        hooks = [
            block.register_forward_pre_hook(
                lambda module, args, kwargs: found.setdefault(kind(module), (module, (args, kwargs))) and None,
                with_kwargs=True,
            )
            for block in run.blocks.values()
        ]
        batch = first_batch(job)
        with stage:
            run.forward(run.model, batch)
        for hook in hooks:
            hook.remove()
        seconds: dict[Any, tuple[float, float]] = {}
        overhead, update, fused, busy = 0, 0.0, 0.0, 0.0
        for one, (block, given) in found.items():
            real, inputs = make_real(block, given)
            seconds[one], held_up = time_block(real, inputs)
            busy = max(busy, held_up)
            overhead = max(overhead, above_tensors(real, inputs, Holders(job)))
            if any(parameter.requires_grad for parameter in real.parameters()):
                update, fused = time_update(run.optimizer, settings, real)
            del real, inputs
    return {
        "blocks": {name: seconds[kind(block)] for name, block in run.blocks.items() if kind(block) in seconds},
        "update": update,
        "fused": fused,
        "overhead": overhead,
        "reserved": status("VmPeak") - status("VmHWM"),
        "held_up": busy,
    }


def make_real(block: nn.Module, given: Any) -> tuple[nn.Module, Any]:
    """A block with real weights, and real inputs shaped like the given ones."""
    weights = {
        id(old): nn.Parameter(
            torch.empty(old.shape, dtype=old.dtype).normal_(0, 0.02)
            if old.is_floating_point()
            else torch.zeros(old.shape, dtype=old.dtype),
            old.requires_grad,
        )
        for old in block.parameters()
    }
    real = copy_module(block, weights)
    for part in real.modules():
        for name, buffer in own_buffers(part).items():
            if isinstance(buffer, FakeTensor):
                own_buffers(part)[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    args, kwargs = given
    return real, tree_map(
        real_like, (without_caches(args), {name: without_caches(value) for name, value in kwargs.items()})
    )


def real_like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, FakeTensor):
        return leaf.detach()
    if not leaf.is_floating_point():
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    return torch.randn(leaf.shape, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)


def time_pass(block: nn.Module, inputs: Any) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    args, kwargs = inputs
    begun = perf_counter()
    with as_calls([block]):
        result = block(*args, **kwargs)
    out = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    between = perf_counter()
    torch.autograd.backward(out, [torch.ones_like(leaf) for leaf in out])
    ended = perf_counter()
    for parameter in block.parameters():
        parameter.grad = None
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            leaf.grad = None
    return between - begun, ended - between


def time_block(block: nn.Module, inputs: Any) -> tuple[tuple[float, float], float]:
    """Seconds forward and backward, and the fraction of the time that other processes slowed down even the best
    pass."""
    time_pass(block, inputs)
    times: list[tuple[float, float]] = []
    timings: list[Timing] = []
    while not enough([timings], TIMES, MORE * TIMES):
        before = effort()
        times.append(time_pass(block, inputs))
        timings.append(timing(sum(times[-1]), before, effort()))
    forward, backward = (
        median(times[number][part] * (1 - timings[number].held_up) for number in believed_timings(timings))
        for part in (0, 1)
    )
    return (forward, backward), busy_share(timings)


def above_tensors(block: nn.Module, inputs: Any, holders: Holders) -> int:
    """Bytes by which the process exceeds its tensors, and those of the job, at the peak of a pass."""
    tracker = Tracker()
    tracker.hold(holders.real())
    tracker.hold(block.parameters())
    tracker.hold(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    forget_peak()
    with tracker:
        time_pass(block, inputs)
    return status("VmHWM") - max(stretch.top for stretch in stretches(tracker.log, resident_bytes))


def time_update(optimizer: torch.optim.Optimizer, settings: dict[str, Any], block: nn.Module) -> tuple[float, float]:
    """Seconds of the update per byte of weights, by the job's optimizer with the settings of one parameter group, and
    by its fused kernel."""
    largest = max((one for one in block.parameters() if one.requires_grad), key=lambda one: one.numel())
    weight = nn.Parameter(largest.detach().flatten()[:UPDATED].clone())
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.param_groups = [settings | {"params": [weight]}]
    optimizer.step()
    size = weight.numel() * weight.element_size()
    plain = fastest(optimizer.step) / size
    if not can_be_fused(optimizer):
        return plain, plain
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    return plain, fastest(optimizer.step) / size
