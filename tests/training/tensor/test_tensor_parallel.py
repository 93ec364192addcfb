"""TensorParallel: the gradients of one process, from parts of its layers; and what can't be split, said before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.core.batch import Batch
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.core.running.run_weights import bring_home, weights
from shoestring.core.workers.mesh import Mesh, imagined_mesh
from shoestring.jobfile import job_path, load_job
from shoestring.measure.blocks import blocks
from shoestring.planning.choose import requested_candidate
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import build_run, rehearse
from shoestring.training.execution.snapshot import optimizer_state, put_optimizer_state
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.stages.stages import Stages
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.layer_kinds import recognise_layers
from shoestring.training.tensor.split_vocabulary import SplitLogits
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.models import hugging
from tests.training.tensor.split_models import LLAMA, MODELS, Pair, apart, made, run_of, split_job, whole_gradients
from tests.training.thread_links import in_threads

LINE = {"data": 1, "stage": 1, "tensor": 2}
slow = pytest.mark.slow


def gradients_apart(job: Job, techniques: tuple[Technique, ...], sizes: dict[str, int]) -> float:
    """How far gradients of a group are from those of one process; their losses are compared on the way."""
    model = made(job)
    plain = run_of(job, (), model)
    loss = plain.gradients(plain, next(iter(job.data())))

    def work(mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
        run = run_of(job, techniques, model, mesh)
        return float(run.gradients(run, next(iter(job.data())))), whole_gradients(run)

    found = in_threads(sizes, work)
    assert all(value == pytest.approx(float(loss), rel=1e-6) for value, _ in found)
    return max(apart(gradients, whole_gradients(plain)) for _, gradients in found)


@pytest.mark.parametrize(
    ("name", "ways", "sequence"),
    [
        ("gpt", 2, False),
        ("gpt", 4, True),
        ("gpt2", 2, False),
        ("gpt2", 2, True),
        ("llama", 2, False),
        ("llama tied", 2, True),
        ("frozen bottom", 2, False),
        ("frozen bottom", 2, True),
        pytest.param("gpt2", 4, False, marks=slow),
        pytest.param("gpt", 4, False, marks=slow),
        pytest.param("llama tied", 2, False, marks=slow),
        *(
            pytest.param(name, 2, sequence, marks=slow)
            for name in ("mistral", "qwen2", "qwen3")
            for sequence in (False, True)
        ),
    ],
)
def test_gradients_are_those_of_one_process(name: str, ways: int, sequence: bool) -> None:
    """Vocabularies that can't be divided, tied embeddings, grouped heads and norms of each head among them."""
    assert gradients_apart(split_job(name), (TensorParallel(ways, sequence),), LINE | {"tensor": ways}) <= 1e-6


@pytest.mark.parametrize("more", [Checkpoint(every=1), Accumulate(2)], ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_are_computed_again_and_batches_in_pieces_as_ever(more: Technique, sequence: bool) -> None:
    assert gradients_apart(split_job("gpt2"), (TensorParallel(2, sequence), more), LINE) <= 2e-6


@pytest.mark.parametrize("uniting", [DataParallel(), Shard(1), pytest.param(Shard(2), marks=slow)], ids=str)
def test_clipped_training_on_two_axes_is_that_of_one_process(uniting: Technique) -> None:
    """Lines of two share layers, two lines share the batch; the norm is that of all weights, those that all hold counted once."""
    job = split_job("gpt", clip=0.05, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5, momentum=0.9))
    model, batch = made(job), next(iter(job.data()))
    plain = run_of(job, (), model)
    norms = [plain.noted.take_norm() for _ in steps(plain, [batch] * 3)]

    def work(mesh: Mesh) -> tuple[list[float | None], dict[str, Tensor]]:
        run = run_of(job, (TensorParallel(2), uniting), model, mesh)
        half = job.pieces(batch, 2)[mesh.along("data").rank]
        found = [run.noted.take_norm() for _ in steps(run, [half] * 3)]
        bring_home(run)
        return found, {name: value.detach() for name, value in run.model.named_parameters()}

    for found, after in in_threads({"data": 2, "stage": 1, "tensor": 2}, work):
        assert found == pytest.approx(norms, rel=1e-5) and min(filter(None, norms)) > 0.05, "it is clipped"
        assert apart(after, {name: value.detach() for name, value in plain.model.named_parameters()}) <= 1e-5


