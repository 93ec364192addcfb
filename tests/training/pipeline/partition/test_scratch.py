"""What modules keep is as it was after a while on copies, also what nn.Module itself keeps for them."""

from __future__ import annotations

from torch import nn

from shoestring.training.pipeline.partition.scratch import scratch


def test_hooks_that_are_added_or_removed_meanwhile_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: seen.append("kept"))
    with scratch(model, model):
        handle.remove()
        model[1].register_forward_hook(lambda *_: seen.append("added"))
        model[1].register_forward_pre_hook(lambda *_: seen.append("added before"))
        model.append(nn.Linear(2, 2))
        model.register_buffer("more", None, persistent=False)
    model(next(model.parameters()))
    assert (
        seen == ["kept"]
        and len(model) == 2
        and list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    )
    handle.remove()
    model(next(model.parameters()))
    assert seen == ["kept"], "the handle knows the hook"
