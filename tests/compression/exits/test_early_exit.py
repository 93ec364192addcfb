"""Rows that leave a batch early."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.exits import MEASURES, CascadeModel, EarlyExitModel, Head, with_exits
from shoestring.core.errors import Mistake
from tests.compression.exits.toys import Block, Residual, Stages, Tokens, chain, heads_of


def one_by_one(early: EarlyExitModel, row: Any) -> tuple[int, Tensor]:
    """The reference: all exits of one row alone, and the first that is sure."""
    logits, end = early.all_exits(*row) if isinstance(row, tuple) else early.all_exits(**row)
    for number, (found, limit) in enumerate(zip(logits, early.thresholds.tolist(), strict=True)):
        if float(MEASURES[early.measure](found)) >= limit:
            return number, found
    return len(logits), end if isinstance(end, Tensor) else end["logits"]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_every_row_gets_what_it_gets_alone(measure: str, rows: int) -> None:
    torch.manual_seed(rows)
    early = EarlyExitModel(chain(), heads_of((1, 3), 8, 3), measure=measure).eval()
    x = 2 * torch.randn(rows, 5)
    with torch.no_grad():
        middles = [float(MEASURES[measure](logits).median()) for logits in early.all_exits(x)[0]]
        early.thresholds.copy_(torch.tensor(middles) + 1e-4)
        found = early.answer(x)
        for number in range(rows):
            exit, logits = one_by_one(early, (x[number : number + 1],))
            assert int(found.exits[number]) == exit
            torch.testing.assert_close(found.output[number], logits[0], rtol=0, atol=1e-6)
    assert rows < 16 or len(set(found.exits.tolist())) == 3, "rows leave at each exit and at the end"


@pytest.mark.parametrize(
    "limits, exits", [((0.0, 0.0), {0}), ((math.inf, 0.0), {1}), ((1.1, 1.1), {2}), ((math.inf, math.inf), {2})]
)
@pytest.mark.parametrize("rows", [1, 7])
def test_all_leave_at_the_first_exit_or_none_does(limits: tuple[float, ...], exits: set[int], rows: int) -> None:
    torch.manual_seed(0)
    model = chain()
    early = with_exits(model, heads_of((1, 2), 8, 3), limits)
    x = torch.randn(rows, 5)
    found = early.answer(x)  # type: ignore[operator]
    assert set(found.exits.tolist()) == exits
    if exits != {2}:
        with torch.no_grad():
            torch.testing.assert_close(found.output, early.all_exits(x)[0][min(exits)], rtol=0, atol=1e-6)  # type: ignore[operator]
    else:
        assert torch.equal(found.output, model(x)) and bool(found.confidence.isnan().all())


def test_blocks_after_the_last_row_left_are_not_computed_and_the_batch_gets_smaller() -> None:
    torch.manual_seed(0)
    model, seen = chain(), []
    for block in list(model)[1:5]:  # type: ignore[call-overload]
        block.work.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    early = EarlyExitModel(model, heads_of((1, 2), 8, 3)).eval()
    x = torch.randn(32, 5)
    with torch.no_grad():
        limit = float(MEASURES["probability"](early.all_exits(x)[0][0]).median())
    seen.clear()
    early.thresholds.copy_(torch.tensor((limit, 0.0)))
    found = early.answer(x)
    left = int((found.exits > 0).sum())
    assert seen == [32, left] and 0 < left < 32
    assert not any("forward" in block.__dict__ for block in model.modules()), "nothing is left behind"


def test_stages_of_other_shapes_with_batch_norms() -> None:
    torch.manual_seed(1)
    model = Stages()
    model(torch.randn(20, 1, 8, 8))  # statistics
    early = EarlyExitModel(model.eval(), {1: Head(4, 3, "grid", 2), 3: Head(8, 3, "grid")}).eval()
    x = torch.randn(12, 1, 8, 8)
    with torch.no_grad():
        early.thresholds.copy_(
            torch.tensor([float(MEASURES["probability"](one).quantile(0.6)) + 1e-5 for one in early.all_exits(x)[0]])
        )
        found = early.answer(x)
        for number in range(12):
            exit, logits = one_by_one(early, (x[number : number + 1],))
            assert int(found.exits[number]) == exit
            torch.testing.assert_close(found.output[number], logits[0], rtol=0, atol=1e-6)
        early.thresholds.zero_()
        assert early(x).shape == (12, 3), "all leave before the shape changes"


@pytest.mark.parametrize(
    "rows, tokens", [(6, 9), (9, 9), (2, 7), (16, 16)]
)  # as many rows as tokens: a table that is no row's
def test_masks_and_tuples_and_tables_of_positions(rows: int, tokens: int) -> None:
    torch.manual_seed(rows)
    early = EarlyExitModel(Tokens().eval(), heads_of((1, 2), 8, 4, "first")).eval()
    lengths = torch.randint(1, tokens + 1, (rows,))
    batch = {
        "ids": torch.randint(0, 20, (rows, tokens)),
        "attention_mask": (torch.arange(tokens) < lengths[:, None]).long(),
    }
    with torch.no_grad():
        early.thresholds.copy_(
            torch.tensor([float(MEASURES["probability"](one).median()) + 1e-5 for one in early.all_exits(**batch)[0]])
        )
        found = early.answer(**batch)
        assert set(found.output) == {"logits"}
        for number in range(rows):
            row = {
                name: value[number : number + 1, : int(lengths[number])] for name, value in batch.items()
            }  # without its padding
            exit, logits = one_by_one(early, row)
            assert int(found.exits[number]) == exit
            torch.testing.assert_close(found.output["logits"][number], logits[0], rtol=0, atol=1e-6)


def test_a_bert_from_a_config_with_padding() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    early = EarlyExitModel(model, heads_of((1, 2), 16, 3, "first")).eval()
    assert early.names == tuple(f"bert.encoder.layer.{number}" for number in range(3))
    lengths = torch.tensor([3, 11, 7, 5, 11, 2, 8, 4])
    batch = {"input_ids": torch.randint(0, 50, (8, 11)), "attention_mask": (torch.arange(11) < lengths[:, None]).long()}
    with torch.no_grad():
        sure = [MEASURES["probability"](one) for one in early.all_exits(**batch)[0]]
        early.thresholds.copy_(torch.tensor([float(one.quantile(0.6)) + 1e-6 for one in sure]))
        found = early.answer(**batch)
        assert len(set(found.exits.tolist())) == 3 and type(found.output) is type(model(**batch))
        for number in range(8):
            row = {name: value[number : number + 1, : int(lengths[number])] for name, value in batch.items()}
            exit, logits = one_by_one(early, row)
            assert int(found.exits[number]) == exit
            torch.testing.assert_close(found.output.logits[number], logits[0], rtol=0, atol=1e-6)
        early.thresholds.zero_()
        fresh = copy.deepcopy(early)
        fresh.kind = None
        assert fresh(**batch).logits.shape == (8, 3), (
            "all rows of the first batch leave, and the kind of output is known"
        )


def test_the_state_dict_goes_round() -> None:
    torch.manual_seed(0)
    early, other = (
        with_exits(chain(), heads_of((1, 2), 8, 3), limits) for limits in ((0.5, 0.6), (math.inf, math.inf))
    )
    x = torch.randn(9, 5)
    other.load_state_dict(early.state_dict())
    assert torch.equal(other(x), early(x)) and other.thresholds.tolist() == early.thresholds.tolist()
    assert torch.equal(copy.deepcopy(early)(x), early(x))


class Between(nn.Module):
    """Mixes the rows of the whole batch in, between its blocks or after them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.classify, self.where = nn.ModuleList(Block(5) for _ in range(3)), nn.Linear(5, 3), where

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = x, []
        for layer in self.layers:
            hidden = layer(hidden + x if self.where == "mixed" else 2 * hidden if self.where == "between" else hidden)
            kept.append(hidden)
        found: Tensor = self.classify(hidden + kept[1] if self.where == "after" else hidden)
        return found


