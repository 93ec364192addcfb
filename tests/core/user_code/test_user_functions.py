"""A Job's functions that can't be called as they will be are told of when it is made; a loss that mistakes the batch, in its first call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoestring import Job, Mistake
from shoestring.core.errors import says_out_of_memory
from shoestring.core.optimization.schedule import with_schedule
from shoestring.core.running.run import plain_run
from shoestring.core.user_code.user_functions import guard_loss
from shoestring.data.feed import Feed
from shoestring.processes.messages import Cause, Failure
from shoestring.processes.worker import last_message
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.validation import metrics_by_name

GOOD: dict[str, Any] = {"model": lambda: nn.Linear(8, 3), "data": list}
WRONG = [
    (
        "loss",
        lambda output: output,
        r"loss in the Job is a function of \(output\).*called as loss\(output, batch\); write loss=lambda",
    ),
    ("loss", 3, "loss in the Job is a int, not a function"),
    (
        "model",
        nn.Linear(8, 3),
        r"model in the Job is a model, and a function that makes it is needed, .*write model=lambda: MyModel\(\)",
    ),
    ("forward", lambda model, x, y: x, r"called as forward\(model, batch\)"),
    ("validate", lambda: {"a": 1}, r"called as validate\(model\)"),
    ("collate", "pad", r"collate in the Job is a str, not a function: it is called as collate\(samples\)"),
    ("largest", torch.zeros(4, 8), "largest in the Job is a Tensor, not a function: it is called as largest()"),
    ("group", {"a": "b"}, r"group in the Job is a dict, not a function: it is called as group\(name\)"),
    ("answer", "text", "answer in the Job is a str, not a function"),
    ("answer", lambda text: text, "answer in the Job has no yield: it must yield a sample"),
    ("answer", lambda: (yield 1), "answer in the Job takes nothing"),
    ("batch", "8", "batch='8' in the Job: give a whole number, such as 2"),
    ("steps", 1e3, r"steps=1000\.0 in the Job: give a whole number"),
    ("clip", "1", "clip='1' in the Job: give a number"),
    ("clip", float("nan"), "clip=nan in the Job: give 0 or more"),
]


def answered(text: str, scale: int = 1) -> Iterator[Any]:
    yield text * scale


class Answering:
    def __call__(self, text: str) -> Iterator[Any]:
        yield text

    def answered(self, text: str) -> Iterator[Any]:
        yield text


@pytest.mark.parametrize(("name", "function", "said"), WRONG)
def test_what_can_not_be_called_so_is_told_when_the_job_is_made(name: str, function: Any, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        Job(**{**GOOD, name: function})


@pytest.mark.parametrize(
    "loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss(), lambda output, batch, scale=2: scale * output.sum()]
)
def test_what_can_be_called_so_is_taken(loss: Any) -> None:
    for answer in (answered, partial(answered, scale=2), Answering(), Answering().answered):
        assert Job(**GOOD, answer=answer).answer == answer
    assert Job(**GOOD, loss=loss, optimizer=torch.optim.SGD).loss is loss


BATCH = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.MSELoss(), lambda output, batch: batch["y"]])
def test_a_loss_that_takes_the_batch_for_a_tensor_is_told_what_it_was_given(loss: Any) -> None:
    with pytest.raises(
        Mistake,
        match=r"It is called as loss\(output, batch\), with .* \(a Tensor\) and the whole batch \(a tuple of 2\): "
        r"write loss=lambda output, batch: cross_entropy\(output, batch\[1\]\)",
    ):
        guard_loss(loss)(torch.zeros(2, 3), BATCH)


def test_another_failure_of_the_loss_stays_what_it_is() -> None:
    def loss(output: Any, batch: Any) -> Any:
        raise TypeError("can't convert this to numpy")

    with pytest.raises(TypeError, match="numpy"):
        guard_loss(loss)(torch.zeros(2, 3), BATCH)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, batch: output.detach().sum(), "depends on no weight that is trained.*detach"),
        (
            lambda output, batch: nn.functional.cross_entropy(output, batch[1], reduction="none"),
            r"tensor of shape \(2,\)",
        ),
        (lambda output, batch: None, "gave None"),
    ],
)
def test_a_loss_that_nothing_can_be_trained_by_is_told_what_it_gave(loss: Any, said: str) -> None:
    job = Job(**GOOD, loss=loss)
    run = plain_run(job, nn.Linear(8, 3), {})
    with pytest.raises(Mistake, match=f"the job's loss .*{said}"):
        run.gradients(run, (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)))


def test_a_metric_that_is_not_one_number_is_named_with_what_it_is() -> None:
    with pytest.raises(Mistake, match=r"metrics gave a tensor of shape \(8,\) as 'accuracy': it must be one number"):
        metrics_by_name({"loss": torch.tensor(2.0), "accuracy": torch.zeros(8)}, "metrics")
    with pytest.raises(Mistake, match=r"metrics gave a tensor of shape \(\): it must give numbers by name"):
        metrics_by_name(torch.tensor(0.5), "metrics")


@pytest.mark.parametrize(("made", "said"), [(3, "gave a int"), (None, "gave None"), (nn.Linear, "gave a type")])
def test_a_factory_that_makes_no_module_is_told_what_it_made(made: Any, said: str) -> None:
    with pytest.raises(Mistake, match=f"the job's model {said}: it must give a torch.nn.Module"):
        fresh_model(Job(model=lambda: made, data=list))


@pytest.mark.parametrize(("made", "said"), [(5, "a int"), (None, "None"), ("batches.pt", "a str")])
def test_a_function_that_makes_no_data_is_told_what_it_made(made: Any, said: str) -> None:
    with pytest.raises(Mistake, match=f"the job's data give {said}: batches"):
        Feed(Job(model=nn.Identity, data=lambda: made))


class Mute(Exception):
    """An error of a user's class that fails to say what it is about."""

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_can_not_say_anything_is_the_job_s_all_the_same() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        raise Mute

    job = Job(**GOOD, forward=forward)
    run = plain_run(job, nn.Linear(8, 3), {})
    task = TrainTask(file="job.py")
    found = last_message(task, lambda: run.gradients(run, BATCH))
    assert isinstance(found, Failure) and found.cause is Cause.JOB and "test_user_functions.py line" in found.text
    assert "Mute;" in found.text and not says_out_of_memory(Mute())


class Proxy:
    """A callable whose every attribute raises, as a proxy to a service may."""

    def __init__(self, function: Any) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no connection for {name}")


def test_a_callable_whose_attributes_raise_is_called_as_any_other() -> None:
    functions = {
        "model": lambda: nn.Linear(8, 3),
        "loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        "forward": lambda model, batch: model(batch[0]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }
    job = Job(data=list, **{name: Proxy(function) for name, function in functions.items()})
    run = with_schedule(job, plain_run(job, job.model(), {}))
    assert run.gradients(run, (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))).ndim == 0
