"""Which layers of a model can be split between workers, and how: recognised by class, never guessed.

A split module runs its own forward on this worker's part of the layers, so that forward must be correct for parts. A
class is therefore recognised only if somebody has read its forward: the classes in the table below, by module and name,
with exactly the submodules that they had then; and user classes that declare it themselves:

    class Attention(nn.Module):
        tensor_parallel = SplitLayers(columns={"query": 1, "key": 1, "value": 1}, rows=("out",), shared=True, divided=("heads",))

Weights outside of all blocks that are not recognised are held and computed by every worker alike, which is correct and
saves nothing; in a block every large layer must be recognised, or the model is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.private import own_parameters
from shoestring.training.tensor.splits import Split

ROOT = Path(__file__).resolve().parents[2]
OWN = "tensor_parallel"  # the attribute in which a user's class declares how it is split


@dataclass(frozen=True)
class SplitLayers:
    """How the layers of a module are split; all names are names of its attributes."""

    columns: Mapping[str, int] = field(
        default_factory=dict
    )  # layers split by outputs -> number of equal stretches in the outputs (3 for fused query, key, value)
    rows: tuple[
        str, ...
    ] = ()  # layers split by inputs: each takes the results of columns, and its result is summed over workers
    shared: bool = False  # whether all columns take the module's own inputs, so one sum of gradients serves all
    divided: tuple[
        str, ...
    ] = ()  # counts that forward uses, such as the number of heads: each worker has a fraction of it
    whole_heads: tuple[str, ...] = ()  # attributes that must be multiples of the workers; dots allowed
    inside: tuple[
        str, ...
    ] = ()  # modules between columns and rows that every worker holds whole, such as per-head norms
    embeddings: tuple[str, ...] = ()  # split by the vocabulary
    heads: tuple[str, ...] = ()  # output layers with a number for every word, split by the vocabulary
    others: tuple[str, ...] = ()  # other submodules that it had when its forward was read


GPT = "shoestring.jobs.gpt"
GPT2 = "transformers.models.gpt2.modeling_gpt2"


def llama_like(name: str, inside: tuple[str, ...] = ()) -> dict[tuple[str, str], SplitLayers]:
    where = f"transformers.models.{name.lower()}.modeling_{name.lower()}"
    heads = ("config.num_attention_heads", "config.num_key_value_heads")
    return {
        (where, f"{name}Attention"): SplitLayers(
            {"q_proj": 1, "k_proj": 1, "v_proj": 1}, ("o_proj",), shared=True, whole_heads=heads, inside=inside
        ),
        (where, f"{name}MLP"): SplitLayers(
            {"gate_proj": 1, "up_proj": 1}, ("down_proj",), shared=True, others=("act_fn",)
        ),
        (where, f"{name}Model"): SplitLayers(embeddings=("embed_tokens",), others=("layers", "norm", "rotary_emb")),
        (where, f"{name}ForCausalLM"): SplitLayers(heads=("lm_head",), others=("model",)),
    }


KNOWN: dict[tuple[str, str], SplitLayers] = {
    (GPT, "TransformerLayer"): SplitLayers(
        {"queries_keys_values": 3, "up": 1}, ("mix", "down"), divided=("heads",), others=("before", "between")
    ),
    (GPT, "Gpt"): SplitLayers(embeddings=("bytes",), heads=("head",), others=("places", "layers", "last")),
    (GPT2, "GPT2Attention"): SplitLayers(
        {"c_attn": 3}, ("c_proj",), divided=("num_heads", "split_size"), others=("attn_dropout", "resid_dropout")
    ),
    (GPT2, "GPT2MLP"): SplitLayers({"c_fc": 1}, ("c_proj",), others=("act", "dropout")),
    (GPT2, "GPT2Model"): SplitLayers(embeddings=("wte",), others=("wpe", "drop", "h", "ln_f")),
    (GPT2, "GPT2LMHeadModel"): SplitLayers(heads=("lm_head",), others=("transformer",)),
    **llama_like("Llama"),
    **llama_like("Mistral"),
    **llama_like("Qwen2"),
    **llama_like("Qwen3", inside=("q_norm", "k_norm")),
}
NAMES = "the built-in gpt; GPT-2, Llama, Mistral, Qwen2 and Qwen3 of transformers"
ADVICE = (
    f"known are {NAMES}; declare how a class of your own is split (tensor_parallel = SplitLayers(...), "
    f"shoestring.training.tensor.layer_kinds), or use another technique"
)


@dataclass(frozen=True)
class Recognised:
    """The split layers of a model."""

    modules: Mapping[nn.Module, SplitLayers]
    splits: Mapping[nn.Parameter, Split]
    whole_inside: tuple[nn.Parameter, ...]  # held whole by all workers, though each uses them for its own heads only
    names: Mapping[nn.Module, str]


def where(kind: type) -> str:
    """The module of a class; for our own files also if they were loaded as a job file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (module_of_ours(file) if file else "") or kind.__module__


