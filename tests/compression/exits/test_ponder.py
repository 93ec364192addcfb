"""Adaptive computation time: formulas against plain loops, and computing less gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.exits import AdaptiveRecurrent, AdaptiveTokens, AdaptiveUnits, Pondered, ponder_job
from shoestring.core.errors import Mistake
from shoestring.core.job import Job


def halted(probabilities: list[float], most: int, epsilon: float = 0.01) -> tuple[int, float, list[float]]:
    """N, R and p of one item, by Graves's definition."""
    steps = next((n for n in range(1, most + 1) if sum(probabilities[:n]) >= 1 - epsilon), most)
    remainder = 1 - sum(probabilities[: steps - 1])
    return steps, remainder, [*probabilities[: steps - 1], remainder]


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@torch.no_grad()
def test_one_row_of_a_recurrent_network_by_hand(cell: str) -> None:
    torch.manual_seed(0)
    net = AdaptiveRecurrent(3, 6, cell, max_steps=7, bias=-1.0).eval()
    x = torch.randn(1, 4, 3)
    state: Any = tuple(torch.zeros(1, 6) for _ in range(2 if cell == "lstm" else 1))
    outputs, ponder = [], 0.0
    for element in x[0]:
        states, probabilities, now = [], [], state
        for number in range(7):
            given = torch.cat((element, torch.tensor([1.0 if number == 0 else 0.0])))[None]
            now = net.cell(given, now if cell == "lstm" else now[0])
            now = now if cell == "lstm" else (now,)
            states.append(now)
            probabilities.append(float(torch.sigmoid(net.halting(now[0]))))
        steps, remainder, weights = halted(probabilities, 7)
        state = tuple(
            sum(weight * one[part] for weight, one in zip(weights, states, strict=False)) for part in range(len(state))
        )
        outputs.append(state[0])
        ponder += (steps + remainder) / 4
    found = net(x)
    torch.testing.assert_close(found.value, torch.stack(outputs, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.ponder, torch.tensor([ponder]), rtol=0, atol=1e-5)


def spread(net: nn.Module, by: float) -> None:
    """Let items halt at very different steps."""
    for name, weight in net.named_parameters():
        if name.startswith(("halting.weight", "scores", "pooled")) and weight.dim() > 1:
            nn.init.normal_(weight, std=by)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@torch.no_grad()
def test_a_recurrent_network_that_leaves_halted_rows_out_gives_the_same(cell: str) -> None:
    torch.manual_seed(1)
    net = AdaptiveRecurrent(3, 8, cell, max_steps=9, bias=-1.0).eval()
    spread(net, 2.0)
    x, lengths = torch.randn(12, 5, 3), torch.randint(1, 6, (12,))
    dense, compact = net(x, lengths, compact=False), net(x, lengths)
    assert len(compact.steps.unique()) > 3
    check_same(dense, compact)
    for number in range(12):  # and what a row gets alone, without its padding
        alone = net(x[number : number + 1, : int(lengths[number])])
        torch.testing.assert_close(compact.value[number, : int(lengths[number])], alone.value[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(compact.ponder[number], alone.ponder[0], rtol=0, atol=1e-5)
        assert (
            not compact.value[number, int(lengths[number]) :].any()
            and not compact.steps[number, int(lengths[number]) :].any()
        )


def check_same(dense: Pondered, compact: Pondered) -> None:
    assert torch.equal(dense.steps, compact.steps)
    torch.testing.assert_close(dense.value, compact.value, rtol=0, atol=1e-6)
    torch.testing.assert_close(dense.ponder, compact.ponder, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_cell_sees_the_rows_that_run() -> None:
    torch.manual_seed(1)
    net = AdaptiveRecurrent(3, 8, "gru", max_steps=9, bias=-1.0).eval()
    spread(net, 2.0)
    seen: list[int] = []
    net.cell.register_forward_hook(lambda module, given, output: seen.append(len(given[0])))
    found = net(torch.randn(20, 2, 3))
    assert sum(seen) == int(found.steps.sum()) < 20 * 2 * int(found.steps.max())


def residual(channels: int, inner: int, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, inner, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(inner),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Conv2d(inner, channels, 3, padding=2, dilation=2),
    )


@torch.no_grad()
def adaptive_units(seed: int, **options: Any) -> AdaptiveUnits:
    torch.manual_seed(seed)
    net = AdaptiveUnits([residual(4, 6), residual(4, 5, 1), residual(4, 6), residual(4, 3, 5)], 4, bias=-0.5, **options)
    spread(net, 0.7)
    net(torch.randn(16, 4, 6, 7))  # statistics
    return net.eval()


@pytest.mark.parametrize("gathered_below", [0.0, 0.3, 1.1])
@torch.no_grad()
def test_maps_computed_where_positions_run_are_the_same(gathered_below: float) -> None:
    net = adaptive_units(0, gathered_below=gathered_below)
    x = torch.randn(5, 4, 6, 7)
    dense, compact = net(x, compact=False), net(x)
    assert len(compact.steps.unique()) == 4
    check_same(dense, compact)
    check_same(net(x[2:3]), Pondered(compact.value[2:3], compact.ponder[2:3], compact.steps[2:3]))  # a row alone


@torch.no_grad()
def test_positions_of_a_map_by_hand() -> None:
    net = adaptive_units(3)
    given = x = torch.randn(1, 4, 6, 7)
    running, totals = torch.ones(6, 7, dtype=torch.bool), torch.zeros(6, 7)
    maps, probabilities = [], []
    for branch, score, pooled in zip(net.branches, net.scores, net.pooled, strict=True):
        x = torch.where(running, x + branch(x), x)
        probability = torch.sigmoid(score(x)[0, 0] + pooled(x.mean((2, 3))))
        totals = torch.where(running, totals + probability, totals)
        running = running & (totals < 1 - 0.01)
        maps.append(x[0])
        probabilities.append(probability)
    found, ponder = net(given), 0.0
    for down in range(6):
        for across in range(7):
            steps, remainder, weights = halted([float(one[down, across]) for one in probabilities], 4)
            expected = sum(weight * one[:, down, across] for weight, one in zip(weights, maps, strict=False))
            assert int(found.steps[0, down, across]) == steps
            torch.testing.assert_close(found.value[0, :, down, across], expected, rtol=0, atol=1e-5)
            ponder += (steps + remainder) / 42
    torch.testing.assert_close(found.ponder, torch.tensor([ponder]), rtol=0, atol=1e-5)


def test_branches_that_cannot_be_computed_by_position_are_refused() -> None:
    for branch, said in (
        (nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1)), "with Conv2d"),
        (nn.Sequential(nn.ReLU()), "without a convolution"),
        (nn.Conv2d(4, 4, 1), "a Conv2d"),
        (nn.Sequential(nn.Conv2d(4, 4, 3)), "with Conv2d"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)), "with GroupNorm"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")), "with Conv2d"),
        (nn.Sequential(nn.Conv2d(4, 5, 1)), "from 4 to 5 channels"),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)), "running statistics"),
    ):
        with pytest.raises(Mistake, match=said):
            AdaptiveUnits([branch], 4)  # type: ignore[list-item]


