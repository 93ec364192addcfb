"""Early exits: small classifier heads after some blocks of a model; confident rows leave there, and the rest of the
batch goes on.

    x -> block 1 -> ... -> block k -> head -> confidence >= threshold ?  yes: the row is answered    no: blocks k + 1, ... on the rows left

Teerapittayanon, McDanel, Kung: BranchyNet, 2016, arXiv 1709.01686; Kaya, Hong, Dumitras: Shallow-Deep Networks, 2019, arXiv 1810.07052;
Xin et al.: DeeBERT, 2020, arXiv 2004.12993; Schuster et al.: CALM, 2022, arXiv 2207.07061 (thresholds with a guarantee).

The model's own forward runs, but its blocks get only the remaining rows of every argument with a row per sample (masks
too). An nn.Sequential runs on those rows to its end. In any other model, code after the blocks (pooling, classifier)
sees the whole batch, with zeros for rows that left. There, each block's input must be the previous block's output. At
least two rows always remain: code that mixes remaining rows with the whole batch then fails on their sizes and is
refused, whereas a single row would be broadcast to all. Measured damage: benchmarks/compress/exits.json, docs/exits.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.exits.blocks import ancestors, chain_of, is_plain
from shoestring.compression.exits.confidence import check_logits, measure_named
from shoestring.compression.exits.leaves_early import ExitOutput, LeavesEarly
from shoestring.compression.exits.rows import (
    hidden_state,
    logits_of,
    row_count,
    select_rows,
    shared_leaves,
    with_hidden,
    with_logits,
)
from shoestring.compression.exits.thresholds import checked_thresholds
from shoestring.core.errors import Mistake
from shoestring.core.private import tree_leaves
from shoestring.measure.interception import instead, patch_forwards

POOLS = ("first", "mean", "grid", "none")


class Head(nn.Module):
    """A classifier head: pooling, layer norm, one linear layer.

    pool    "first" or "mean" of tokens (rows, tokens, width); "grid": means of grid x grid fields of maps (rows, channels, height, width);
            "none" of (rows, width). A mean includes padding: use the first token if lengths vary.
    """

    def __init__(self, width: int, classes: int, pool: str = "none", grid: int = 1) -> None:
        super().__init__()
        if pool not in POOLS:
            raise Mistake(f"pool={pool!r} of an exit's head: there are {', '.join(POOLS)}")
        self.pool, self.grid = pool, grid
        features = width * grid * grid if pool == "grid" else width
        self.norm = nn.LayerNorm(features)
        self.classify = nn.Linear(features, classes)

    def pooled(self, hidden: Tensor) -> Tensor:
        """The numbers of a hidden state that it reads, (rows, features)."""
        if self.pool == "first":
            return hidden[:, 0]
        if self.pool == "mean":
            return hidden.mean(1)
        return nn.functional.adaptive_avg_pool2d(hidden, self.grid).flatten(1) if self.pool == "grid" else hidden

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classified(self.pooled(hidden))

    def classified(self, pooled: Tensor) -> Tensor:
        found: Tensor = self.classify(self.norm(pooled))
        return found


class Looked(Exception):
    """Raised when a forward was followed to its first block, with the block's arguments."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given


class AllLeft(Exception):
    """Raised when no row is left."""


