"""Choose the units to prune, and verify each cut on a trial model: cuts that change the outputs wrongly are left out
and reported."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from torch import Tensor, nn

from shoestring.compression.pruning.attributes import GUESSES, guess_attributes, narrow_heads, sizes_of_layers
from shoestring.compression.pruning.groups import KINDS, Structure, UnitGroup, UnitPlace, structure_of
from shoestring.compression.pruning.importance import importance
from shoestring.compression.pruning.layers import Stack, drop_edits, stacks_of
from shoestring.compression.pruning.prune_edits import Attribute, PruneEdit, UnitCut, apply_prune_edits
from shoestring.compression.pruning.trial import TrialModel
from shoestring.core.errors import Mistake

Example = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Pruning:
    edits: tuple[PruneEdit, ...]
    told: tuple[str, ...]  # messages: what was left alone, and why


def edits_for(
    model: nn.Module,
    example: Example,
    *,
    heads: float = 0,
    neurons: float = 0,
    channels: float = 0,
    layers: float = 0,
    scores: Mapping[str, Tensor] | None = None,
    spread: str = "uniform",
    floor_share: float = 0.1,
) -> tuple[PruneEdit, ...]:
    """The edits of `pruning_for`, without its messages."""
    shares = {"heads": heads, "neurons": neurons, "channels": channels, "layers": layers}
    return pruning_for(model, example, shares, scores=scores, spread=spread, floor_share=floor_share).edits


def pruning_for(
    model: nn.Module,
    example: Example,
    shares: Mapping[str, float],
    *,
    scores: Mapping[str, Tensor] | None = None,
    spread: str = "uniform",
    floor_share: float = 0.1,
) -> Pruning:
    """Choose a share of the units of each kind to prune, the least important first.

    `spread`: "uniform" prunes the share in every group, "global" over all groups together (by score per parameter
    saved; at least `floor_share` of each group stays). Shares are rounded down to whole units. If no scores are given,
    they are measured on the example.
    """
    check(shares, spread, floor_share)
    subject = copy.deepcopy(model).eval()
    found = structure_of(subject, example)
    groups = [group for group in found.groups if shares.get(group.kind, 0) > 0]
    stacks = stacks_of(subject, example) if shares.get("layers", 0) > 0 else ()
    for kind in (*KINDS, "layers"):
        if shares.get(kind, 0) > 0 and not [
            one for one in (stacks if kind == "layers" else groups) if one.name.split()[0] == kind
        ]:
            raise Mistake(nothing_found(kind, found))
    if scores is None:
        wanted = Structure(tuple(groups), ())
        scores = importance(subject, [None], lambda one, _: example(one), structure=wanted, layers=bool(stacks))
    trial = TrialModel(subject, example)
    cuts, told = choose_cuts(subject, groups, scores, shares, spread, floor_share)
    if narrow_heads(subject, cuts) and (padded := trial.without_own_kernels()):
        told.append(padded)
    edits, refused = edits_for_cuts(trial, subject, groups, cuts)
    kept_cuts = [edit for edit in edits if isinstance(edit, UnitCut)]
    dropping, skips, more = edits_for_layers(trial, subject, stacks, scores, shares.get("layers", 0))
    every = (*edits, *dropping)
    if not kept_cuts and not skips:
        raise Mistake(
            f"nothing of the model can be pruned: {'; '.join([*told, *refused, *more])[:600]}. Ask for another kind, "
            "for a larger share, or for quantization"
        )
    if why := trial.problem(trial.outputs_without(kept_cuts, skips), every):
        raise Mistake(f"cuts that work alone do not work together ({why}): ask for one kind at a time")
    return Pruning(every, (*told, *refused, *more, *found.left_alone))


def check(shares: Mapping[str, float], spread: str, floor_share: float) -> None:
    for kind, share in shares.items():
        if not 0 <= share < 1:
            raise Mistake(f"{kind}={share}: give the share to remove, from 0 to less than 1 (0.5: half of the {kind})")
    if not any(shares.values()):
        raise Mistake("nothing to prune: give a share of heads, neurons, channels or layers, such as neurons=0.5")
    if spread not in ("uniform", "global"):
        raise Mistake(f"spread={spread!r}: give uniform (the share of every group) or global (of all groups together)")
    if not 0 <= floor_share <= 1:
        raise Mistake(f"floor_share={floor_share}: give the share of each group that stays, from 0 to 1")


def nothing_found(kind: str, found: Structure) -> str:
    others = sorted({group.kind for group in found.groups} - {kind})
    reasons = "; ".join(found.left_alone[:8]) or "the model has none"
    return f"the model has no {kind} that can be removed ({reasons}): " + (
        f"it has {' and '.join(others)}, ask for those"
        if others
        else "ask for whole layers, quantization or factorization instead"
    )


def choose_cuts(
    model: nn.Module,
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    shares: Mapping[str, float],
    spread: str,
    floor_share: float,
) -> tuple[list[UnitCut], list[str]]:
    """The cuts of all groups, and messages about groups that are too small for one."""
    weights = {name: one.numel() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    cuts, told = [], []
    for kind in KINDS:
        mine = [group for group in groups if group.kind == kind]
        for group in mine:
            if group.name not in scores or len(scores[group.name]) != group.size:
                raise Mistake(
                    f"scores of {group.name} are missing or not {group.size}: measure them with importance() on this model"
                )
        gone = (uniform_units if spread == "uniform" else global_units)(
            mine, scores, shares.get(kind, 0), floor_share, weights
        )
        for group in mine:
            kept = tuple(unit for unit in range(group.size) if unit not in gone[group.name])
            if len(kept) == group.size:
                told.append(f"{group.name}: {shares[kind]:g} of {group.size} is less than one unit")
            cuts.append(UnitCut(group.name, kind, group.size, kept, group.places, group.readers))
    return cuts, told


def uniform_units(
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    share: float,
    floor_share: float,
    weights: Mapping[str, int],
) -> dict[str, set[int]]:
    """Units to prune: the share of every group; at least one unit stays."""
    return {
        group.name: set(scores[group.name].argsort()[: min(group.size - 1, floor(group.size * share + 1e-9))].tolist())
        for group in groups
    }


def global_units(
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    share: float,
    floor_share: float,
    weights: Mapping[str, int],
) -> dict[str, set[int]]:
    """Units to prune: the share of all parameters of the groups, those with the lowest score per parameter first."""
    gone: dict[str, set[int]] = {group.name: set() for group in groups}
    saved = {group.name: sum(weights[place.weight] for place in group.places) / group.size for group in groups}
    ranked = sorted(
        (float(score) / saved[group.name], group.name, unit, group.size)
        for group in groups
        for unit, score in enumerate(scores[group.name].tolist())
    )
    wanted = share * sum(saved[group.name] * group.size for group in groups)
    for _, name, unit, size in ranked:
        if saved[name] <= wanted and len(gone[name]) < size - max(1, round(floor_share * size)):
            gone[name].add(unit)
            wanted -= saved[name]
    return gone


def edits_for_cuts(
    trial: TrialModel, model: nn.Module, groups: Sequence[UnitGroup], cuts: Sequence[UnitCut]
) -> tuple[list[PruneEdit], list[str]]:
    """The edits of all cuts that work, with the first guess about attributes that makes them work; and messages about
    the others."""
    pairs = [(group, cut) for group, cut in zip(groups_of(groups, cuts), cuts, strict=True) if len(cut.kept) < cut.size]
    if not pairs:
        return [], []
    for guess in GUESSES[:3]:
        edits = assemble_edits(model, [(group, cut, guess) for group, cut in pairs])
        if edits is not None and not trial.problem(trial.outputs_without([cut for _, cut in pairs], {}), edits):
            return edits, []
    right, told = [], []
    for group, cut in pairs:
        wanted = trial.outputs_without([cut], {})
        why = ""
        for guess in GUESSES:
            edits = assemble_edits(model, [(group, cut, guess)])
            why = (
                trial.problem(wanted, edits) if edits is not None else "an attention with add_bias_kv or add_zero_attn"
            )
            if not why:
                right.append((group, cut, guess))
                break
        if why:
            told.append(f"{cut.name}: {why}")
    return (assemble_edits(model, right) or [] if right else []), told


def groups_of(groups: Sequence[UnitGroup], cuts: Sequence[UnitCut]) -> list[UnitGroup]:
    by_name = {group.name: group for group in groups}
    return [by_name[cut.name] for cut in cuts]


def assemble_edits(model: nn.Module, parts: Sequence[tuple[UnitGroup, UnitCut, str]]) -> list[PruneEdit] | None:
    """Cuts and the attribute changes that they need; None if an attention can't be made narrower."""
    cuts = sequential_cuts([cut for _, cut, _ in parts])
    try:
        narrow = narrow_heads(model, cuts)
        smaller = apply_prune_edits(model, [*cuts, *narrow])
    except Mistake:
        return None
    attributes: dict[tuple[str, str], Attribute] = {}
    for _, cut, guess in parts:
        for one in guess_attributes(model, cut, guess):
            attributes.setdefault((one.module, one.name), one)
    for one in sizes_of_layers(model, smaller, [group for group, _, _ in parts], cuts):
        attributes[one.module, one.name] = one
    return [*cuts, *narrow, *attributes.values()]


