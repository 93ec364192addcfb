"""Whose failure it is: what goes wrong in the user's model, loss, data or optimizer is the job's; what goes wrong in our engines, ours."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from shoestring import Job
from shoestring.core.user_code.blame import ROOT, blame_for
from shoestring.core.user_code.seams import calls_user
from shoestring.data.feed import Feed
from shoestring.measure.fake import Stage
from shoestring.measure.holdings import Holders
from shoestring.measure.tracker import Tracker, watch_run
from shoestring.processes.messages import Answer, Cause, Failure
from shoestring.processes.worker import last_message
from shoestring.training.evidence.rehearse import build_run, tracked_steps
from shoestring.training.evidence.tasks import specs_of
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.memory import accumulate
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers import step_in_backward
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import seeded

HERE = Path(__file__).name


def rows(width: int = 8, labels: int = 4) -> Any:
    return torch.randn(6, width), torch.randint(labels, (6,))


def layers(width: int = 8) -> nn.Module:
    """A model that is nothing but torch's layers: the user has no frame in it."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)), nn.Linear(width, 4))


class Own(nn.Module):
    def __init__(self, raises: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.raises = nn.Linear(8, 4), raises

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.raises(x))


def asserted(x: Tensor) -> Tensor:
    assert x.shape[1] == 9, "nine columns"
    return x


def library(tmp: Path) -> type[nn.Module]:
    """A model of an installed library."""
    code = (
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(8, 4)\n    def forward(self, x):\n        raise RuntimeError('of the library')\n"
    )
    held: dict[str, Any] = {}
    exec(compile(code, str(tmp / "site-packages" / "models" / "net.py"), "exec"), held)
    return held["Net"]


def failing(made: Job, techniques: tuple[Technique, ...] = (), looked: bool = True) -> Any:
    """What a worker has to say of a job that fails; looked: in its first steps, which are tracked."""

    def work() -> dict[str, Any]:
        tracker = Tracker()
        run = build_run(made, techniques, seeded(made))
        batches: Iterator[Any] = islice(Feed(made), 3)
        for _ in (
            tracked_steps(watch_run(run, tracker, Holders(made)), batches, tracker)
            if looked
            else steps_of(run, batches)
        ):
            pass
        return {}

    return last_message(TrainTask(file=HERE, techniques=specs_of(techniques)), work)


def cause(last: Any) -> Cause | None:
    return last.cause if isinstance(last, Failure) else None


def steps_of(run: Any, batches: Any) -> Any:
    from shoestring.training.loop import steps

    return steps(run, batches)


def plain(**changes: Any) -> Job:
    return replace(Job(model=layers, data=lambda: [rows()] * 4, optimizer=torch.optim.AdamW), **changes)


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize(
    ("what", "made", "techniques", "said"),
    [
        (
            "a line of the user's model",
            plain(model=lambda: Own(lambda x: x @ torch.zeros(3, 3))),
            (),
            f"failed in {HERE} line",
        ),
        ("an assertion of the user", plain(model=lambda: Own(asserted)), (), "AssertionError: nine columns"),
        (
            "layers that do not fit together",
            plain(model=lambda: layers(7)),
            (),
            "failed in its model, in the module 0.0 (Linear)",
        ),
        (
            "the same, recomputed",
            plain(model=lambda: layers(7)),
            (Checkpoint(every=1),),
            "failed in its model, in the module 0.0 (Linear)",
        ),
        (
            "the same, in pieces",
            plain(model=lambda: layers(7)),
            (Accumulate(2),),
            "failed in its model, in the module 0.0 (Linear)",
        ),
        ("labels out of range", plain(data=lambda: [rows(labels=99)] * 4), (), "failed in its loss ("),
        ("the user's loss", plain(loss=lambda output, batch: output.nonsense), (), f"failed in {HERE} line"),
        (
            "an optimizer that can't do it",
            plain(optimizer=torch.optim.SparseAdam),
            (),
            "failed in its optimizer (sparse_adam.py line",
        ),
        (
            "backward twice through one graph",
            plain(loss=lambda output, batch: kept_graph(output)),
            (),
            "failed in its backward pass (",
        ),
        ("data that raise", plain(data=lambda: (1 // 0 for _ in range(3))), (), f"failed in {HERE} line"),
        (
            "a data set of torch that can't be read",
            plain(data=lambda: Subset(TensorDataset(torch.zeros(9, 8)), [99] * 9)),
            (),
            "failed in its data (",
        ),
    ],
)
def test_a_failure_of_the_job_is_told_as_such(
    what: str, made: Job, techniques: tuple[Technique, ...], said: str, looked: bool
) -> None:
    graphs.clear()
    last = failing(made, techniques, looked)
    assert cause(last) is Cause.JOB and said in last.text and "the job failed" in last.text, last.text
    assert not last.trace


graphs: list[Tensor] = []


def kept_graph(output: Tensor) -> Tensor:
    graphs.append(output.square().mean())
    return sum(graphs)  # type: ignore[return-value]


def test_a_model_of_a_library_is_the_jobs(tmp_path: Path) -> None:
    for techniques in ((), (Checkpoint(every=1),)):
        last = failing(plain(model=library(tmp_path)), techniques)
        assert cause(last) is Cause.JOB and "failed in its model (net.py line" in last.text


def complex_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4))
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.register_forward_hook(lambda module, args, output: output + module.phase.abs().sum())
    return model


def test_a_failure_of_our_engines_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        accumulate, "scale_loss", partial(torch.cat, dim=0)
    )  # called with what it can't take, in our line
    last = failing(plain(), (Accumulate(2),))
    assert cause(last) is Cause.FAULT and last.text.startswith(
        "a fault of shoestring in training/memory/accumulate.py line"
    ), last.text
    assert "report" in last.text and "without Accumulate" in last.text and "Traceback" in last.trace


