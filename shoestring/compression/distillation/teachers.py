"""Teachers of a distillation. They run in eval mode without gradients, and their weights never change.

    one teacher          its output
    several              an ensemble: the mean of their probabilities (computed in losses.py)
    passes=K             a dropout ensemble: K passes of each teacher with only dropout in training mode (Gal, Ghahramani:
                         Dropout as a Bayesian Approximation, 2016, arXiv 1506.02142; Bulo, Porzi, Kontschieder: Dropout
                         Distillation, 2016, ICML)
    a run of peers       all its peers (peers.py)
    a distilled run      like any run: so an ensemble can be distilled in two stages, first into one large model, then into a
                         small student

Teachers are loaded lazily, because planning inspects jobs whose teachers are not needed yet. A rehearsal runs the
teacher on a real batch, so its activations and weights are part of the predicted peak memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoestring.compression.distillation.losses import TeacherOutputs, compared_tensor
from shoestring.core.batch import Batch, tensors
from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward
from shoestring.core.running import random_state

T = TypeVar("T")
# Modules whose training mode only enables dropout. TransformerEncoderLayer is included because its mode selects a fused path.
DROPOUT_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)


@dataclass(frozen=True)
class LoadedTeacher:
    """A loaded teacher: its model and its forward function."""

    model: nn.Module
    forward: Callable[[nn.Module, Batch], Any] = default_forward
    name: str = "the teacher"


@dataclass(frozen=True)
class Teachers:
    """The teachers of a student, loaded on first use."""

    openers: tuple[Callable[[], LoadedTeacher], ...]
    passes: int = 0  # of each teacher, with dropout; 0: one pass in eval mode
    opened: dict[int, LoadedTeacher] = field(default_factory=dict)  # loaded teachers, by number

    def __post_init__(self) -> None:
        if not self.openers:
            raise Mistake(
                "a distillation without a teacher: name a run with --teacher RUN, or let peers learn from each other, --peers 2"
            )
        if self.passes < 0 or self.passes == 1:
            raise Mistake(
                f"--passes {self.passes}: a dropout ensemble takes 2 passes or more; 0 runs the teacher once, without dropout"
            )

    def say(self, batch: Batch, modules: Sequence[str] = ()) -> TeacherOutputs:
        """The teachers' outputs for a batch, and hidden states of these modules."""
        outputs: list[Tensor] = []
        hidden: list[list[Tensor]] = [[] for _ in modules]
        for number in range(len(self.openers)):
            one = self.ready(number, batch)
            with (
                torch.no_grad(),
                torch.autocast(device_of(batch).type, enabled=False),
                dropout_enabled(one, bool(self.passes)),
            ):
                for _ in range(self.passes or 1):
                    with record_outputs(one.model, modules, one.name) as seen:
                        outputs += (compared_tensor(each) for each in outputs_of_teacher(one.forward(one.model, batch)))
                    for place, name in zip(hidden, modules, strict=True):
                        place.append(seen[name])
        return TeacherOutputs(tuple(outputs), tuple(map(tuple, hidden)))

    def ready(self, number: int, batch: Batch) -> LoadedTeacher:
        """A loaded teacher, on the batch's device."""
        if number not in self.opened:
            found = run_in_thread(self.openers[number])
            found.model.requires_grad_(False).eval()
            self.opened[number] = found
        device = device_of(batch)
        if device.type != "cpu":
            self.opened[number].model.to(device)
        return self.opened[number]


def outputs_of_teacher(output: Any) -> tuple[Any, ...]:
    """The outputs in the result of a teacher's forward pass: one, or one of each of its peers."""
    from shoestring.compression.distillation.method import StudentOutputs
    from shoestring.compression.distillation.peers import PeerOutputs

    if isinstance(output, PeerOutputs):
        return output.each
    return (output.own,) if isinstance(output, StudentOutputs) else (output,)


def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a separate thread, so that dispatch modes of this thread (a rehearsal, a memory tracker) don't see
    it; the random state is left as it was."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    with random_state.fork_rng():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
    return done[0]


def device_of(batch: Batch) -> torch.device:
    return next((one.device for one in tensors(batch)), torch.device("cpu"))


@contextmanager
def dropout_enabled(teacher: LoadedTeacher, wanted: bool) -> Iterator[None]:
    """Enable dropout inside the context if `wanted`, with everything else in eval mode."""
    found = [module for module in teacher.model.modules() if isinstance(module, DROPOUT_MODULES)] if wanted else []
    if wanted and not any(has_dropout(module) for module in found):
        raise Mistake(
            f"{teacher.name} has no dropout, so all passes of a dropout ensemble would be the same: leave --passes out, or train "
            f"a teacher with nn.Dropout"
        )
    for module in found:
        module.training = True
    try:
        yield
    finally:
        for module in found:
            module.training = False


def has_dropout(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return (
            float(module.dropout) > 0 and getattr(module, "num_layers", 2) > 1
        )  # torch drops between layers of a recurrent net
    return float(getattr(module, "p", 0.0)) > 0


@contextmanager
def record_outputs(model: nn.Module, names: Sequence[str], who: str) -> Iterator[dict[str, Tensor]]:
    """Record the last output of each of these modules inside the context; channels of images are moved to the end."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                module = model.get_submodule(name)
            except AttributeError:
                there = ", ".join(list(dict(model.named_modules()))[1:9])
                raise Mistake(f"{who} has no module {name!r} to take hidden states of; it has {there}, ...") from None
            stack.callback(module.register_forward_hook(output_hook(found, name)).remove)
        yield found
    missing = [name for name in names if name not in found]
    if missing:
        raise Mistake(
            f"the module {missing[0]!r} of {who} was not called in its forward: name another one in hidden(...)"
        )


def output_hook(found: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        value = compared_tensor(output)
        found[name] = value.movedim(1, -1) if value.dim() > 3 else value

    return hook