def tokens(seed: int, **options: Any) -> AdaptiveTokens:
    torch.manual_seed(seed)
    net = AdaptiveTokens(8, 2, max_steps=6, bias=-1.0, **options)
    spread(net, 0.5)
    return net.eval()


@torch.no_grad()
def test_tokens_that_halted_are_not_computed_and_all_is_the_same() -> None:
    net = tokens(0)
    x, lengths = torch.randn(7, 9, 8), torch.tensor([9, 1, 4, 9, 7, 2, 5])
    padding = torch.arange(9) >= lengths[:, None]
    seen: list[int] = []
    net.work.register_forward_hook(lambda module, given, output: seen.append(len(given[0])))
    compact = net(x, padding)
    assert sum(seen) == int(compact.steps.sum()) and len(compact.steps.unique()) >= 4
    dense = net(x, padding, compact=False)
    check_same(dense, compact)
    for number, length in enumerate(lengths.tolist()):  # a row alone, without its padding
        alone = net(x[number : number + 1, :length])
        torch.testing.assert_close(compact.value[number, :length], alone.value[0], rtol=0, atol=1e-6)
        assert torch.equal(compact.steps[number, :length], alone.steps[0]) and not compact.steps[number, length:].any()
        torch.testing.assert_close(compact.ponder[number], alone.ponder[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_tokens_by_hand() -> None:
    net = tokens(2)
    x = torch.randn(5, 8)
    state, out, total, steps = [row.clone() for row in x], [torch.zeros(8) for _ in x], [0.0] * 5, [0] * 5
    running = [True] * 5
    for number in range(6):
        given = [one + net.step_embedding[number] if runs else one for one, runs in zip(state, running, strict=True)]
        keys, values = (
            torch.stack([net.key_value(net.first_norm(one)) for one in given])
            .unflatten(1, (2, 2, 4))
            .permute(1, 2, 0, 3)
        )
        for token in [token for token in range(5) if running[token]]:
            asks = net.query(net.first_norm(given[token])).view(2, 1, 4)
            found = torch.softmax(asks @ keys.transpose(1, 2) / 2, 2) @ values
            middle = given[token] + net.out(found.flatten())
            state[token] = middle + net.work(net.second_norm(middle))
            probability, steps[token] = float(torch.sigmoid(net.halting(state[token]))), steps[token] + 1
            ends = total[token] + probability >= 0.99 or number == 5
            out[token] = out[token] + (1 - total[token] if ends else probability) * state[token]
            total[token], running[token] = total[token] + probability, not ends
    found = net(x[None])
    assert found.steps[0].tolist() == steps
    torch.testing.assert_close(found.value[0], torch.stack(out), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveRecurrent(3, 4, max_steps=0),
        lambda: AdaptiveRecurrent(3, 4, "cnn"),
        lambda: AdaptiveTokens(7, 2),
        lambda: AdaptiveTokens(8, 2, epsilon=1.0),
    ],
)
def test_limits_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(Mistake):
        make()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ponder, self.classify = AdaptiveRecurrent(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Pondered:
        return self.ponder(x).map(lambda states: self.classify(states[:, -1]))


def test_the_ponder_cost_travels_with_the_output_and_the_jobs_own_loss_sees_the_value() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 3, 2), torch.randint(0, 3, (6,)))
    job = Job(
        model=Counting,
        data=lambda: [batch],
        held_out=lambda: [batch],
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
    )
    pondering, model = ponder_job(job, 0.5), Counting()
    output = model(batch[0])
    assert torch.allclose(pondering.loss(output, batch), job.loss(output.value, batch) + 0.5 * output.ponder.mean())
    assert pondering.metrics is not None and set(pondering.metrics(output, batch)) == {"accuracy", "steps"}
    pondering.loss(output, batch).backward()
    assert model.ponder.halting.weight.grad is not None and model.ponder.halting.weight.grad.abs().sum() > 0
    with pytest.raises(Mistake, match="Pondered"):
        pondering.loss(output.value, batch)
    with pytest.raises(Mistake, match="tau"):
        ponder_job(job, -1.0)


def test_only_the_remainder_has_a_derivative() -> None:
    """d ponder / d h_n = -1 for n < N, 0 for n = N (Graves, equation 14)."""
    from shoestring.compression.exits.ponder import halt

    first, second = torch.tensor([0.4], requires_grad=True), torch.tensor([0.7], requires_grad=True)
    one = halt(first, torch.zeros(1), last=False)
    two = halt(second, one.total, last=False)
    (2 + two.remainder).sum().backward()
    assert first.grad is not None and first.grad.item() == -1 and (second.grad is None or second.grad.item() == 0)