@pytest.mark.parametrize(
    "where, said",
    [
        ("between", "computes between its blocks"),
        ("mixed", "uses rows of the whole batch"),
        ("after", "uses rows of the whole batch"),
    ],
)
def test_a_model_that_mixes_rows_outside_of_its_blocks_is_refused_even_for_one_row_left(where: str, said: str) -> None:
    torch.manual_seed(0)
    early = EarlyExitModel(Between(where), heads_of((1,), 5, 3)).eval()
    x = torch.randn(8, 5)
    with torch.no_grad():
        sure = MEASURES["probability"](early.all_exits(x)[0][0]).sort().values.double()
    for left in (1, 3):  # one row would be added to all, in silence
        early.thresholds.fill_(float(sure[left]))
        with pytest.raises(Mistake, match=said):
            early(x)


@pytest.mark.parametrize("rows, limits", [(2, "one leaves"), (5, "all but one leave")])
def test_a_last_row_that_takes_company_along_changes_nothing(rows: int, limits: str) -> None:
    torch.manual_seed(3)
    early = EarlyExitModel(Between("nowhere"), heads_of((1, 2), 5, 3)).eval()
    x = torch.randn(rows, 5)
    with torch.no_grad():
        first, second = (MEASURES["probability"](one).double() for one in early.all_exits(x)[0])
        stays = int(first.argmin())
        early.thresholds.copy_(
            torch.stack((first.sort().values[1], second[stays] + 1e-5))
        )  # company may be sure there, it is not
        found = early.answer(x)
        expected = [2 if number == stays else 0 for number in range(rows)]
        assert found.exits.tolist() == expected
        for number in range(rows):
            torch.testing.assert_close(
                found.output[number], one_by_one(early, (x[number : number + 1],))[1][0], rtol=0, atol=1e-6
            )


