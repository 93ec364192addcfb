"""The whole state of a training run: a snapshot for a checkpoint, and restoring a run from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.private import storage_id_of
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import DividesOptimizer, KeepsWeights, LivesOnDisk, StoredTensor, TrainsBeside
from shoestring.core.running.run_weights import stored_weights
from shoestring.data.feed import Feed
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint
from shoestring.runs.checkpoints.saver import Snapshot
from shoestring.training.execution.restored_optimizer import lack_of

KERNELS = ("fused", "foreach")  # chosen by the plan, not by the checkpoint
PARTS = ("step", "model", "optimizer", "feed", "chances", "parts", "best")  # required parts of a checkpoint's state


def snapshot_of(run: Run, feed: Feed, step: int, best: tuple[float, int] | None) -> Snapshot:
    """The state after a step. The tensors are the run's own: write them before the next step."""
    weights: dict[str, Tensor | StoredTensor] = {}
    aliases, other = {}, {}
    seen: dict[Any, str] = {}
    for name, value in in_memory(run).items():
        if not dense(value):
            other[name] = value
            continue
        place = (storage_id_of(value), value.storage_offset(), value.shape, value.stride())
        if value.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            weights[name] = value
    for name, one in divided_weights(run).items():
        if one.parameter in seen:
            aliases[name] = seen[one.parameter]
        else:
            seen[one.parameter] = name
            weights[name] = one
    state = {
        "step": step,
        "model": other,
        "optimizer": optimizer_state(run),
        "feed": feed.state_dict(),
        "chances": run.team.objects(random_state.state())[:: run.team.mesh.drawing_alike],
        "parts": {name: part.state_dict() for name, part in run.state.items()},
        "best": best,
        "on_disk": on_disk(run),
        "left_out": left_out(run),
        "beside_model": beside_model(run),
    }
    return Snapshot(step, weights, aliases, state)


LEFT_OUT = ("optimizer", "feed", "chances", "best", "on_disk")  # left out of a snapshot of the weights alone


def best_snapshot(run: Run, feed: Feed, step: int, metrics: Mapping[str, float]) -> Snapshot:
    """The weights after a step, wherever they are stored, with the metrics that make them the best; training can't be
    resumed from this."""
    found = snapshot_of(run, feed, step, None)
    weights, aliases = dict(found.weights), dict(found.aliases)
    seen: dict[Any, str] = {}
    for name, one in stored_weights(run).items():  # those on disk; a weight with several names only under the first
        if name not in weights and name not in aliases:
            first = seen.setdefault(getattr(one, "parameter", name), name)
            if first == name:
                weights[name] = one
            else:
                aliases[name] = first
    state = {name: value for name, value in found.state.items() if name not in LEFT_OUT}
    state["parts"] = {name: value for name, value in state["parts"].items() if name not in on_disk(run)}
    return Snapshot(step, weights, aliases, state | {"metrics": dict(metrics), "on_disk": []})


def dense(value: Any) -> bool:
    """Whether a value in a model's state is a dense tensor, as files of weights contain; others, such as sparse
    buffers, are packed."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def restore(checkpoint: RunCheckpoint, run: Run, feed: Feed) -> dict[str, Any]:
    """Restore a run from a checkpoint; returns the rest of the checkpoint's state. Random states are set last."""
    state, weights = checkpoint.state(), checkpoint.weights()
    if differ := set(on_disk(run)) ^ set(state.get("on_disk", ())):
        raise Mistake(
            f"the checkpoint {checkpoint.path} was made by another plan, with other state on disk ({', '.join(sorted(differ))}): "
            f"go on with the plan it was begun with, or give --fresh"
        )
    if differ := set(beside_model(run)) ^ set(state.get("beside_model", ())):
        raise Mistake(
            f"the checkpoint {checkpoint.path} was made by another plan: {', '.join(sorted(differ))} is trained beside the "
            f"model's weights there or here, not in both: go on with the plan it was begun with, or give --fresh"
        )
    for name, value in in_memory(run).items():
        if dense(value):
            source = weights.metadata.get(f"alias {name}", name)
            if source not in weights.entries:
                raise Mistake(
                    f"the checkpoint {checkpoint.path} has no weights {name!r}: the model is not the one it was made of; "
                    f"give another --run, or --fresh"
                )
            found = weights[source]
            if found.shape != value.shape:
                raise Mistake(
                    f"the weights {name!r} have the shape {tuple(found.shape)} in the checkpoint and {tuple(value.shape)} in the "
                    f"model: give the flags it was begun with, another --run, or --fresh"
                )
            value.copy_(found)
    if state["model"]:
        run.model.load_state_dict(state["model"], strict=False)
    for name, one in divided_weights(run).items():
        one.take(weights[weights.metadata.get(f"alias {name}", name)])
    put_optimizer_state(run, state["optimizer"])
    check_optimizer(run, checkpoint)
    for name, part in run.state.items():
        if name in state["parts"]:
            part.load_state_dict(state["parts"][name])
    feed.load_state_dict(state["feed"])
    if run.team.mesh.draws_as < len(state["chances"]):
        random_state.restore(state["chances"][run.team.mesh.draws_as])
    else:
        random_state.seed_worker(feed.job.seed, run.team.mesh.draws_as, state["step"])
    return state


