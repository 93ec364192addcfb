"""A transformer described by its numbers: its weights, and the operations of a step by the usual formula."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import read_regular
from shoestring.core.files.untrusted_json import parse_json

MOST = 1 << 40  # no number of a transformer is as large
EXAMPLE = '{"hidden": 12288, "layers": 96, "heads": 96, "vocabulary": 51200, "sequence": 2048}'


@dataclass(frozen=True)
class Transformer:
    """A decoder: `layers` times attention and an MLP of two (if gated, three) matrices, and a head."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0  # 0: as many as heads
    feedforward: int = 0  # 0: four times hidden
    gated: bool = False  # a third matrix in the MLP, as in Llama
    tied: bool = True  # the head is the embedding
    positions: bool = True  # learned position embeddings
    biases: bool = True
    flash: bool = (
        True  # attention by a fused kernel that skips what a causal mask hides; else scores are written to memory
    )
    fused_loss: bool = (
        True  # cross entropy by one kernel in the precision of the logits; else in float32, operation by operation
    )
    dropout: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("kv_heads", "feedforward") else 1
            if type(value) is int and not least <= value <= MOST:
                raise Mistake(
                    f"a transformer can't have {name} {str(value)[:30]}: it must be at least {least} and at most {MOST}"
                )
        if self.hidden % self.heads:
            raise Mistake(f"hidden {self.hidden} can't be split over {self.heads} heads: choose heads that divide it")
        if self.kv_heads and self.heads % self.kv_heads:
            raise Mistake(
                f"{self.heads} heads can't share {self.kv_heads} key-value heads: choose a number that divides the heads"
            )

    @property
    def inner(self) -> int:
        return self.feedforward or 4 * self.hidden

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def key_values(self) -> int:
        """Width of keys and values together."""
        return 2 * (self.kv_heads or self.heads) * self.head_size

    def block_parameters(self) -> int:
        matrices = self.hidden * (2 * self.hidden + self.key_values + (3 if self.gated else 2) * self.inner)
        biases = (
            2 * self.hidden + self.key_values + self.hidden + (2 if self.gated else 1) * self.inner
            if self.biases
            else 0
        )
        return matrices + biases + self.norms(2)

    def norms(self, count: int) -> int:
        return count * (2 if self.biases else 1) * self.hidden

    def embedding_parameters(self) -> int:
        """Parameters before the first block."""
        return self.hidden * (self.vocabulary + (self.sequence if self.positions else 0))

    def parameters(self) -> int:
        head = 0 if self.tied else self.hidden * self.vocabulary
        return self.layers * self.block_parameters() + self.embedding_parameters() + self.norms(1) + head

    def counted_operations(self, batch: int, checkpointing: bool = True) -> float:
        """Operations of a step as arXiv 2104.04473 counts them (its formula 3): matrix products only, attention without
        the mask's savings and, with checkpointing, every block's forward twice. Without, a quarter less."""
        h, s, layers = self.hidden, self.sequence, self.layers
        counted = 96.0 * batch * s * layers * h * h * (1 + s / (6 * h) + self.vocabulary / (16 * layers * h))
        return counted if checkpointing else 0.75 * counted


def read_transformer(path: Path) -> Transformer:
    """A transformer from a JSON file with its numbers."""
    try:
        told = parse_json(read_regular(path))
    except FileNotFoundError:
        raise Mistake(f"there is no {path}: describe the model in a file such as {EXAMPLE}") from None
    except (OSError, ValueError) as error:
        raise Mistake(f"{path} does not describe a transformer ({error}): write a file such as {EXAMPLE}") from error
    return transformer(told, str(path))


def transformer(told: object, where: str) -> Transformer:
    if not isinstance(told, dict):
        raise Mistake(f"{where} does not describe a transformer: write a file such as {EXAMPLE}")
    known = {one.name: one.type for one in fields(Transformer)}
    if unknown := told.keys() - known.keys():
        raise Mistake(
            f"{where} says {', '.join(sorted(unknown))}, which is nothing of a transformer; it may say {', '.join(known)}"
        )
    if missing := json.loads(EXAMPLE).keys() - told.keys():
        raise Mistake(f"{where} does not say {', '.join(sorted(missing))} of the transformer; the least is {EXAMPLE}")
    for name, value in told.items():
        wanted = bool if known[name] == "bool" else int
        if type(value) is not wanted:
            raise Mistake(
                f"{where} says {name} {value!r}: it must be {'true or false' if wanted is bool else 'a whole number'}"
            )
    return Transformer(**told)