def test_refusals_say_what_was_found() -> None:
    with pytest.raises(Mistake, match=r"no chain of like blocks in Bilinear.*found the model \(Bilinear\).*Cascade"):
        EarlyExitModel(nn.Bilinear(2, 2, 2), heads_of((1,), 2, 2))
    with pytest.raises(Mistake, match="no chain of like blocks in LSTM"):
        EarlyExitModel(nn.LSTM(2, 2), heads_of((1,), 2, 2))
    with pytest.raises(Mistake, match=r"3 thresholds .* for 2 exits"):
        EarlyExitModel(chain(), heads_of((1, 2), 8, 3), (0.5, 0.5, 0.5))
    with pytest.raises(Mistake, match="for 1 exits"):
        EarlyExitModel(chain(), heads_of((1,), 8, 3), (math.nan,))
    with pytest.raises(Mistake, match="from 1 to 3"):
        EarlyExitModel(chain(), heads_of((4,), 8, 3))
    with pytest.raises(Mistake, match="probability, entropy, margin"):
        EarlyExitModel(chain(), heads_of((1,), 8, 3), measure="luck")
    with pytest.raises(Mistake, match=r"\(rows, classes\)"):
        with_exits(chain(), {1: nn.Linear(8, 1)}, (0.5,))(torch.randn(2, 5))
    with pytest.raises(Mistake, match=r"\.eval\(\)"):
        EarlyExitModel(chain(), heads_of((1,), 8, 3), (0.5,)).train().answer(torch.randn(2, 5))  # type: ignore[attr-defined]


def test_in_training_it_is_the_model() -> None:
    model = nn.Sequential(Residual(1, 4), Residual(4, 4), Residual(4, 4), nn.Flatten(), nn.Linear(64, 2))
    early = EarlyExitModel(model, {1: Head(4, 2, "grid")}, (0.0,)).train()
    early(torch.randn(3, 1, 4, 4)).sum().backward()
    assert model[-1].weight.grad is not None


def test_a_cascade_gives_every_row_what_it_gets_alone_with_masks_too() -> None:
    torch.manual_seed(0)
    cascade = CascadeModel([Tokens(depth=1), Tokens(depth=2), Tokens(depth=3)]).eval()
    batch = {
        "ids": torch.randint(0, 20, (10, 7)),
        "attention_mask": (torch.arange(7) < torch.randint(1, 8, (10, 1))).long(),
    }
    with torch.no_grad():
        small, _ = cascade.all_exits(**batch)
        sure = [MEASURES["probability"](one) for one in small]
        cascade.thresholds.copy_(torch.tensor([float(sure[0].quantile(0.6)), float(sure[1].quantile(0.3))]) + 1e-6)
        found = cascade.answer(**batch)
        assert len(set(found.exits.tolist())) == 3
        for number in range(10):
            row = {name: value[number : number + 1] for name, value in batch.items()}
            alone = cascade.answer(**row)
            assert int(alone.exits[0]) == int(found.exits[number])
            torch.testing.assert_close(found.output["logits"][number], alone.output["logits"][0], rtol=0, atol=1e-6)
    for limits, exits in (((0.0, 0.0), {0}), ((math.inf, 0.0), {1}), ((2.0, math.inf), {2})):
        cascade.thresholds.copy_(torch.tensor(limits))
        assert set(cascade.answer(**batch).exits.tolist()) == exits


def test_a_cascade_refuses_one_model_other_classes_and_other_numbers_of_thresholds() -> None:
    with pytest.raises(Mistake, match="1 models"):
        CascadeModel([chain()])
    with pytest.raises(Mistake, match="2 thresholds"):
        CascadeModel([chain(), chain()], (0.5, 0.5))
    with pytest.raises(Mistake, match="same"):
        CascadeModel([chain(classes=3), chain(classes=4)], (2.0,)).eval()(torch.randn(2, 5))
