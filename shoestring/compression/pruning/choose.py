"""Which units go, as edits of a model that were tried: a cut that does not compute what it should is left out, and told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from torch import Tensor, nn

from shoestring.compression.pruning.attributes import GUESSES, guessed, narrowed, sizes_of_layers
from shoestring.compression.pruning.cuts import Attribute, Edit, UnitCut, edited
from shoestring.compression.pruning.groups import KINDS, Structure, UnitGroup, UnitPlace, structure_of
from shoestring.compression.pruning.importance import importance
from shoestring.compression.pruning.layers import Stack, dropped, stacks_of
from shoestring.compression.pruning.trial import ShakenModel
from shoestring.core.errors import Mistake

Example = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Pruning:
    edits: tuple[Edit, ...]
    told: tuple[str, ...]  # what was left alone, and why


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
) -> tuple[Edit, ...]:
    """Edits that remove a share of the units of each kind: see `pruning_for`, which also tells what was left alone."""
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
    """Remove a share of each kind, the least important first.

    `spread`: "uniform" takes the share of every group, "global" of all groups together (by score a weight saved; `floor_share` of each
    group stays). A share that is no whole number of units is rounded down. Without scores they are measured on the example.
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
    trial = ShakenModel(subject, example)
    cuts, told = chosen(subject, groups, scores, shares, spread, floor_share)
    if narrowed(subject, cuts) and (padded := trial.without_own_kernels()):
        told.append(padded)
    edits, refused = followed_up(trial, subject, groups, cuts)
    kept_cuts = [edit for edit in edits if isinstance(edit, UnitCut)]
    dropping, skips, more = without_layers(trial, subject, stacks, scores, shares.get("layers", 0))
    every = (*edits, *dropping)
    if not kept_cuts and not skips:
        raise Mistake(
            f"nothing of the model can be removed: {'; '.join([*told, *refused, *more])[:600]}. Ask for another kind, "
            "for a larger share, or for quantization"
        )
    if why := trial.problem(trial.masked(kept_cuts, skips), every):
        raise Mistake(f"cuts that are right alone are wrong together ({why}): ask for one kind at a time")
    return Pruning(every, (*told, *refused, *more, *found.left_alone))


def check(shares: Mapping[str, float], spread: str, floor_share: float) -> None:
    for kind, share in shares.items():
        if not 0 <= share < 1:
            raise Mistake(
                f"{kind}={share} can't be removed: give the share to remove, from 0 to less than 1 (0.5: half of the {kind})"
            )
    if not any(shares.values()):
        raise Mistake(
            "nothing is to be removed: give a share of heads, neurons, channels or layers, such as neurons=0.5"
        )
    if spread not in ("uniform", "global"):
        raise Mistake(
            f"units can't be spread {spread!r}: uniform (the share of every group) or global (of all together)"
        )
    if not 0 <= floor_share <= 1:
        raise Mistake(f"floor_share={floor_share} of a group can't stay: give a share from 0 to 1")


def nothing_found(kind: str, found: Structure) -> str:
    others = sorted({group.kind for group in found.groups} - {kind})
    reasons = "; ".join(found.left_alone[:8]) or "the model has none"
    return f"the model has no {kind} that can be removed ({reasons}): " + (
        f"it has {' and '.join(others)}, ask for those"
        if others
        else "ask for whole layers, quantization or factorization instead"
    )


