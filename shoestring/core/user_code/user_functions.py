"""How the functions of a job are called. A function that can't be called so is refused when the Job is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Signature, isgeneratorfunction, signature
from typing import Any

from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.user_code.blame import blame_for
from shoestring.core.user_code.seams import calls_user

# Field of a Job -> its arguments, and an example call
CALLS = {
    "model": ((), "model=lambda: MyModel()"),
    "loss": (("output", "batch"), "loss=lambda output, batch: cross_entropy(output, batch[1])"),
    "forward": (("model", "batch"), "forward=lambda model, batch: model(batch[0])"),
    "weight": (("batch",), "weight=lambda batch: len(batch[0])"),
    "split": (("batch", "pieces"), "split=lambda batch, pieces: [...]"),
    "optimizer": (("parameters",), "optimizer=lambda parameters: AdamW(parameters, lr=1e-3)"),
    "metrics": (("output", "batch"), 'metrics=lambda output, batch: {"accuracy": ...}'),
    "validate": (("model",), 'validate=lambda model: {"accuracy": ...}'),
    "show": (("model",), 'show=lambda model: "..."'),
    "collate": (("samples",), "collate=lambda samples: torch.stack(samples)"),
    "largest": ((), "largest=lambda: batch"),
    "group": (("name",), 'group=lambda name: "phone"'),
}


def value_text(value: object) -> str:
    """What a job's function returned, in words.

    >>> import torch
    >>> value_text(torch.zeros(8)), value_text(None), value_text(3.0)
    ('a tensor of shape (8,)', 'None', 'a float')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def known_signature(function: Any) -> Signature | None:
    """How a user's function is called; None where that is unknown: a builtin, or an object whose attributes raise."""
    try:
        return signature(function)
    except Exception:
        return None


def check_calls(functions: Mapping[str, Any]) -> None:
    """Refuse functions of a Job, by field, that can't be called with their arguments."""
    for name, (arguments, example) in CALLS.items():
        function = functions.get(name)
        if function is None:
            continue
        called = f"it is called as {name}({', '.join(arguments)})"
        if name == "model" and isinstance(function, nn.Module):
            raise Mistake(
                f"model in the Job is a model, and a function that makes it is needed, so that planning can make it without "
                f"memory: {called}; write {example}"
            )
        if not callable(function):
            raise Mistake(
                f"{name} in the Job is a {type(function).__name__}, not a function: {called}; write {example}"
            )
        takes = known_signature(function)
        if takes is None:
            continue
        try:
            takes.bind(*arguments)
        except TypeError as error:
            raise Mistake(
                f"{name} in the Job is a function of {takes}, which does not fit ({error}): {called}; write {example}"
            ) from None
    check_answer(functions.get("answer"))


ANSWER = 'def answer(text: str): output = yield tokenizer(text, return_tensors="pt"); return {"label": ...}'


def check_answer(function: Any) -> None:
    """Refuse an `answer` that is no generator function, or takes nothing: a request's fields are its arguments."""
    if function is None:
        return
    if not callable(function):
        raise Mistake(f"answer in the Job is a {type(function).__name__}, not a function: write {ANSWER}")
    if not (isgeneratorfunction(function) or isgeneratorfunction(type(function).__call__)):
        raise Mistake(
            f"answer in the Job has no yield: it must yield a sample, which is computed in a batch with others, and is handed the "
            f"model's output for it: write {ANSWER}"
        )
    takes = known_signature(function)
    if takes is not None and not takes.parameters:
        raise Mistake(f"answer in the Job takes nothing, and it is called with a request's fields: write {ANSWER}")


def guard_loss(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The job's loss; an error in it, often from taking the whole batch for a tensor, says what it was called with."""

    @calls_user("loss")
    def call_loss(output: Any, batch: Any) -> Tensor:
        try:
            return loss(output, batch)
        except (TypeError, AttributeError) as error:
            kind = type(batch).__name__
            if isinstance(batch, Tensor) or kind not in str(error):
                raise
            found = blame_for(error)
            place = found.library or ("" if found.line == "its loss" else found.place)
            given = "Tensor" if isinstance(output, Tensor) else type(output).__name__
            many = f" of {len(batch)}" if type(batch) in (tuple, list, dict) else ""
            raise Mistake(
                f"the job's loss failed ({place or 'in its call'}): {error}. It is called as loss(output, batch), with what the "
                f"model gave (a {given}) and the whole batch (a {kind}{many}): write {CALLS['loss'][1]}"
            ) from error

    return call_loss
