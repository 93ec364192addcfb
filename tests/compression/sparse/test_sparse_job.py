"""Jobs that are trained sparsely: what comes out, that nothing of it depends on being killed, and which models it is for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake
from shoestring.compression.sparse.masks import seed_mask, zeros_of
from shoestring.compression.sparse.sparse_job import Penalised, dense_of, masks_of, seeds_of, sparse_job, sparsity
from shoestring.jobfile import loaded_job
from shoestring.runs.history import History
from shoestring.runs.report import report_of
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.checkpoint import Checkpoint
from tests.waiting import until

METHODS = ["magnitude", "random", "l0", "variational"]
INPUTS = [torch.randn(16, 12, generator=torch.Generator().manual_seed(number)) for number in range(6)]
BATCHES = [(x, x[:, :4].argmax(1)) for x in INPUTS]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 24, bias=False), nn.ReLU(), nn.Linear(24, 4)
    )


def accuracy(output: Tensor, batch: Any) -> dict[str, Tensor]:
    assert isinstance(output, Tensor) and output.shape == (16, 4), "metrics see what the job's model gives"
    return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}


def job(model: Callable[[], nn.Module] = net, **more: Any) -> Job:
    return Job(
        **{
            "model": model,
            "data": lambda: BATCHES[:5],
            "held_out": lambda: BATCHES[5:],
            "metrics": accuracy,
            "steps": 40,
            "every": 20,
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            **more,
        }
    )


def trained(made: Job, techniques: Any = (), **more: Any) -> nn.Module:
    torch.manual_seed(made.seed)
    model = made.model()
    list(shoestring.train(made, techniques, model, **more))
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_the_share_is_exactly_what_was_asked_for_and_the_ordinary_model_computes_the_same(method: str) -> None:
    model = trained(sparse_job(job(), method, 0.8))
    masks = masks_of(model)
    whole = sum(mask.numel() for mask in masks.values())
    count = sum(int((~mask).sum()) for mask in masks.values())
    each = sum(zeros_of(mask.numel(), 0.8) for mask in masks.values())
    assert list(masks) == ["0.weight", "3.weight", "5.weight"]
    assert count == (each if method == "random" else zeros_of(whole, 0.8)) and sparsity(masks) == pytest.approx(
        0.8, abs=1 / whole * 3
    )
    dense, x = dense_of(model), BATCHES[5][0]
    assert torch.equal(dense.eval()(x), model.eval()(x))
    assert list(dense.state_dict()) == list(net().state_dict())
    assert [type(one) for one in dense.modules()] == [type(one) for one in net().modules()]
    assert all(torch.equal(dense.get_parameter(name) != 0, mask) for name, mask in masks.items())
    assert torch.equal(model(x), dense(x)), "the sparse model is as it was"
    net().load_state_dict(dense.state_dict())


@pytest.mark.parametrize(
    ("amount_of", "wanted"), [("all", [0.05, 0.1, 0.15, 0.2]), ("left", [0.05, 0.0975, 0.142625, 0.18549375, 0.2])]
)
def test_five_percent_go_every_so_many_steps(amount_of: str, wanted: list[float]) -> None:
    made = sparse_job(job(), "magnitude", 0.2, begin=0.1, end=1.0, every=6, amount=0.05, amount_of=amount_of)
    torch.manual_seed(0)
    model, found = made.model(), []
    for _ in shoestring.train(made, (), model):
        found.append(sparsity(masks_of(model)))
    whole = sum(mask.numel() for mask in masks_of(model).values())
    changed = [step for step in range(1, 40) if found[step] != found[step - 1]]  # steps count from 1, places from 0
    assert changed == [4 + 6 * number - 1 for number in range(1, len(wanted) + 1)]
    assert [found[place] for place in changed] == pytest.approx(wanted, abs=1 / whole)


def test_an_amount_that_does_not_fit_the_training_is_refused_with_the_steps_it_takes() -> None:
    with pytest.raises(Mistake, match="18 times, 180 steps, and 24 lie between"):
        sparse_job(job(), "magnitude", 0.9, amount=0.05, every=10)
    for wrong in ({"amount": 1.5}, {"amount": 0.05, "amount_of": "some"}):
        with pytest.raises(Mistake, match="amount"):
            sparse_job(job(), "magnitude", 0.2, **wrong)  # type: ignore[arg-type]


def test_each_layer_has_the_share_where_it_is_asked_for_so() -> None:
    masks = masks_of(trained(sparse_job(job(), "magnitude", 0.7, scope="layer", every=5)))
    assert [int((~mask).sum()) for mask in masks.values()] == [zeros_of(mask.numel(), 0.7) for mask in masks.values()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["l0", "variational"])
def test_a_steered_penalty_comes_near_the_share_by_the_methods_own_rule(method: str) -> None:
    model = trained(sparse_job(job(steps=400, every=400), method, 0.7))
    assert float(model.get_buffer("sparse_found")) == pytest.approx(0.7, abs=0.2), (
        "a task of 80 samples; the benchmark comes nearer"
    )
    assert sparsity(masks_of(model)) == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize("method", ["l0", pytest.param("variational", marks=pytest.mark.slow)])
def test_a_given_penalty_gives_more_zeros_the_larger_it_is(method: str) -> None:
    shares = [
        sparsity(
            masks_of(trained(sparse_job(job(steps=80, every=80), method, penalty=penalty, begin=0, end=0.1, pace=100)))
        )
        for penalty in (1e-7, 1e-2)
    ]
    assert shares[0] < 0.3 and shares[1] > 0.8


def test_gradients_do_not_move_weights_that_are_gone() -> None:
    made = sparse_job(
        job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)), "magnitude", 0.5, begin=0, end=0.1
    )
    torch.manual_seed(0)
    model, before = made.model(), None
    for step in shoestring.train(made, (), model):
        gone = {name: ~mask for name, mask in masks_of(model).items()}
        now = {
            name: model.get_parameter(f"{name[0]}.parametrizations.weight.original").detach()[gone[name]].clone()
            for name in gone
        }
        if before is not None and step.number > 4:
            assert all(torch.equal(before[name], now[name]) for name in now)
        before = now
    assert before is not None and sum(map(len, before.values())) == zeros_of(12 * 24 + 24 * 24 + 24 * 4, 0.5)


def test_what_is_gone_stays_gone() -> None:
    made, before = sparse_job(job(), "magnitude", 0.9, every=1), None
    torch.manual_seed(0)
    model = made.model()
    for _ in shoestring.train(made, (), model):
        masks = masks_of(model)
        assert before is None or not any((masks[name] & ~before[name]).any() for name in masks)
        before = masks


def test_random_masks_are_those_of_their_seeds_after_reload(tmp_path: Path) -> None:
    made = sparse_job(job(), "random", 0.9, seed=5)
    torch.save(trained(made).state_dict(), tmp_path / "a.pt")
    again = made.model()
    again.load_state_dict(torch.load(tmp_path / "a.pt"))
    seeds = seeds_of(again)
    assert all(torch.equal(mask, seed_mask(mask.shape, 0.9, seeds[name])) for name, mask in masks_of(again).items())
    assert len(set(seeds.values())) == 3 and seeds != seeds_of(sparse_job(job(), "random", seed=6).model())
    with pytest.raises(Mistake, match="do not follow from a seed"):
        seeds_of(sparse_job(job()).model())


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one == "l0" else pytest.mark.slow) for one in METHODS]
)
def test_a_run_that_was_left_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    made = sparse_job(job(), method, 0.8, every=3)
    torch.manual_seed(1)
    whole, parts = made.model(), made.model()
    parts.load_state_dict(whole.state_dict())
    steps = list(shoestring.train(made, (), whole, run=tmp_path / "a"))
    found = []
    for _ in range(2):  # it is left while masks change, and after that
        found += list(islice(shoestring.train(made, (), parts, run=tmp_path / "b", save_every=5), 14))
        parts = made.model()
    found += list(shoestring.train(made, (), parts, run=tmp_path / "b"))
    assert [(one.number, one.loss, dict(one.metrics)) for one in found] == [
        (one.number, one.loss, dict(one.metrics)) for one in steps
    ]
    assert report_of(tmp_path / "b").weights_sha256 == report_of(tmp_path / "a").weights_sha256
    assert {"loss", "accuracy", "sparsity"} == set(steps[-1].metrics) and steps[-1].metrics[
        "sparsity"
    ] == pytest.approx(0.8, abs=0.01)


SCRIPT = """
import signal, sys, torch, shoestring
sys.path.insert(0, {root!r})
from tests.compression.sparse.test_sparse_job import job
from shoestring.compression.sparse.sparse_job import sparse_job
made = sparse_job(job(), {method!r}, 0.8, every=3)
for step in shoestring.train(made, (), run={run!r}, save_every=4):
    if step.number == {last}:
        signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_killed_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    def script(run: str, last: int = 0) -> list[str]:
        root = str(Path(__file__).parents[3])
        return [sys.executable, "-c", SCRIPT.format(root=root, run=str(tmp_path / run), method=method, last=last)]

    subprocess.run(script("a"), check=True)

    def killed_after(steps: int) -> None:
        child = subprocess.Popen(script("b", steps))
        until(lambda: len(History().read(tmp_path / "b").steps) >= steps or child.poll() is not None, f"step {steps}")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()

    for steps in (6, 20, 33):
        killed_after(steps)
    subprocess.run(script("b"), check=True)
    assert report_of(tmp_path / "b").weights_sha256 == report_of(tmp_path / "a").weights_sha256


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one == "l0" else pytest.mark.slow) for one in METHODS]
)
def test_blocks_that_are_computed_again_draw_the_same(method: str) -> None:
    def blocks() -> nn.Module:
        return nn.Sequential(
            nn.Linear(12, 16), *(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)), nn.Linear(16, 4)
        )

    made = sparse_job(job(blocks), method, 0.8, every=3)
    assert same(trained(made), trained(made, (Checkpoint(every=1),)))


