"""Jobs whose loss knows a teacher: what they minimise, that planning sees the same step, and that they go on where they were."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.compression.distillation.heal import healing_job
from shoestring.compression.distillation.method import PROJECTION, distillation_job, gaussian_noise
from shoestring.compression.distillation.peers import Peers, codistillation_job, first_peer
from shoestring.compression.distillation.unlabelled import Unlabelled
from shoestring.core.batch import samples
from shoestring.core.errors import Mistake
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.evidence.trials.pieces import try_in_pieces
from shoestring.training.memory.accumulate import Accumulate
from tests.compression.distillation.toys import batches, mlp, mlp_factory, small_job, taught_by, trained

BATCH = batches()[0]


def test_the_loss_is_the_students_own_and_the_teachers_by_alpha() -> None:
    teacher, student = mlp(), mlp_factory()
    z, taught = student(BATCH[0]), teacher(BATCH[0]).detach()
    own = functional.cross_entropy(z, BATCH[1])
    kl = 4.0 * functional.kl_div((z / 2).log_softmax(-1), (taught / 2).softmax(-1), reduction="batchmean")
    for alpha in (0.3, 1.0):
        found = distillation_job(small_job(), taught_by(teacher), temperature=2.0, alpha=alpha).loss(z, BATCH)
        assert torch.allclose(found, (1 - alpha) * own + alpha * kl, atol=1e-6)


def test_a_taught_student_says_what_its_teacher_says() -> None:
    teacher = mlp(32)
    job = distillation_job(small_job(), taught_by(teacher), alpha=1.0)
    student, losses = trained(job, 80)
    untrained = fresh_model(job)
    agree = [
        float((model(BATCH[0]).argmax(1) == teacher(BATCH[0]).argmax(1)).float().mean())
        for model in (untrained, student)
    ]
    assert losses[-1] < losses[0] / 2 and agree[1] > agree[0] + 0.2


def test_without_labels_the_own_loss_is_never_asked() -> None:
    def refuse(output: Any, batch: Any) -> Tensor:
        raise AssertionError("labels are not there")

    trained(distillation_job(small_job(loss=refuse), taught_by(mlp()), alpha=1.0), 2)


JOBS: dict[str, Callable[[], Job]] = {
    "one teacher": lambda: distillation_job(small_job(), taught_by(mlp())),
    "an ensemble": lambda: distillation_job(small_job(), taught_by(mlp(), mlp(seed=1))),
    "dropout ensemble": lambda: distillation_job(small_job(), taught_by(mlp(drop=0.3), passes=3)),
    "hidden states": lambda: distillation_job(
        small_job(), taught_by(mlp(16)), objective="kl + 0.5*hidden(1=1) + hidden(3=4)"
    ),
    "peers": lambda: codistillation_job(small_job(), 3),
    "unlabelled": lambda: distillation_job(
        small_job(), taught_by(mlp()), unlabelled=small_job(data=lambda: batches(3)), ratio=2, noise=gaussian_noise(0.1)
    ),
    "held out": lambda: distillation_job(
        small_job(held_out=lambda: batches(2), metrics=lambda out, batch: {"n": out.mean()}), taught_by(mlp())
    ),
    "healing": lambda: healing_job(small_job(), mlp, mlp_factory, steps=5),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_rehearsal_has_the_peak_of_the_step(name: str) -> None:
    job = JOBS[name]()
    for plan in ((), (Accumulate(pieces=2),)):
        predicted = rehearse(job, plan)
        assert peak(predicted).bytes == peak(track(job, plan, fresh_model(job))).bytes


def test_the_teachers_weights_are_in_the_predicted_peak() -> None:
    sizes, peaks = [], []
    for width in (16, 512):
        teacher = mlp(width)
        peaks.append(peak(rehearse(distillation_job(small_job(), taught_by(teacher)), ())).bytes)
        sizes.append(sum(one.nbytes for one in teacher.parameters()))
    assert peaks[1] - peaks[0] >= sizes[1] - sizes[0] > 1_000_000


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("dropout ensemble", "unlabelled")])
def test_a_batch_in_pieces_is_the_same_lesson(name: str) -> None:
    job = JOBS[name]()
    assert try_in_pieces(job, lambda: fresh_model(job)) == {}


@pytest.mark.parametrize("name", JOBS)
def test_a_lesson_can_be_repeated_to_the_bit(name: str) -> None:
    first, second = (trained(JOBS[name](), 5)[0].state_dict() for _ in range(2))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_hidden_states_of_another_width_are_projected_and_the_projection_learns() -> None:
    job = JOBS["hidden states"]()
    model, losses = trained(job, 30)
    began = fresh_model(job)
    assert isinstance(model, nn.Sequential) and model(BATCH[0]).shape == (16, 5)  # a Sequential stays one
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters() if name.startswith(PROJECTION)}
    assert shapes == {f"{PROJECTION}0": (8, 16), f"{PROJECTION}1": (8, 16)}
    assert losses[-1] < losses[0] and not torch.equal(
        getattr(model, f"{PROJECTION}0"), getattr(began, f"{PROJECTION}0")
    )


def test_hidden_states_of_the_same_width_need_no_projection() -> None:
    job = distillation_job(small_job(), taught_by(mlp(8)), objective="hidden(1=1)")
    assert not [name for name, _ in job.model().named_parameters() if name.startswith(PROJECTION)]


def test_hidden_states_without_a_gradient_are_refused() -> None:
    job = distillation_job(small_job(), taught_by(mlp(8)), objective="hidden(1=1)")
    model = job.model()
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(Mistake, match="no gradient"):
        job.loss(job.forward(model, BATCH), BATCH)


def test_the_teacher_sees_what_the_student_sees_without_noise() -> None:
    seen: list[Tensor] = []
    teacher = mlp()
    teacher.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    job = distillation_job(small_job(), taught_by(teacher), noise=gaussian_noise(0.5))
    model = job.model()
    noisy = job.forward(model.train(), BATCH)
    job.loss(noisy, BATCH)
    assert torch.equal(seen[0], BATCH[0]) and not torch.equal(noisy, model(BATCH[0]))
    assert torch.equal(job.forward(model.eval(), BATCH), model(BATCH[0]))  # judged without noise


def test_peers_learn_from_each_other_and_the_first_is_taken_out() -> None:
    job = codistillation_job(small_job(metrics=None), 3, alpha=0.6, temperature=2.0)
    model = fresh_model(job)
    assert isinstance(model, Peers)
    each = [peer(BATCH[0]) for peer in model.peers]
    assert not torch.equal(each[0], each[1])
    expected = (
        sum(
            0.4 * functional.cross_entropy(z, BATCH[1])
            + 0.6
            * 4
            * functional.kl_div(
                (z / 2).log_softmax(-1),
                torch.stack([(o.detach() / 2).softmax(-1) for o in each if o is not z]).mean(0),
                reduction="batchmean",
            )
            for z in each
        )
        / 3
    )
    assert torch.allclose(job.loss(job.forward(model, BATCH), BATCH), torch.as_tensor(expected), atol=1e-6)
    alone = mlp_factory()
    alone.load_state_dict(first_peer(model.state_dict()))
    assert torch.equal(alone(BATCH[0]), each[0])


def test_peers_are_an_ensemble_of_teachers() -> None:
    from shoestring.compression.distillation.teachers import LoadedTeacher, Teachers

    job = codistillation_job(small_job(), 3)
    model = fresh_model(job)
    said = Teachers((lambda: LoadedTeacher(model, job.forward),)).say(BATCH)
    assert len(said.outputs) == 3 and torch.equal(said.outputs[1], model.peers[1](BATCH[0]))  # type: ignore[index,union-attr]


def test_unlabelled_batches_take_turns_and_go_on_where_they_were() -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(10, 12), torch.randint(5, (10,)))
    own = small_job(data=lambda: dataset, batch=4, held_out=lambda: dataset)
    job = distillation_job(own, taught_by(mlp()), unlabelled=small_job(data=lambda: batches(3)), ratio=2)
    whole = list(islice(Feed(job), 20))
    assert [isinstance(batch, Unlabelled) for batch in whole[:6]] == [False, True, True] * 2
    per_epoch = Feed(own).per_epoch * 3
    for stop in (0, 1, 5, per_epoch, per_epoch + 1, 13):
        feed = Feed(job)
        list(islice(feed, stop))
        again = Feed(job)
        again.load_state_dict(feed.state_dict())
        for one, other in zip(islice(again, 20 - stop), whole[stop:], strict=True):
            assert type(one) is type(other)
            one, other = (batch.batch if isinstance(batch, Unlabelled) else batch for batch in (one, other))
            assert all(map(torch.equal, one, other))
        assert (again.epoch, again.in_round) == ((20 - 1) // per_epoch, (20 - 1) % per_epoch + 1)
    assert job.held_out is not None and [samples(batch) for batch in job.held_out()] == [4, 4, 2]


def test_an_unlabelled_batch_has_no_own_loss() -> None:
    job = distillation_job(
        small_job(loss=lambda out, batch: out.sum() * float("nan")), taught_by(mlp()), alpha=0.5, unlabelled=small_job()
    )
    out = mlp_factory()(BATCH[0])
    assert torch.isfinite(job.loss(out, Unlabelled(BATCH))) and torch.isnan(job.loss(out, BATCH))


def test_healing_brings_a_damaged_model_back_without_labels() -> None:
    teacher = mlp(16)

    def damaged() -> nn.Module:
        model = mlp(16)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(0.1 * torch.randn_like(one))
        return model

    original = small_job(
        data=lambda: [{"input": x} for x, _ in batches()], forward=lambda model, batch: (model(batch["input"]), "more")
    )
    job = healing_job(original, lambda: teacher, damaged, lr=1e-2, steps=100)
    began = fresh_model(job)
    healed, _ = trained(job, 100)
    with torch.no_grad():
        off = [float((model(BATCH[0]) - teacher(BATCH[0])).square().mean()) for model in (began, healed)]
    assert off[1] < off[0] / 5
    looks = count()  # a look at this clock is a second after the last: three steps take a second
    assert healing_job(original, lambda: teacher, damaged, seconds=50.0, clock=lambda: float(next(looks))).steps == 150


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.0}, "--temperature"),
        ({"alpha": 0.0}, "--alpha"),
        ({"alpha": 1.1}, "--alpha"),
        ({"objective": "no"}, "unknown"),
        ({"unlabelled": small_job(), "ratio": 0}, "--ratio"),
    ],
)
def test_a_lesson_that_can_not_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        distillation_job(small_job(), taught_by(mlp()), **changes)


def test_peers_and_healing_that_can_not_be_are_refused() -> None:
    for changes, said in (
        ({"peers": 1}, "2 or more"),
        ({"peers": 2, "objective": "hidden(1=1)"}, "leave hidden"),
        ({"peers": 2, "alpha": 1.0}, "labels"),
    ):
        with pytest.raises(Mistake, match=said):
            codistillation_job(small_job(), **changes)  # type: ignore[arg-type]
    with pytest.raises(Mistake, match="same model"):
        codistillation_job(replace(small_job(), weights="a.safetensors"), 2)
    for how in ({}, {"steps": 3, "seconds": 2.0}, {"steps": 3, "lr": 0.0}):
        with pytest.raises(Mistake, match="healing with"):
            healing_job(small_job(), mlp, mlp_factory, **how)  # type: ignore[arg-type]


def test_a_student_with_other_classes_is_refused_with_both_shapes() -> None:
    job = distillation_job(small_job(), taught_by(mlp(classes=4)))
    with pytest.raises(Mistake, match=r"\(16, 5\) and \(16, 4\)"):
        trained(job, 1)


def test_the_defaults_are_those_that_the_benchmark_chose_and_help_on_digits() -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "compress"
    spec = importlib.util.spec_from_file_location("distillation_defaults", folder / "distillation_defaults.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tasks = json.loads((folder / "distillation_defaults.json").read_text())["tasks"]
    knobs = inspect.signature(distillation_job).parameters
    chosen = script.best_setting(tasks)
    assert (knobs["temperature"].default, knobs["alpha"].default) == chosen
    students = tasks["digits, 600 steps"]["students"]
    gains = script.gains(students)[len(students) // 2 :, script.SETTINGS.index(chosen)]
    assert float(gains.mean()) > 0, "on splits that the choice never saw"