@cache
def module_of_ours(file: str) -> str:
    """The module that a file of this package is; empty for other files. Every layer of a model asks, in every rehearsal."""
    path = Path(file).resolve()
    return ".".join(("shoestring", *path.relative_to(ROOT).with_suffix("").parts)) if path.is_relative_to(ROOT) else ""


def layers_of(module: nn.Module) -> SplitLayers | None:
    """How a module is split; None: it is not recognised."""
    kind = type(module)
    own = vars(kind).get(OWN)  # not inherited: a subclass may compute something else and must declare it itself
    if own is not None:
        if not isinstance(own, SplitLayers):
            raise Mistake(
                f"{kind.__name__}.{OWN} is {own!r}: give a SplitLayers(...) of shoestring.training.tensor.layer_kinds"
            )
        return own
    found = KNOWN.get((where(kind), kind.__name__))
    return (
        found if found is not None and {name for name, _ in module.named_children()} == set(submodules(found)) else None
    )


def submodules(layers: SplitLayers) -> Iterator[str]:
    yield from (*layers.columns, *layers.rows, *layers.inside, *layers.embeddings, *layers.heads, *layers.others)


def recognise_layers(model: nn.Module, blocks: Mapping[str, nn.Module], ways: int) -> Recognised:
    """The layers to split between `ways` workers; a Mistake says what can't be split, before anything is changed."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    modules = {module: found for module in names if (found := layers_of(module)) is not None}
    if not any(layers.rows for layers in modules.values()):
        raise Mistake(f"TensorParallel knows no layer of {type(model).__name__}: {ADVICE}")
    splits: dict[nn.Parameter, Split] = {}
    for module, layers in modules.items():
        check_heads(module, layers, names[module], ways)
        for layer, weight, split in split_weights(module, layers, names[module], ways):
            if splits.setdefault(weight, split) != split:
                raise Mistake(
                    f"TensorParallel: the weight of {layer} is used twice, and would have to be split in two ways: {ADVICE}"
                )
    inside = tuple(
        weight
        for module, layers in modules.items()
        for name in layers.inside
        for weight in child(module, name).parameters()
    )
    result = Recognised(modules, splits, inside, names)
    check_blocks(blocks, result)
    check_owners(model, result)
    return result


def split_weights(
    module: nn.Module, layers: SplitLayers, name: str, ways: int
) -> Iterator[tuple[str, nn.Parameter, Split]]:
    """Every weight of a module that is split, with the name of its layer."""
    for layer, stretches in layers.columns.items():
        one = child(module, layer)
        check_even(outputs(one, f"{name}.{layer}") // stretches, ways, f"{name}.{layer}", "outputs")
        yield f"{name}.{layer}", weight_of(one), Split(1 if is_transposed(one) else 0, stretches)
        if one.bias is not None:
            yield f"{name}.{layer}", bias_of(one), Split(0, stretches)
    for layer in layers.rows:
        one = child(module, layer)
        outputs(one, f"{name}.{layer}")
        check_even(weight_of(one).shape[0 if is_transposed(one) else 1], ways, f"{name}.{layer}", "inputs")
        yield f"{name}.{layer}", weight_of(one), Split(0 if is_transposed(one) else 1)
    for layer in layers.embeddings:
        one = child(module, layer)
        check_embedding(one, f"{name}.{layer}")
        yield f"{name}.{layer}", weight_of(one), Split(0)
    for layer in layers.heads:
        one = child(module, layer)
        if outputs(one, f"{name}.{layer}") < ways:
            raise Mistake(
                f"TensorParallel: {name}.{layer} has {weight_of(one).shape[0]} words for {ways} workers: use fewer ways"
            )
        yield f"{name}.{layer}", weight_of(one), Split(1 if is_transposed(one) else 0)
        if one.bias is not None:
            yield f"{name}.{layer}", bias_of(one), Split(0)


def child(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name)


def weight_of(layer: nn.Module) -> nn.Parameter:
    assert isinstance(layer.weight, nn.Parameter), "a layer has a weight"
    return layer.weight


def bias_of(layer: nn.Module) -> nn.Parameter:
    assert isinstance(layer.bias, nn.Parameter), "the caller has checked this"
    return layer.bias


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's weight is (inputs, outputs), as in GPT-2, rather than (outputs, inputs)."""
    return type(layer) is not nn.Linear


