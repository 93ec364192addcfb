"""Name the floating-point tensors that a model's forward returns, and select those to compare.

All of them are compared, except losses and internal states that transformers returns as well (key/value cache, hidden
states, attention maps). `--output` selects others, or fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from shoestring.core.errors import Mistake

ONLY = "output"  # name of a model's only output tensor
LOSS = "loss"
INTERNAL_STATES = frozenset(
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
Outputs = dict[str, Tensor]  # of one batch, by name


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All floating-point tensors in nested containers, with dotted names.

    >>> import torch
    >>> [name for name, _ in named_tensors({"boxes": (torch.zeros(1), torch.zeros(1)), "count": torch.tensor(3)})]
    ['boxes.0', 'boxes.1']
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or ONLY, output
    else:
        for key, value in container_items(output):
            yield from named_tensors(value, f"{name}.{key}" if name else key)


def container_items(output: Any) -> Iterator[tuple[str, Any]]:
    """The items of a mapping, dataclass, named tuple, tuple or list, by name."""
    if isinstance(output, Mapping):
        yield from ((str(key), value) for key, value in output.items())
    elif is_dataclass(output) and not isinstance(output, type):
        yield from ((one.name, vars(output).get(one.name)) for one in fields(output))
    elif isinstance(output, tuple) and hasattr(type(output), "_fields"):
        yield from cast(NamedTuple, output)._asdict().items()
    elif isinstance(output, (tuple, list)):
        yield from ((str(number), value) for number, value in enumerate(output))


def compared_names(output: Any, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the outputs to compare: those that the user wants, or all except losses and internal states."""
    there = dict(named_tensors(output))
    if not there:
        raise Mistake(
            f"the model's output ({type(output).__name__}) has no floating-point tensor to compare: give the Job a "
            f"forward=lambda model, batch: ... that returns one"
        )
    if wanted:
        return tuple(dict.fromkeys(name for one in wanted for name in names_matching(one, there)))
    answers = tuple(
        name for name, one in there.items() if one.dim() and not set(name.split(".")) & {LOSS, *INTERNAL_STATES}
    )
    return answers or tuple(name for name, one in there.items() if one.dim()) or tuple(there)


def uncompared_names(output: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Outputs (other than scalars) that are not compared, by the first part of their names."""
    compared = set(names)
    return tuple(
        dict.fromkeys(name.split(".")[0] for name, one in named_tensors(output) if one.dim() and name not in compared)
    )


def names_matching(wanted: str, there: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Outputs that a name selects: the output itself, all inside it, or those whose name ends with it."""
    found = [name for name in there if name == wanted or name.startswith(f"{wanted}.")] or [
        name for name in there if name.endswith(f".{wanted}")
    ]
    if not found:
        raise Mistake(f"--output {wanted}: the model returns {', '.join(there)}; name one of them")
    return tuple(found)


def select_outputs(output: Any, names: Sequence[str]) -> Outputs:
    """The outputs with these names, of one batch."""
    there = dict(named_tensors(output))
    missing = [name for name in names if name not in there]
    if missing:
        raise Mistake(
            f"the model returned no output {missing[0]!r} for one batch, but did for another: use --output to name outputs that "
            f"are always there (it returned {', '.join(there) or 'none'})"
        )
    return {name: there[name].detach() for name in names}