class EarlyExitModel(LeavesEarly):
    """A model with exit heads after some of its blocks.

    heads number of blocks before the exit -> its head, a module of the hidden state: {2: Head(64, 10), 4: Head(64, 10)}
    thresholds a row leaves if its confidence is at least the exit's threshold; inf (the default): the exit is off and
    its head not computed measure of confidence: "probability", "entropy" or "margin" Thresholds are in the state dict,
    with model and heads. In training, and if all exits are off, it behaves as the model itself.

    >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)), nn.Linear(4, 2)).eval()
    >>> early = EarlyExitModel(net, {1: Head(4, 2)}, (0.0,)).eval()
    >>> early.answer(torch.ones(5, 4)).exits.tolist()
    [0, 0, 0, 0, 0]
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Mapping[int, nn.Module],
        thresholds: Sequence[float] | None = None,
        measure: str = "probability",
    ) -> None:
        super().__init__()
        self.names = tuple(chain_of(model))
        after = sorted(heads)
        if not after or after[0] < 1 or after[-1] >= len(self.names):
            raise Mistake(
                f"exits after blocks {after} of a model with {len(self.names)} ({self.names[0]} to {self.names[-1]}): give "
                f"numbers from 1 to {len(self.names) - 1}; after the last block the model answers itself"
            )
        plain = [all(is_plain(one) for one in ancestors(model, name)) for name in self.names]
        self.whole = all(plain)  # modules called one after the other, so that code between and after blocks is known
        parents = [name.rpartition(".")[0] for name in self.names]
        self.joined = frozenset(
            number
            for number in range(1, len(parents))
            if self.whole or (parents[number] == parents[number - 1] and is_plain(model.get_submodule(parents[number])))
        )
        self.model, self.heads = model, nn.ModuleDict({str(number): heads[number] for number in after})
        self.after = tuple(after)
        self.measure, self.sureness = measure, measure_named(measure)
        chosen = checked_thresholds(thresholds if thresholds is not None else (math.inf,) * len(after), len(after))
        self.register_buffer("thresholds", torch.tensor(chosen, dtype=torch.float64))
        self.shared: frozenset[int] | None = (
            None  # numbers of the blocks' arguments that all rows share; None: not inspected yet
        )
        self.kind: type | None = None  # type of the model's output, once seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        limits = self.thresholds.tolist()
        if self.training or all(limit == math.inf for limit in limits):
            self.depths = None
            return self.model(*args, **kwargs)
        return super().forward(*args, **kwargs)

    @torch.no_grad()
    def answer(self, *args: Any, **kwargs: Any) -> ExitOutput:
        """The output, and where every row left."""
        if any(module.training for module in self.modules()):
            raise Mistake(
                "rows leave early in evaluation only: in training, batch norms and dropout would see other batches; call "
                ".eval() first"
            )
        passage = Passage(self, row_count(args, kwargs), (args, kwargs))
        with patch_forwards(
            {block: instead(block, passage.around(number, block)) for number, block in enumerate(self.chain())}
        ):
            try:
                logits = passage.end_logits(self.model(*args, **kwargs))
            except AllLeft:
                logits = None
            except (RuntimeError, IndexError) as error:
                if passage.rows is None:
                    raise
                raise Mistake(
                    f"with {len(passage.rows)} of {passage.count} rows left the model failed, in or after block "
                    f"{self.names[passage.called - 1]}: {error}. If it does not without exits, something outside its blocks uses "
                    f"rows of the whole batch with those that are left: put that into a block, or use a Cascade"
                ) from error
        if (
            self.kind is None
        ):  # all rows of the first batch left: one of them goes to the end, to see the type of the model's output
            args, kwargs = select_rows((args, kwargs), torch.arange(1), passage.count)
            self.kind = type(self.model(*args, **kwargs))
        found = passage.put_together(logits)
        return found._replace(output=with_logits(self.kind, found.output))

    def all_exits(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Logits of every exit for all rows, and the model's own output; with gradients."""
        hidden: dict[int, Tensor] = {}
        blocks = self.chain()

        def noting(number: int) -> Callable[..., None]:
            def note(module: nn.Module, given: Any, output: Any) -> None:
                hidden.setdefault(number, hidden_state(output))

            return note

        handles = [blocks[number - 1].register_forward_hook(noting(number)) for number in self.after]
        try:
            output = self.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if len(hidden) < len(self.after):
            missing = [self.names[number - 1] for number in self.after if number not in hidden]
            raise Mistake(
                f"the model's forward did not call its blocks {missing}: exits after them are never reached; choose others"
            )
        self.kind = type(output)
        return tuple(self.head(number, hidden[number]) for number in self.after), output

    def head(self, after: int, hidden: Tensor) -> Tensor:
        return check_logits(self.heads[str(after)](hidden), f"the head after block {after}")

    def chain(self) -> list[nn.Module]:
        """The blocks as they are now: other techniques may have replaced some."""
        return [self.model.get_submodule(name) for name in self.names]

    def active_exits(self) -> dict[int, tuple[int, float]]:
        """Number of blocks before the exit -> number and threshold, for exits that are on."""
        return {
            after: (number, limit)
            for number, (after, limit) in enumerate(zip(self.after, self.thresholds.tolist(), strict=True))
            if limit < math.inf
        }