def optimizer_state(run: Run) -> dict[str, Any]:
    """The optimizer's state as a single process would have it."""
    state = run.optimizer.state_dict()
    for part in reversed(run.state_that(DividesOptimizer)):
        state = part.whole_optimizer(state)
    return state


def put_optimizer_state(run: Run, whole: dict[str, Any]) -> None:
    """Load such a state into the optimizer, keeping the choice of kernels.

    Parameter groups stay the same objects: techniques hold references to them, and must see later changes of the rate.
    """
    groups = run.optimizer.param_groups
    if len(groups) != len(whole["param_groups"]):
        raise Mistake(
            f"the checkpoint was made with {len(whole['param_groups'])} groups of weights in the optimizer, and the job's has "
            f"{len(groups)} now: give the optimizer that the run was begun with, or begin anew with --fresh"
        )
    kernels = [{name: group[name] for name in KERNELS if name in group} for group in run.optimizer.param_groups]
    try:
        own: dict[str, Any] | None = whole
        for part in run.state_that(DividesOptimizer):
            own = part.own_optimizer(own) if own is not None else None
        if own is not None:
            run.optimizer.load_state_dict(own)
    except ValueError as error:  # other weights in a group
        raise Mistake(
            f"the optimizer's state in the checkpoint does not fit the job's optimizer now ({error}): give the optimizer that "
            f"the run was begun with, or begin anew with --fresh"
        ) from error
    for group, loaded, chosen in zip(groups, run.optimizer.param_groups, kernels, strict=True):
        settings = dict(loaded)
        group.clear()
        group.update(settings | chosen)
    run.optimizer.param_groups = groups


def check_optimizer(run: Run, checkpoint: RunCheckpoint) -> None:
    """Refuse a state that the optimizer can't step with, before a step fails and the job seems to be at fault."""
    if told := lack_of(run.optimizer, {id(one): name for name, one in run.model.named_parameters()}):
        raise Mistake(
            f"the checkpoint {checkpoint.path} has impossible content: its state.json has {told}: it is whole, and no run of "
            f"this job has written it; use another checkpoint, or begin anew with --fresh"
        )


def divided_weights(run: Run) -> dict[str, Any]:
    """The weights of which every worker holds a part, by name."""
    return {
        name: one
        for part in run.state_that(KeepsWeights)
        if not isinstance(part, LivesOnDisk)
        for name, one in part.weights_elsewhere.items()
    }


def on_disk(run: Run) -> list[str]:
    """The parts of the run's state that are in a file only they can read."""
    return [name for name, part in run.state.items() if isinstance(part, LivesOnDisk)]


def beside_model(run: Run) -> list[str]:
    """The parts of the run's state with weights that are trained beside the model's."""
    return [name for name, part in run.state.items() if isinstance(part, TrainsBeside)]


def left_out(run: Run) -> list[str]:
    """The buffers that the model's state_dict leaves out: needed to resume a run, but unknown to other tools."""
    state = run.model.state_dict()
    return [name for name, _ in run.model.named_buffers(remove_duplicate=False) if name not in state]


def in_memory(run: Run) -> dict[str, Any]:
    """The model's state_dict without weights that are stored elsewhere, and the buffers that it leaves out."""
    elsewhere = stored_weights(run)
    state = {name: value for name, value in run.model.state_dict().items() if name not in elsewhere}
    for name, buffer in run.model.named_buffers(remove_duplicate=False):
        if name not in state:
            state[name] = buffer
    return state