def test_a_batch_in_pieces_is_one_step() -> None:
    made = sparse_job(job(lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))), "magnitude", 0.8)
    model = trained(made, (Accumulate(pieces=4),))
    assert int(model.get_buffer("sparse_step")) == 40 and sparsity(masks_of(model)) == pytest.approx(0.8, abs=0.01)


def test_a_validation_changes_nothing_and_its_loss_has_no_penalty() -> None:
    made = sparse_job(job(), "l0", 0.8)
    assert same(trained(made), trained(sparse_job(job(held_out=None, metrics=None), "l0", 0.8)))
    model = made.model().eval()
    found = made.forward(model, BATCHES[5])
    assert isinstance(found, Penalised) and float(found.penalty) == 0
    assert torch.equal(made.loss(found, BATCHES[5]), job().loss(found.output, BATCHES[5]))


class Tied(nn.Module):
    """Its head is its embedding; tokens are taken from what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(self.embedding((x > 0).long()).mean(1))))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x.view(-1, 4, 3))[0][:, -1])
        return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.layer, self.head = (
            nn.Linear(3, 8),
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.widen(x.view(-1, 4, 3))).mean(1))
        return found


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding="same"),
        nn.Flatten(),
        nn.Linear(96, 4),
    )


AWKWARD = {
    "tied": (Tied, 2),
    "recurrent": (Recurrent, 5),
    "attention": (Attention, 6),
    "conv": (conv, 3),
    "one layer": (lambda: nn.Linear(12, 4), 1),
}  # kind -> the model, and how many of its weights become sparse


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_models_become_sparse_and_ordinary_again(kind: str, method: str) -> None:
    own, count = AWKWARD[kind]
    model = trained(sparse_job(job(own, steps=20), method, 0.8))
    masks, x = masks_of(model), BATCHES[5][0]
    assert len(masks) == count and sparsity(masks) == pytest.approx(0.8, abs=0.05)
    dense, ordinary = dense_of(model), own()
    assert list(dense.state_dict()) == list(ordinary.state_dict())
    assert [name for name, _ in dense.named_parameters()] == [name for name, _ in ordinary.named_parameters()]
    ordinary.load_state_dict(dense.state_dict())
    assert torch.equal(dense.eval()(x), model.eval()(x)) and torch.equal(ordinary.eval()(x), dense(x))
    assert all(torch.equal(dense.get_parameter(name) != 0, mask) for name, mask in masks.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", AWKWARD)
def test_runs_of_awkward_models_go_on_with_the_same_bits(kind: str, method: str, tmp_path: Path) -> None:
    made = sparse_job(job(AWKWARD[kind][0], steps=20, held_out=None, metrics=None), method, 0.8)
    torch.manual_seed(1)
    whole, parts = made.model(), made.model()
    parts.load_state_dict(whole.state_dict())
    list(shoestring.train(made, (), whole, run=tmp_path / "a"))
    list(islice(shoestring.train(made, (), parts, run=tmp_path / "b", save_every=5), 12))
    list(shoestring.train(made, (), made.model(), run=tmp_path / "b"))
    assert report_of(tmp_path / "b").weights_sha256 == report_of(tmp_path / "a").weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_models_of_transformers_become_sparse(kind: str, method: str) -> None:
    import transformers as hf

    def model() -> nn.Module:
        if kind == "bert":
            small: Any = {
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "vocab_size": 20,
            }
            return hf.BertForMaskedLM(hf.BertConfig(**small))
        if kind == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16))
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=16,
                vocab_size=20,
                tie_word_embeddings=True,
            )
        )

    tokens = torch.arange(36).view(4, 9) % 20
    made = sparse_job(Job(model=model, data=lambda: [{"input_ids": tokens, "labels": tokens}], steps=8), method, 0.75)
    sparse = trained(made)
    assert sparsity(masks_of(sparse)) == pytest.approx(0.75, abs=0.02)
    dense, ordinary = dense_of(sparse), model()
    assert list(dense.state_dict()) == list(ordinary.state_dict()), "ties hold: a state has them under all their names"
    with torch.no_grad():
        assert torch.equal(dense.eval()(tokens).logits, sparse.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"method": "magnitud"}, "did you mean"),
        ({"method": "random", "scope": "all"}, "only magnitudes have one"),
        ({"scope": "every"}, "all, layer"),
        ({"penalty": 0.1}, "only l0 and variational"),
        ({"method": "l0", "pace": -1.0}, "pace=-1"),
        ({"pace": 3.0}, "pace=3.0"),
        ({"share": 90}, "share=90"),
    ],
)
def test_what_does_not_fit_is_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        sparse_job(job(), **knobs)


def test_models_that_it_is_not_for_are_refused_with_the_reason() -> None:
    with pytest.raises(Mistake, match="no weight to make sparse"):
        sparse_job(job(lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Embedding(3, 4)))).model()
    with pytest.raises(Mistake, match="parametrized already"):
        sparse_job(job(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))))).model()
    with pytest.raises(Mistake, match="sparse job already"):
        sparse_job(sparse_job(job())).model()
    with pytest.raises(Mistake, match="has no gates"):
        dense_of(net())

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.layer.weight.T

    with pytest.raises(Mistake, match="without calling its layer"):
        trained(sparse_job(job(Aside), "variational"))
    assert sparsity(masks_of(trained(sparse_job(job(Aside), "l0", 0.5)))) == 0.5


def test_a_model_that_was_not_trained_to_the_end_is_not_taken_for_one() -> None:
    made = sparse_job(job(), share=0.8)
    torch.manual_seed(0)
    model = made.model()
    list(islice(shoestring.train(made, (), model), 12))
    with pytest.raises(Mistake, match="12 steps, and its masks are final from step 28 on"):
        dense_of(model)
    assert 0 < sparsity(masks_of(model)) < 0.8 and isinstance(dense_of(model, unfinished=True), nn.Sequential)


def test_skipped_and_frozen_weights_stay_as_they_are() -> None:
    def frozen() -> nn.Module:
        model = net()
        model[3].weight.requires_grad_(False)  # type: ignore[index]
        return model

    assert list(masks_of(sparse_job(job(frozen), skip="5, nothing*").model())) == ["0.weight"]


def test_epochs_are_counted_and_weights_of_a_file_are_taken(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(net().state_dict(), tmp_path / "w.safetensors")
    made = sparse_job(
        job(steps=0, epochs=4, weights=str(tmp_path / "w.safetensors")), share=0.5, begin=0.0, end=0.5, every=2
    )
    one, other = made.model(), made.model()
    assert same(one, other) and int(one.get_buffer("sparse_end")) == 10
    assert sparsity(masks_of(trained(made))) == pytest.approx(0.5, abs=0.01)


OTHER = """
import torch
from shoestring import Job
def job(width: int = 8, batch: int = 4) -> Job:
    pairs = torch.utils.data.TensorDataset(torch.randn(40, 12), torch.arange(40) % width)
    return Job(model=lambda: torch.nn.Linear(12, width), data=lambda: pairs, batch=batch)
"""


def test_the_job_file_trains_another_one_sparsely(tmp_path: Path) -> None:
    other, file = tmp_path / "other.py", Path(shoestring.__file__).parent / "compression/sparse/job.py"
    other.write_text(OTHER)
    made = loaded_job(file, {"of": str(other), "flags": "width=16 batch=5", "share": 0.5, "steps": 10, "seed": 3})
    assert made.steps == 10 and made.seed == 3 and made.batch == 5
    model = trained(made)
    assert int(model.get_buffer("sparse_end")) == 7 and sparsity(masks_of(model)) == pytest.approx(0.5, abs=0.01)