def outputs(layer: nn.Module, name: str) -> int:
    """The number of outputs of a layer; refused if it is not a linear layer."""
    kind = type(layer)
    if kind is not nn.Linear and (kind.__module__, kind.__name__) != ("transformers.pytorch_utils", "Conv1D"):
        raise Mistake(
            f"TensorParallel: {name} is a {kind.__name__}, where an nn.Linear is expected (or a Conv1D of transformers): what "
            f"else it computes is not known; leave TensorParallel out, or that layer as it was"
        )
    return int(weight_of(layer).shape[1 if is_transposed(layer) else 0])


def check_embedding(layer: nn.Module, name: str) -> None:
    if type(layer) is not nn.Embedding:
        raise Mistake(f"TensorParallel: {name} is a {type(layer).__name__}, where an nn.Embedding is expected")
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, setting):
            raise Mistake(
                f"TensorParallel: {name} has {setting}={getattr(layer, setting)}, which needs all words on one worker: make it "
                f"without, or leave TensorParallel out"
            )


def check_even(size: int, ways: int, name: str, what: str) -> None:
    if size % ways:
        raise Mistake(
            f"TensorParallel(ways={ways}): {name} has {size} {what}, which can't be divided by {ways}: give ways that divide it"
        )


def check_heads(module: nn.Module, layers: SplitLayers, name: str, ways: int) -> None:
    for attribute in (*layers.divided, *layers.whole_heads):
        count: Any = reduce(getattr, attribute.split("."), module)
        if count % ways:
            raise Mistake(
                f"TensorParallel(ways={ways}): {name} has {attribute.rpartition('.')[2]} = {count}, which can't be divided by "
                f"{ways}: give ways that divide it"
            )


def check_blocks(blocks: Mapping[str, nn.Module], found: Recognised) -> None:
    """Refuse blocks with a matrix that is not split, since nobody has read how it is used."""
    for name, block in blocks.items():
        for part, module in block.named_modules():
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1 and weight not in found.splits:
                    place = f"{name}.{part}".rstrip(".")
                    raise Mistake(
                        f"TensorParallel does not know {place} ({type(module).__name__}, in a {type(block).__name__}), so "
                        f"it can't be split: {ADVICE}"
                    )


def check_owners(model: nn.Module, found: Recognised) -> None:
    """Refuse a split weight that is also used by a layer that is not recognised."""
    split = {
        child(module, layer)
        for module, layers in found.modules.items()
        for layer in (*layers.columns, *layers.rows, *layers.embeddings, *layers.heads)
    }
    for module in model.modules():
        for weight in own_parameters(module).values():
            if weight is not None and weight in found.splits and module not in split:
                raise Mistake(
                    f"TensorParallel: {found.names[module]} ({type(module).__name__}) shares a weight with a layer that would be "
                    f"split, and is not known itself: {ADVICE}"
                )