@pytest.mark.parametrize(
    ("name", "plan", "sizes"),
    [
        ("gpt", TensorParallel(2), {"data": 2, "stage": 1, "tensor": 2}),  # norms are held by both workers of a line,
        ("gpt2", Pipeline(2, 2), {"data": 2, "stage": 2, "tensor": 1}),
    ],
)  # tied embeddings by both stages
def test_short_messages_between_copies_leave_weights_that_several_workers_hold_alike(
    name: str, plan: Technique, sizes: dict[str, int]
) -> None:
    job = split_job(name, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    model, batch = made(job), next(iter(job.data()))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    plain = run_of(job, (), model)
    list(steps(plain, [batch] * 6))
    wanted = {name: value.detach() for name, value in plain.model.named_parameters()}
    lock = Lock()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        with lock:  # a worker is a thread here, and all have one random state
            run = build_run(replace(job, mesh=mesh), (plan, CompressGradients("int8")), deepcopy(model))
        mesh.link.objects("all have it")
        half = job.pieces(batch, 2)[mesh.along("data").rank]
        list(steps(run, [half] * 6))
        stages = run.state.get("stages")
        tied = stages.weights.tied if isinstance(stages, Stages) else {}
        own = {
            name: value.detach().clone()
            for name, value in run.model.named_parameters()
            if (name in tied or run.held.share(value) < 1) and value not in run.held.elsewhere
        }
        assert own, "some are held by several"
        bring_home(run)
        return own | {f"whole {name}": value.detach() for name, value in run.model.named_parameters()}

    found = in_threads(sizes, work)
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in set(other) & set(found[0]))
    way = max(float((wanted[one] - before[one]).norm()) for one in wanted)
    assert all(float((found[0][f"whole {one}"] - value).norm()) <= 0.01 * way for one, value in wanted.items())


def test_the_optimizer_s_state_is_that_of_one_process_through_two_techniques() -> None:
    """What Shard parts of what TensorParallel parts is put together for a checkpoint, and taken apart again on another mesh."""
    job = split_job("gpt2")
    model, batch = made(job), next(iter(job.data()))
    plain = run_of(job, (), model)
    list(steps(plain, [batch] * 2))

    def whole(value: Any) -> Any:
        return (
            value
            if isinstance(value, Tensor)
            else torch.cat([piece.clone() for piece in value.pieces()]).view(value.shape)
        )

    def save(mesh: Mesh) -> dict[int, dict[str, Tensor]]:
        run = run_of(job, (TensorParallel(2), Shard(1)), model, mesh)
        list(steps(run, [job.pieces(batch, 2)[mesh.along("data").rank]] * 2))
        state = optimizer_state(run)["state"]
        return {number: {key: whole(value) for key, value in found.items()} for number, found in state.items()}

    saved = in_threads({"data": 2, "stage": 1, "tensor": 2}, save)[0]
    expected = plain.optimizer.state_dict()
    assert saved.keys() == expected["state"].keys()
    for number, found in saved.items():
        for key, value in found.items():
            assert torch.allclose(value, expected["state"][number][key], rtol=1e-3, atol=1e-7), (number, key)

    def load(mesh: Mesh) -> list[Tensor]:
        run = run_of(job, (TensorParallel(2),), model, mesh)
        put_optimizer_state(run, {**expected, "state": saved})
        again = optimizer_state(run)["state"]
        return [whole(value) for _, found in sorted(again.items()) for _, value in sorted(found.items())]

    for again in in_threads(LINE, load):
        assert all(
            torch.equal(value, other)
            for value, other in zip(
                again, (value for _, found in sorted(saved.items()) for _, value in sorted(found.items())), strict=True
            )
        )