def chosen(
    model: nn.Module,
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    shares: Mapping[str, float],
    spread: str,
    floor_share: float,
) -> tuple[list[UnitCut], list[str]]:
    """The cuts of all groups, and which groups are too small for one."""
    weights = {name: one.numel() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    cuts, told = [], []
    for kind in KINDS:
        mine = [group for group in groups if group.kind == kind]
        for group in mine:
            if group.name not in scores or len(scores[group.name]) != group.size:
                raise Mistake(
                    f"scores of {group.name} are missing or not {group.size}: measure them with importance() on this model"
                )
        gone = (uniform if spread == "uniform" else everywhere)(mine, scores, shares.get(kind, 0), floor_share, weights)
        for group in mine:
            kept = tuple(unit for unit in range(group.size) if unit not in gone[group.name])
            if len(kept) == group.size:
                told.append(f"{group.name}: {shares[kind]:g} of {group.size} is no whole unit")
            cuts.append(UnitCut(group.name, kind, group.size, kept, group.places, group.readers))
    return cuts, told


def uniform(
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    share: float,
    floor_share: float,
    weights: Mapping[str, int],
) -> dict[str, set[int]]:
    """The share of every group; one unit always stays."""
    return {
        group.name: set(scores[group.name].argsort()[: min(group.size - 1, floor(group.size * share + 1e-9))].tolist())
        for group in groups
    }


def everywhere(
    groups: Sequence[UnitGroup],
    scores: Mapping[str, Tensor],
    share: float,
    floor_share: float,
    weights: Mapping[str, int],
) -> dict[str, set[int]]:
    """The share of all weights of the groups, those units first that lose least a weight saved."""
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


def followed_up(
    trial: ShakenModel, model: nn.Module, groups: Sequence[UnitGroup], cuts: Sequence[UnitCut]
) -> tuple[list[Edit], list[str]]:
    """The edits of all cuts that work, by the first guess about attributes with which they do."""
    pairs = [(group, cut) for group, cut in zip(groups_of(groups, cuts), cuts, strict=True) if len(cut.kept) < cut.size]
    if not pairs:
        return [], []
    for guess in GUESSES[:3]:
        edits = assembled(model, [(group, cut, guess) for group, cut in pairs])
        if edits is not None and not trial.problem(trial.masked([cut for _, cut in pairs], {}), edits):
            return edits, []
    right, told = [], []
    for group, cut in pairs:
        wanted = trial.masked([cut], {})
        why = ""
        for guess in GUESSES:
            edits = assembled(model, [(group, cut, guess)])
            why = (
                trial.problem(wanted, edits) if edits is not None else "an attention with add_bias_kv or add_zero_attn"
            )
            if not why:
                right.append((group, cut, guess))
                break
        if why:
            told.append(f"{cut.name}: {why}")
    return (assembled(model, right) or [] if right else []), told


def groups_of(groups: Sequence[UnitGroup], cuts: Sequence[UnitCut]) -> list[UnitGroup]:
    by_name = {group.name: group for group in groups}
    return [by_name[cut.name] for cut in cuts]


def assembled(model: nn.Module, parts: Sequence[tuple[UnitGroup, UnitCut, str]]) -> list[Edit] | None:
    """Cuts, then what follows from them; None if an attention can't be made narrower."""
    cuts = in_turn([cut for _, cut, _ in parts])
    try:
        narrow = narrowed(model, cuts)
        smaller = edited(model, [*cuts, *narrow])
    except Mistake:
        return None
    attributes: dict[tuple[str, str], Attribute] = {}
    for _, cut, guess in parts:
        for one in guessed(model, cut, guess):
            attributes.setdefault((one.module, one.name), one)
    for one in sizes_of_layers(model, smaller, [group for group, _, _ in parts], cuts):
        attributes[one.module, one.name] = one
    return [*cuts, *narrow, *attributes.values()]


def in_turn(cuts: Sequence[UnitCut]) -> list[UnitCut]:
    """The same cuts, each with the sizes that it finds: of two in one dimension, the second finds a shorter one."""
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
                    original = originals(cuts, one, other)
                    if original.outer < place.outer:
                        outer = outer * len(one.kept) // one.size
                    else:
                        inner = inner * len(one.kept) // one.size
            places.append(replace(place, outer=outer, inner=inner))
        done.append(replace(cut, places=tuple(places)))
    return done


def originals(cuts: Sequence[UnitCut], cut: UnitCut, place: UnitPlace) -> UnitPlace:
    """A place of a cut as it was before other cuts."""
    whole = next(one for one in cuts if one.name == cut.name)
    at = cut.places.index(place)
    return whole.places[at]


def without_layers(
    trial: ShakenModel, model: nn.Module, stacks: Sequence[Stack], scores: Mapping[str, Tensor], share: float
) -> tuple[list[Edit], dict[Stack, list[int]], list[str]]:
    """Edits that drop a share of the blocks of every stack, and which are dropped."""
    edits: list[Edit] = []
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
            told.append(f"{stack.name}: {share:g} of {len(stack.members)} blocks is no whole block")
            continue
        kept = [member for member in range(stack.length) if member not in gone]
        wanted = trial.masked([], {stack: gone})
        why = ""
        for named in (True, False):
            tried = dropped(model, stack, kept, named)
            if not (why := trial.problem(wanted, tried)):
                edits += tried
                skips[stack] = gone
                break
        if why:
            told.append(f"{stack.name}: {why}")
    return edits, skips, told