class Passage:
    """One batch's pass through the blocks."""

    def __init__(self, early: EarlyExitModel, count: int, given: tuple[Any, Any]) -> None:
        self.early, self.count, self.given = early, count, given
        self.exits_at, self.called = early.active_exits(), 0
        self.rows: Tensor | None = None  # the remaining rows; None: all
        self.first: Any = None  # the first block's input
        self.last: Any = None  # the last block's output, for the remaining rows
        device = early.thresholds.device
        self.exits = torch.full((count,), len(early.after), device=device)
        self.confidence = torch.full((count,), math.nan, dtype=torch.float64, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.answers: list[tuple[Tensor, Tensor]] = []  # rows, and their logits
        self.whole = early.whole

    def around(self, number: int, block: nn.Module) -> Callable[..., Any]:
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if number != self.called:
                raise Mistake(
                    f"the model calls block {self.name(number)} when {self.name(self.called)} is next: early exits need blocks "
                    f"that are called once each, in order"
                )
            self.called += 1
            if number == 0:
                self.first = (args, kwargs)
            if self.rows is not None:
                args, kwargs = self.smaller(number, args, kwargs)
            output = inner(*args, **kwargs)
            if number + 1 in self.exits_at:
                output = self.let_leave(number + 1, output)
            return self.pass_on(number, output)

        return forward

    def name(self, number: int) -> str:
        return self.early.names[number] if number < len(self.early.names) else "nothing more"

    def smaller(self, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a block for the remaining rows."""
        assert self.rows is not None, "who calls has looked"
        hidden = hidden_state(self.last)
        if number in self.early.joined:  # only modules lie between: a single argument, with the remaining rows already
            return args, kwargs
        leaves = tree_leaves((args, kwargs))
        if not any(leaf is hidden for leaf in leaves):
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            found = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)}"
            raise Mistake(
                f"block {self.name(number)} is given {found} that is not what {self.name(number - 1)} gave: the model computes "
                f"between its blocks, where rows of the whole batch may be mixed with those that are left; put that into a "
                f"block, or make the model an nn.Sequential"
            )
        small: tuple[Any, Any] = select_rows((args, kwargs), self.rows, self.count, self.shared_arguments(), hidden)
        return small

    def shared_arguments(self) -> frozenset[int]:
        """Arguments of blocks that do not become shorter for a smaller batch, found once: all rows share them, whatever
        their size."""
        if self.early.shared is None:
            fewer = select_rows(self.given, torch.arange(self.count - 1), self.count)
            first = self.early.chain()[0]

            def stop(*args: Any, **kwargs: Any) -> Any:
                raise Looked((args, kwargs))

            try:
                with patch_forwards({first: stop}):
                    self.early.model(*fewer[0], **fewer[1])
            except Looked as found:
                self.early.shared = shared_leaves(self.first, found.given)
        return self.early.shared or frozenset()

    def let_leave(self, after: int, output: Any) -> Any:
        """Answer the confident rows; return the block's output for the others."""
        exit, limit = self.exits_at[after]
        hidden = hidden_state(output)
        rows = self.rows if self.rows is not None else torch.arange(self.count, device=hidden.device)
        if len(hidden) != len(rows):
            raise Mistake(
                f"block {self.name(after - 1)} gives {tuple(hidden.shape)} for {len(rows)} rows: rows must come first"
            )
        logits = self.early.head(after, hidden)
        sure = self.early.sureness(logits).double()
        leaves = (sure >= limit) & ~self.done[rows]
        if not bool(leaves.any()):
            return output
        gone = rows[leaves]
        self.exits[gone], self.confidence[gone], self.done[gone] = exit, sure[leaves], True
        self.answers.append((gone, logits[leaves]))
        stays = ~self.done[rows]
        if not bool(stays.any()):
            raise AllLeft
        if not self.whole and int(stays.sum()) == 1 and len(rows) > 1:
            stays[int((~stays).nonzero()[0, 0])] = True  # a second row for the last one; its answer is known already
        on = stays.nonzero()[:, 0]
        self.rows = rows[on]
        return select_rows(output, on, len(rows))

    def pass_on(self, number: int, output: Any) -> Any:
        """The block's output as the model gets it."""
        self.last = output
        if self.rows is None or self.whole or number + 1 < len(self.early.names):
            return output
        hidden = hidden_state(output)
        full = hidden.new_zeros(self.count, *hidden.shape[1:])
        full[self.rows] = hidden
        return with_hidden(output, full)

    def end_logits(self, output: Any) -> Tensor:
        """Logits of the rows that went to the end."""
        self.early.kind = type(output)
        logits = check_logits(logits_of(output), "the model")
        return logits if self.rows is None or self.whole else logits[self.rows]

    def put_together(self, logits: Tensor | None) -> ExitOutput:
        """Logits of all rows in their original order."""
        if not self.answers:
            return ExitOutput(logits, self.exits, self.confidence)
        some = logits if logits is not None else self.answers[0][1]
        whole = some.new_empty(self.count, some.shape[1])
        if logits is not None:
            whole[self.rows] = logits
        for rows, found in self.answers:
            whole[rows] = found.to(whole.dtype)
        return ExitOutput(whole, self.exits, self.confidence)


def with_exits(
    model: nn.Module, heads: Mapping[int, nn.Module], thresholds: Sequence[float], measure: str = "probability"
) -> nn.Module:
    """The model with exits, ready to be called; its state dict can be loaded into another one made in the same way."""
    return EarlyExitModel(model, heads, thresholds, measure).eval()
