"""What a model's forward gives: its floating-point tensors by name, and which of them are compared.

Every one counts, unless it is a loss or a state inside of the model (a cache of keys and values, hidden states, attention maps), which
transformers returns beside the answer. `--output` names others, or fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from shoestring.core.errors import Mistake

ONLY = "output"  # the name of an output that is one tensor
LOSS = "loss"
STATES = frozenset(
    {
        "past_key_values",
        "cache",
        "cache_params",
        "hidden_states",
        "attentions",
        "cross_attentions",
        "encoder_attentions",
        "decoder_attentions",
        "encoder_hidden_states",
        "decoder_hidden_states",
        "mems",
        "rnn_state",
    }
)
Answer = dict[str, Tensor]  # of one batch, by the names of outputs


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """
    >>> import torch
    >>> [name for name, _ in named_tensors({"boxes": (torch.zeros(1), torch.zeros(1)), "count": torch.tensor(3)})]
    ['boxes.0', 'boxes.1']
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or ONLY, output
    else:
        for key, value in parts(output):
            yield from named_tensors(value, f"{name}.{key}" if name else key)


def parts(output: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, by name."""
    if isinstance(output, Mapping):
        yield from ((str(key), value) for key, value in output.items())
    elif is_dataclass(output) and not isinstance(output, type):
        yield from ((one.name, vars(output).get(one.name)) for one in fields(output))
    elif isinstance(output, tuple) and hasattr(type(output), "_fields"):
        yield from cast(NamedTuple, output)._asdict().items()
    elif isinstance(output, (tuple, list)):
        yield from ((str(number), value) for number, value in enumerate(output))


def compared_names(output: Any, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the outputs that count: those that the user wants, or all that are answers."""
    there = dict(named_tensors(output))
    if not there:
        raise Mistake(
            f"the model's output ({type(output).__name__}) has no floating-point tensor to compare: give the Job a "
            f"forward=lambda model, batch: ... that returns one"
        )
    if wanted:
        return tuple(dict.fromkeys(name for one in wanted for name in chosen_by(one, there)))
    answers = tuple(name for name, one in there.items() if one.dim() and not set(name.split(".")) & {LOSS, *STATES})
    return answers or tuple(name for name, one in there.items() if one.dim()) or tuple(there)


def left_out(output: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Outputs with a dimension that are not compared, by the first part of their names."""
    compared = set(names)
    return tuple(
        dict.fromkeys(name.split(".")[0] for name, one in named_tensors(output) if one.dim() and name not in compared)
    )


def chosen_by(wanted: str, there: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The outputs of this name: itself, all that it contains, or the ones whose name ends so."""
    found = [name for name in there if name == wanted or name.startswith(f"{wanted}.")] or [
        name for name in there if name.endswith(f".{wanted}")
    ]
    if not found:
        raise Mistake(f"--output {wanted}: the model gives {', '.join(there)}; name one of them")
    return tuple(found)


def answer(output: Any, names: Sequence[str]) -> Answer:
    """These outputs of one batch."""
    there = dict(named_tensors(output))
    missing = [name for name in names if name not in there]
    if missing:
        raise Mistake(
            f"the model gave no output {missing[0]!r} for a batch, and did for another: name outputs that are always there with "
            f"--output (it gave {', '.join(there) or 'none'})"
        )
    return {name: there[name].detach() for name in names}