def sequential_cuts(cuts: Sequence[UnitCut]) -> list[UnitCut]:
    """The same cuts with sizes adjusted to be applied in sequence: the second cut of a dimension finds it shorter."""
    done: list[UnitCut] = []
    for cut in cuts:
        places: list[UnitPlace] = []
        for place in cut.places:
            outer, inner = place.outer, place.inner
            before = [(one, other) for one in done for other in one.places] + [
                (cut, other) for other in cut.places[: len(places)]
            ]
            for one, other in before:
                if (other.weight, other.dim) == (place.weight, place.dim):
                    original = original_place(cuts, one, other)
                    if original.outer < place.outer:
                        outer = outer * len(one.kept) // one.size
                    else:
                        inner = inner * len(one.kept) // one.size
            places.append(replace(place, outer=outer, inner=inner))
        done.append(replace(cut, places=tuple(places)))
    return done


def original_place(cuts: Sequence[UnitCut], cut: UnitCut, place: UnitPlace) -> UnitPlace:
    """A place of a cut before other cuts were applied."""
    whole = next(one for one in cuts if one.name == cut.name)
    at = cut.places.index(place)
    return whole.places[at]


def edits_for_layers(
    trial: TrialModel, model: nn.Module, stacks: Sequence[Stack], scores: Mapping[str, Tensor], share: float
) -> tuple[list[PruneEdit], dict[Stack, list[int]], list[str]]:
    """Edits that drop a share of every stack's blocks, the dropped blocks, and messages."""
    edits: list[PruneEdit] = []
    skips: dict[Stack, list[int]] = {}
    told = []
    for stack in stacks:
        count = min(len(stack.members) - 1, floor(share * len(stack.members) + 1e-9))
        if stack.name not in scores or len(scores[stack.name]) != stack.length:
            raise Mistake(
                f"scores of {stack.name} are missing or not {stack.length}: measure them with importance() on this model"
            )
        gone = sorted(stack.members, key=lambda member: float(scores[stack.name][member]))[:count]
        if not gone:
            told.append(f"{stack.name}: {share:g} of {len(stack.members)} blocks is less than one block")
            continue
        kept = [member for member in range(stack.length) if member not in gone]
        wanted = trial.outputs_without([], {stack: gone})
        why = ""
        for named in (True, False):
            tried = drop_edits(model, stack, kept, named)
            if not (why := trial.problem(wanted, tried)):
                edits += tried
                skips[stack] = gone
                break
        if why:
            told.append(f"{stack.name}: {why}")
    return edits, skips, told
