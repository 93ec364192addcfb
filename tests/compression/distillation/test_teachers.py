"""Teachers say what they would say in evaluation, and nothing about them changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoestring.compression.distillation.losses import mean_log_probabilities
from shoestring.compression.distillation.method import distillation_job
from shoestring.compression.distillation.teachers import LoadedTeacher, Teachers
from shoestring.core.errors import Mistake
from tests.compression.distillation.toys import batches, mlp, small_job, taught_by, trained

BATCH = batches()[0]


def test_a_teachers_weights_buffers_and_mode_stay_as_they_are() -> None:
    teacher = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trained(distillation_job(small_job(), taught_by(teacher)), 5)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not teacher.training and not any(one.requires_grad or one.grad is not None for one in teacher.parameters())


def test_several_are_the_mean_of_their_probabilities() -> None:
    models = [mlp(seed=seed) for seed in range(3)]
    said = taught_by(*models).say(BATCH)
    expected = torch.stack([(model(BATCH[0]) / 2).softmax(-1) for model in models]).mean(0)
    assert torch.allclose(mean_log_probabilities(said.outputs, 2.0).exp(), expected, atol=1e-6)


def test_passes_of_a_dropout_ensemble_differ_by_dropout_alone() -> None:
    teacher = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 5))
    running = teacher[1].running_mean.clone()  # type: ignore[operator,union-attr]
    said = taught_by(teacher, passes=200).say(BATCH).outputs
    assert len(said) == 200 and not torch.equal(said[0], said[1])
    assert torch.equal(running, teacher[1].running_mean) and not any(module.training for module in teacher.modules())  # type: ignore[arg-type]
    assert torch.allclose(
        torch.stack(said).mean(0), teacher(BATCH[0]), atol=0.25
    )  # a linear last layer: the mean is without dropout


def test_dropout_inside_an_encoder_layer_and_a_recurrent_net_is_on() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.3, batch_first=True)
            self.memory = nn.LSTM(12, 12, num_layers=2, dropout=0.3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.memory(x[:, None])[0] if self.recurrent else self.encoder(x[:, None])
            return out

        recurrent = False

    for recurrent in (False, True):
        net = Net()
        net.recurrent = recurrent
        one, two = taught_by(net, passes=2).say(BATCH).outputs
        assert not torch.equal(one, two)


def test_passes_without_dropout_are_refused() -> None:
    with pytest.raises(Mistake, match="no dropout"):
        taught_by(mlp(drop=0.0), passes=3).say(BATCH)
    with pytest.raises(Mistake, match="2 passes or more"):
        taught_by(mlp(), passes=1)
    with pytest.raises(Mistake, match="without a teacher"):
        taught_by()


def test_a_teacher_is_opened_once_when_it_is_asked_and_draws_nothing() -> None:
    calls = []

    def opened() -> LoadedTeacher:
        calls.append(1)
        return LoadedTeacher(nn.Linear(12, 5))  # draws its weights

    teachers = Teachers((opened,))
    assert not calls
    before = torch.get_rng_state()
    teachers.say(BATCH), teachers.say(BATCH)
    assert len(calls) == 1 and torch.equal(before, torch.get_rng_state())


def test_a_module_that_is_not_there_or_not_called_is_refused() -> None:
    with pytest.raises(Mistake, match="no module 'nowhere'"):
        taught_by(mlp()).say(BATCH, ["nowhere"])
    odd = mlp()
    odd[0].register_module("spare", nn.Linear(2, 2))
    with pytest.raises(Mistake, match="not called"):
        taught_by(odd).say(BATCH, ["0.spare"])