def test_a_users_optimizer_that_we_changed_is_ours() -> None:
    made = plain(model=complex_weights)
    assert isinstance(failing(made), Answer)
    last = failing(made, (FusedOptimizer(),))
    assert (
        cause(last) is Cause.FAULT and "core/running/run.py" in last.text and "without FusedOptimizer" in last.text
    ), last.text


def test_an_assertion_of_ours_is_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(
        "def only(*given):\n    raise AssertionError('ours')\n",
        str(ROOT / "training" / "memory" / "optimizers" / "step_in_backward.py"),
        "exec",
    )
    held: dict[str, Any] = {}
    exec(code, held)
    monkeypatch.setattr(step_in_backward, "only", held["only"])
    last = failing(plain(), (StepInBackward(),))
    assert cause(last) is Cause.FAULT
    assert last.text.startswith(
        "a promise of shoestring's own code was broken in training/memory/optimizers/step_in_backward.py"
    )


def test_what_the_machine_refuses_us_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    code = compile(
        "def scale_loss(loss, share):\n    raise full\n", str(ROOT / "training" / "memory" / "accumulate.py"), "exec"
    )
    held: dict[str, Any] = {"full": full}
    exec(code, held)
    monkeypatch.setattr(accumulate, "scale_loss", held["scale_loss"])
    last = failing(plain(), (Accumulate(2),))
    assert cause(last) is Cause.MISTAKE and "No space left on device" in last.text and "fault" not in last.text


ROOM = """
from shoestring.core.user_code.seams import calls_user, changes_user, repeats_user

@calls_user("recipe")
def cook(recipe):
    return recipe(None)

@repeats_user
def cook_again(recipe):
    return recipe(None)

@changes_user
def with_salt(recipe):
    return cook(recipe)

def by_itself(recipe):
    return recipe(None)
"""


@pytest.mark.parametrize(
    ("function", "ours", "place"),
    [
        ("cook", False, "its recipe"),
        ("cook_again", True, "kitchen.py line 10"),
        ("with_salt", True, "kitchen.py line 6"),
        ("by_itself", False, "kitchen.py line 17"),  # nothing marks it as a room's: it may as well be the user's
    ],
)
def test_a_room_of_another_package_marks_its_own_seams(function: str, ours: bool, place: str, tmp_path: Path) -> None:
    held: dict[str, Any] = {}
    exec(compile(ROOM, str(tmp_path / "kitchen.py"), "exec"), held)
    with pytest.raises(TypeError) as found:
        held[function](iter)  # a recipe without a line of Python
    told = blame_for(found.value)
    assert told.ours is ours and told.place == place


def test_a_mark_is_of_one_function_and_not_of_another_that_is_equal(tmp_path: Path) -> None:
    marked, plain = (
        compile("def cook(recipe):\n    return recipe(None)\n", str(tmp_path / "kitchen.py"), "exec") for _ in range(2)
    )
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    exec(marked, first)
    exec(plain, second)
    calls_user("recipe")(first["cook"])
    assert first["cook"].__code__ == second["cook"].__code__
    for held, place in ((first, "its recipe"), (second, "kitchen.py line 2")):
        with pytest.raises(TypeError) as found:
            held["cook"](iter)
        assert blame_for(found.value).place == place


class Named(nn.Module):
    """Its fourth layer takes nine numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.ModuleDict({"linear1": nn.Linear(9 if number == 3 else 8, 8)}) for number in range(5)
                )
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder["layers"]:  # type: ignore[union-attr]
            x = layer["linear1"](x)
        return x


@pytest.mark.parametrize("techniques", [(), (Checkpoint(every=1),), (Accumulate(2),)])
def test_the_user_s_line_and_the_module_of_the_model_are_named(techniques: tuple[Technique, ...]) -> None:
    last = failing(plain(model=Named), techniques)
    assert (
        f"failed in {HERE} line" in last.text
        and ", in the module encoder.layers.3.linear1 (Linear): RuntimeError" in last.text
    )


def test_torch_logs_nothing_of_operations_that_fail_on_fake_tensors(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    stage = Stage()
    with caplog.at_level(logging.ERROR, logger=log.name), pytest.raises(RuntimeError), stage:
        stage.model(lambda: nn.Linear(8, 8))(torch.zeros(2, 9))
    assert not caplog.records and not log.disabled