def test_between_steps_the_model_is_the_user_s_but_for_parts_of_weights() -> None:
    job = split_job("gpt2")
    model, batch = made(job), next(iter(job.data()))
    expected = model(**batch).loss.detach()

    def work(mesh: Mesh) -> tuple[float, bool, int, float]:
        run = run_of(job, (TensorParallel(2),), model, mesh)
        before = {name: dict(vars(module)) for name, module in run.model.named_modules()}
        run.gradients(run, batch)
        same = all(vars(module) == before[name] for name, module in run.model.named_modules())
        own = sum(weight.numel() for weight in run.model.parameters())
        with torch.no_grad(), run.outside.usable():
            alone = (
                float(run.model(**batch).loss) if mesh.link.rank == 0 else float(expected)
            )  # one of them, as for `show`
        assert run.outside.together is not None
        with torch.no_grad(), run.outside.together():
            all_of_them = float(run.model(**batch).loss)
        assert all(
            torch.equal(
                torch.cat(list(value.pieces())).view(value.shape) if not isinstance(value, Tensor) else value,
                model.state_dict()[name],
            )
            for name, value in weights(run).items()
        )
        return alone, same, own, all_of_them

    count = sum(weight.numel() for weight in model.parameters())
    for alone, same, own, all_of_them in in_threads(LINE, work):
        assert (
            alone == pytest.approx(float(expected), rel=1e-6)
            and same
            and all_of_them == pytest.approx(float(expected), rel=1e-6)
        )
        assert 0.5 * count < own < 0.52 * count + 64 * 64, "half of nearly all; positions are whole"


# Losses of all kinds


def shifted(output: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(
        output[:, :-1].reshape(-1, output.size(-1)), batch[1][:, :-1].reshape(-1), ignore_index=7
    )


def by_hand(output: Tensor, batch: Batch) -> Tensor:
    chances = torch.log_softmax(output.float() / 2.0, dim=-1)
    return -chances.gather(-1, batch[1].unsqueeze(-1)).mean() + 1e-3 * output.square().mean()


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "shifted": shifted,
    "by hand": by_hand,
    "summed": lambda output, batch: (
        functional.cross_entropy(output[..., :, :].view(-1, 256), batch[1].view(-1), reduction="sum") / 96
    ),
    "each": lambda output, batch: (
        functional.cross_entropy((2 * output).flatten(0, 1), batch[1].flatten(), reduction="none").square().sum()
    ),
    "smoothed": lambda output, batch: functional.cross_entropy(
        output.flatten(0, 1), batch[1].flatten(), label_smoothing=0.1
    ),
    "classes second": lambda output, batch: nn.CrossEntropyLoss()(output.transpose(1, 2), batch[1]),
    "masked": lambda output, batch: functional.cross_entropy(output[batch[1] > 50], batch[1][batch[1] > 50]),
    "soft": lambda output, batch: functional.cross_entropy(
        output.flatten(0, 1), functional.one_hot(batch[1].flatten(), 256).float()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_of_split_words_is_that_of_all_words(name: str) -> None:
    assert gradients_apart(split_job("gpt", loss=LOSSES[name]), (TensorParallel(2),), LINE) <= 2e-6


def logits_of(mesh: Mesh, whole: Tensor) -> SplitLogits:
    parts = whole.tensor_split(2, -1)
    return SplitLogits.of(
        parts[mesh.along("tensor").rank].clone().requires_grad_(), whole.shape[-1], mesh.along("tensor")
    )


def test_split_words_look_like_all_words() -> None:
    whole = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))

    def work(mesh: Mesh) -> None:
        logits = logits_of(mesh, whole)
        assert (
            logits.shape == (2, 3, 7)
            and logits.size(-1) == 7
            and logits.dim() == 3
            and len(logits) == 2
            and logits.requires_grad
        )
        assert isinstance(logits, Tensor) and logits.device.type == "cpu" and "SplitLogits" in repr(logits)
        for split in (
            logits.view(-1, 7),
            logits.flatten(0, 1),
            logits[:, 1:],
            logits[..., :2, :],
            logits[0],
            logits.double(),
            logits / 3,
            logits.unsqueeze(0),
            logits.detach(),
        ):
            assert isinstance(split, SplitLogits)
        for found, expected in (
            (logits.argmax(-1), whole.argmax(-1)),
            (logits[..., 2], whole[..., 2]),
            (logits + whole, whole + whole),
            (torch.stack([logits, logits]), torch.stack([whole, whole])),
            (logits.view(7, 6), whole.view(7, 6)),
            (logits[:, None, 1:].detach().tolist(), whole[:, None, 1:].tolist()),
        ):
            assert not isinstance(found, SplitLogits) and (
                found == expected if isinstance(found, list) else torch.equal(found, expected)
            )
        for change in (
            lambda: logits.div_(2),
            lambda: logits.__setitem__(0, 1.0),
            logits.retain_grad,
            lambda: logits.__itruediv__(2),
        ):
            with pytest.raises(Mistake, match="in place"):
                change()

    in_threads(LINE, work)


@pytest.mark.parametrize("target", [7, -1])
def test_a_word_that_is_not_in_the_vocabulary_is_an_error(target: int) -> None:
    def work(mesh: Mesh) -> None:
        with pytest.raises(IndexError, match="the vocabulary has 7 words"):
            functional.cross_entropy(logits_of(mesh, torch.zeros(1, 7)), torch.tensor([target]))

    in_threads(LINE, work)


def test_a_line_along_tensor_draws_alike_and_all_others_apart() -> None:
    sizes = {"data": 2, "stage": 3, "tensor": 2}
    assert [imagined_mesh(sizes, rank).draws_as for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [imagined_mesh({"data": 3}, rank).draws_as for rank in range(3)] == [0, 1, 2]


# What is refused


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(Pair(), nn.Linear(16, 16)), nn.Sequential(Pair(), nn.Linear(16, 16))]
        )


class Heir(Pair):
    """It may compute something else than the class that said how it is split."""


def tied() -> nn.Module:
    model = nn.Sequential(Pair(), Pair(), nn.Linear(16, 32))
    model[2].weight = model[0].up.weight
    return model


def with_sparse() -> nn.Module:
    model = MODELS["gpt"]()
    model.bytes = nn.Embedding(256, 64, sparse=True)
    return model


def with_other_layer() -> nn.Module:
    model = MODELS["llama"]()
    model.model.layers[1].mlp.up_proj = nn.Bilinear(64, 1, 128)
    return model


@pytest.mark.parametrize(
    ("factory", "ways", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, "knows no layer of Sequential"),
        (MODELS["gpt"], 3, "layers.0 has heads = 4, which can't be divided by 3"),
        (MODELS["llama"], 4, "num_key_value_heads = 2, which can't be divided by 4"),
        (
            hugging("LlamaForCausalLM", "LlamaConfig", **LLAMA | {"intermediate_size": 127}),
            2,
            "gate_proj has 127 outputs",
        ),
        (
            hugging(
                "GPT2LMHeadModel",
                "GPT2Config",
                n_layer=2,
                n_embd=64,
                n_head=4,
                vocab_size=100,
                add_cross_attention=True,
            ),
            2,
            r"does not know transformer.h.0.crossattention.c_attn \(Conv1D, in a GPT2Block\)",
        ),
        (
            hugging("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=2),
            2,
            "knows no layer of MixtralForCausalLM",
        ),
        (Stranger, 2, r"does not know layers.0.1 \(Linear, in a Sequential\)"),
        (lambda: nn.Sequential(Heir(), Heir()), 2, "knows no layer"),
        (tied, 2, r"2 \(Linear\) shares a weight"),
        (with_sparse, 2, "bytes has sparse=True"),
        (with_other_layer, 2, "up_proj is a Bilinear, where an nn.Linear is expected"),
    ],
)
def test_what_can_t_be_split_is_said_and_nothing_is_changed(
    factory: Callable[[], nn.Module], ways: int, said: str
) -> None:
    model = factory()
    before = {name: weight.shape for name, weight in model.named_parameters()}
    with pytest.raises(Mistake, match=said):
        recognise_layers(model, blocks(model), ways)
    assert before == {name: weight.shape for name, weight in model.named_parameters()}


def test_an_optimizer_that_looks_at_whole_weights_is_refused() -> None:
    job = split_job("gpt", optimizer=torch.optim.Adafactor)
    with pytest.raises(Mistake, match="Adafactor looks at whole weights"):
        run_of(job, (TensorParallel(2),), made(job), imagined_mesh(LINE))


@pytest.mark.parametrize("ways", [1, 0, True, "2"])
def test_ways_are_a_number_of_workers(ways: Any) -> None:
    with pytest.raises(Mistake, match="2 or more"):
        TensorParallel(ways)


def test_sequences_that_can_t_be_divided_are_refused() -> None:
    job = split_job("gpt", data=lambda: iter([(torch.zeros(2, 7, dtype=torch.int64),) * 2] * 2))
    with pytest.raises(Mistake, match="7 tokens can't be divided by 2 workers"):
        rehearse(replace(job, mesh=imagined_mesh(LINE)), (TensorParallel(2, sequence=True),))


def test_a_weight_that_is_used_as_if_it_were_whole_is_found_before_training() -> None:
    """A penalty on the norms of weights would be one on those of their parts."""
    model = MODELS["gpt"]()
    job = split_job(
        "gpt",
        loss=lambda output, batch: (
            functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
            + sum(weight.norm() for weight in held[0].parameters())
        ),
        forward=lambda made, batch: (held.__setitem__(slice(None), [made]), made(batch[0]))[1],
    )
    held: list[nn.Module] = [model]
    with pytest.raises(
        Mistake, match=r"outside of the module that it belongs to.*TensorParallel every worker has a part"
    ):
        rehearse(replace(job, mesh=imagined_mesh(LINE)), (TensorParallel(2),))


def test_what_does_not_go_with_it_has_a_reason() -> None:
    assert "Shard(stage=2) goes with" in conflict((TensorParallel(2), Shard(3)))
    assert not conflict((TensorParallel(2), Shard(1))) and not conflict((TensorParallel(2), DataParallel()))


def test_layers_that_transformers_has_now_are_those_whose_code_was_read() -> None:
    """A new version with other submodules is not recognised, and this test says so."""
    for name, factory in MODELS.items():
        model = factory()
        assert recognise_layers(model, blocks(model), 2).splits, (name, transformers.__version__)


def test_the_ledger_s_arithmetic_is_close_to_what_is_rehearsed() -> None:
    """Of peak and bytes sent; of a plan that is confirmed, the rehearsed ones count."""
    flags = {"width": 64, "depth": 4, "heads": 4, "context": 64, "batch": 8}
    for world, plans in (
        (2, ((TensorParallel(2),), (TensorParallel(2, sequence=True),))),
        (4, ((TensorParallel(4),),)),
    ):
        planner = Planner(
            replace(load_job(job_path("gpt"), flags), steps=3),
            Hardware(described=True, memory=1 << 40),
            wanted=plans[0],
            devices=world,
        )
        for plan in plans:
            one = requested_candidate(plan, planner.ledger())
            found = planner.predictor.plan(one)
            assert one.known["peak_bytes"] == pytest.approx(found.predicted["peak_bytes"], rel=0.1), plan
            assert one.known["sent_bytes"] == pytest.approx(found.predicted["sent_bytes"], rel=0.02), plan
