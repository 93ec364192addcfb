"""Models cut into stages: gradients of one process, or a refusal before anything is made; never something else.

Workers are threads here (tests/training/pipeline/cutting.py); the engine is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from tests.awkward import AWKWARD, WIDTH, Work
from tests.models import MODELS, job, rows
from tests.training.memory.recompute import test_block_state as kept
from tests.training.pipeline.cutting import alone, apart, cut, looked_at, uneven

slow = pytest.mark.slow
NEAR = 1e-6
QUICK = ("u-net", "resnet", "gpt2", "t5", "mixtral", "frozen bottom")


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(
            name, stages, marks=[] if (name, stages) in [(one, 2 + (one in ("u-net", "t5"))) for one in QUICK] else slow
        )
        for name in MODELS
        for stages in (2, 3, 4)
    ],
)
def test_gradients_of_a_model_in_stages_are_those_of_one_process(name: str, stages: int) -> None:
    """The first stage has one block, and several cuts are uneven: skips, tied embeddings and encoders' outputs cross them."""
    made = job(name)
    calls = len(looked_at(made).calls)
    if calls < stages:
        with pytest.raises(Mistake, match=f"calls {calls} blocks"):
            cut(made, Pipeline(stages, 1))
        return
    assert apart(cut(made, Pipeline(stages, 1, balance=uneven(calls, stages))), alone(made)) <= NEAR


REFUSED = {
    "spectral norm, called twice": "writes what depends on weights",  # its hook is on the block, so it runs before the block does
    "a buffer that first changes in the second call": "keeps something from call to call",
    "packed sequences": "failed in or after what comes before its blocks .*lengths",
    "a list that blocks fill": "changes a list or dict that it is given",
    "another method than forward": "calls 0 of its blocks",
    "weights used without their module": "calls 0 of its blocks",
    "a value that steers": "looks at a number that depends on weights",
    "a buffer that steers": "writes what depends on weights",
    "experts": "looks at a number that depends on weights",
    "layers left out at random": "did something else the second time",
    "blocks that give back their input": "did something else the second time",
    "second derivatives": "computes derivatives",
    "hooks": "has a backward hook",
    "a ParameterList": "calls 1 of its blocks",
    "an LSTM": "calls 1 of its blocks",
    "a graph": "can't be counted or split",
}
# Their random numbers are drawn by other workers than before, from global generators: another draw, as with dropout
DRAWN = ("Python's random", "NumPy's random", "a generator outside of all blocks")
UNSEEN = ("a counter outside of all blocks",)  # a global list: nobody sees that every worker has its own


@pytest.mark.parametrize(
    "name", [name if name in ("t5", "gpt2") else pytest.param(name, marks=slow) for name in MODELS]
)
def test_a_backward_in_two_halves_is_a_whole_one(name: str) -> None:
    """Of every model, also where weights reach the loss on several ways (a bias that all layers share, tied embeddings)."""
    made = job(name)
    assert apart(cut(made, Pipeline(2, 1, "zero-bubble")), alone(made)) <= NEAR


@pytest.mark.parametrize("name", [name for name in AWKWARD if name not in (*DRAWN, *UNSEEN)])
def test_an_awkward_model_is_right_or_refused_before_anything_is_made(name: str) -> None:
    made = AWKWARD[name].job()
    if name in REFUSED:
        torch.manual_seed(3)  # in which layers are left out
        with pytest.raises(Mistake, match=REFUSED[name]):
            looked_at(made)
            cut(made, Pipeline(2, 2))  # batches that can't be split are refused by the planner, or here
        return
    kept.SHARED_LIST.clear()
    assert apart(cut(made, Pipeline(2, 1), 3), alone(made, 3)) <= NEAR


# More of what people write


@dataclass
class Bag:
    x: Tensor


class Pair(NamedTuple):
    x: Tensor
    other: Tensor


class Opaque(Work):
    def forward(self, given: Any) -> Any:
        return Bag(super().forward(given.x))


class Shared:
    """A place that two blocks know."""

    left: Tensor | None = None


class Leaving(Work):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x) if self.shared.left is None else super().forward(x) + self.shared.left
        self.shared.left = found
        return found


class Body(nn.Module):
    """Four ordinary blocks; `between` says what happens around them."""

    seen: Tensor

    def __init__(self, block: Callable[[], nn.Module] = Work, count: int = 4) -> None:
        super().__init__()
        self.first, self.body, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(block() for _ in range(count)),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("seen", torch.zeros(()))
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x)
        return x


class OfBags(Body):
    def __init__(self) -> None:
        super().__init__(Opaque)

    def between(self, x: Tensor) -> Tensor:
        bag = Bag(x)
        for part in self.body:
            bag = part(bag)
        return bag.x


class Left(Body):
    def __init__(self) -> None:
        shared = Shared()
        super().__init__(lambda: Leaving(shared))
        self.shared = shared

    def between(self, x: Tensor) -> Tensor:
        self.shared.left = None
        return super().between(x)


class CalledTwice(Body):
    def between(self, x: Tensor) -> Tensor:
        return super().between(super().between(x))


class LongSkip(Body):
    """What comes out first is used last; and what is added in place is not what was carried."""

    def between(self, x: Tensor) -> Tensor:
        early = x * 2
        return super().between(x) + early


class AddsInPlace(Body):
    """Carried values are changed in place after a cut."""

    def between(self, x: Tensor) -> Tensor:
        carried = x * 1.0
        y = self.body[1](self.body[0](x))
        y += carried
        z = self.body[3](self.body[2](y))
        carried.relu_()
        return z + carried  # type: ignore[no-any-return]


class WritesAView(Body):
    """A carried value and a view of it, one of which is written to."""

    def between(self, x: Tensor) -> Tensor:
        x = x * 1.0
        half = x[:, : WIDTH // 2]
        y = self.body[1](self.body[0](x.detach()))
        half.mul_(2.0)
        return self.body[3](self.body[2](y)) + x + half.sum()  # type: ignore[no-any-return]


class MaskOfValues(Body):
    def between(self, x: Tensor) -> Tensor:
        mask = (x.sum(1, keepdim=True) > 0).float()
        for part in self.body:
            x = part(x) * mask
        return x


class ShapedByValues(Body):
    def between(self, x: Tensor) -> Tensor:
        return super().between(x)[x[:, 0] > 0].sum(0, keepdim=True) + x


class CountsBetween(Body):
    """A buffer that is written between blocks, by what no weight is in."""

    def between(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x) / (1 + self.seen)
            self.seen += 0.5
        return x


class CountsInPython(Body):
    count = 0

    def between(self, x: Tensor) -> Tensor:
        x = super().between(x) / (1 + self.count)
        self.count += 1
        return x


class KeepsBetween(Body):
    """A tensor on self between two blocks of one forward."""

    def between(self, x: Tensor) -> Tensor:
        self.memory = self.body[0](x)
        y = self.body[3](self.body[2](self.body[1](self.memory)))
        return y + self.memory  # type: ignore[no-any-return]


class LooksBack(Body):
    """The last block is given a function that knows what the first one gave, and calls it; with batches of fewer samples than `many`."""

    many = 100

    def between(self, x: Tensor) -> Tensor:
        first = self.body[0](x)
        return self.body[3](self.body[2](self.body[1](first)), lambda: first)  # type: ignore[no-any-return]

    class Part(Work):
        def forward(self, x: Tensor, earlier: Callable[[], Tensor] | None = None) -> Tensor:
            return super().forward(x + earlier() if earlier and len(x) < LooksBack.many else x)

    def __init__(self) -> None:
        super().__init__(LooksBack.Part)


class KeepsForLater(Body):
    """A tensor of the last step: of another worker, where it is used."""

    def between(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            x = x + self.memory
        x = super().between(x)
        self.memory = x.detach().mean(0)
        return x


class Diffusion(Body):
    """Noise that is drawn before the first block is what the last one is to find; and a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Work(), nn.Dropout(0.5)))

    def forward(self, x: Tensor) -> Any:
        noise = torch.randn_like(x)
        mask = functional.dropout(torch.ones(WIDTH), 0.5)
        found = self.first(x + noise)
        for part in self.body:
            found = part(found) * mask
        return self.last(found), noise, mask


class Reads(Body):
    def between(self, x: Tensor) -> Tensor:
        scale = torch.rand(()).item()
        return super().between(x) * scale


class ReadsPython(Body):
    def between(self, x: Tensor) -> Tensor:
        import random

        return super().between(x) * random.random()


class Detached(Body):
    """Two of four blocks get no gradient, and what the first gives reaches the loss on another way too, at first with one."""

    def between(self, x: Tensor) -> Tensor:
        first = self.body[0](x)
        third = self.body[2](self.body[1](first).detach())
        return self.body[3](third.detach() + first.detach()) + first.detach()  # type: ignore[no-any-return]


class PartlyDetached(Body):
    """One half of what a block gives gets a gradient, and a number is only looked at."""

    def between(self, x: Tensor) -> Tensor:
        left, right = self.body[0](x).split(WIDTH // 2, 1)
        y = self.body[1](torch.cat((left.detach(), right), 1))
        with torch.no_grad():
            size = y.square().mean(1, keepdim=True)
        return self.body[3](self.body[2](y)) / (1 + size)  # type: ignore[no-any-return]


class HalfPrecision(Body):
    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return super().between(x.double().float())


class WritesMask(Work):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        mask.mul_(0.5)
        return super().forward(x) * mask


class OfMasks(Body):
    def __init__(self) -> None:
        super().__init__(WritesMask)

    def between(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1)
        for part in self.body:
            x = part(x, mask)
        return x


class Pairs(Body):
    def forward(self, x: Tensor) -> Pair:
        found = self.between(self.first(x))
        return Pair(self.last(found), found)


def a_job(model: Callable[[], nn.Module], **changes: Any) -> Job:
    chance = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, WIDTH, generator=chance) for _ in range(4)]
    settings: dict[str, Any] = {
        "loss": squares,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "steps": 4,
        "data": lambda: batches,
    }
    return Job(model=model, **settings | changes)


def squares(output: Any, batch: Any) -> Tensor:
    return sum(one.square().mean() for one in ([output] if isinstance(output, Tensor) else output))  # type: ignore[return-value]


RIGHT = [CalledTwice, LongSkip, AddsInPlace, MaskOfValues, KeepsBetween, Pairs, HalfPrecision, Detached, PartlyDetached]
SAID = {
    OfBags: "in an object which nobody can look into",
    Left: "gave in an object|keeps something else",
    WritesAView: "uses another view",
    ShapedByValues: "a shape that follows from values",
    KeepsForLater: "an earlier forward left",
    Reads: "takes a random number out of its tensor",
    ReadsPython: "draws from Python's or NumPy's",
    CountsBetween: "writes to the buffer seen",
    CountsInPython: "keeps something else than before",
    OfMasks: "writes to a tensor that it is given",
}


@pytest.mark.parametrize("model", RIGHT, ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "plan",
    [
        Pipeline(2, 1),
        pytest.param(Pipeline(3, 1, balance=(1, 2, 1)), marks=slow),
        pytest.param(Pipeline(4, 1), marks=slow),
    ],
    ids=str,
)
def test_what_people_write_between_blocks_is_right(model: type[nn.Module], plan: Pipeline) -> None:
    if model is CalledTwice and plan.balance:
        plan = Pipeline(3, 1, balance=(1, 4, 3))
    assert apart(cut(a_job(model), plan, 3), alone(a_job(model), 3)) <= NEAR


@pytest.mark.parametrize(
    "plan",
    [Pipeline(2, 2, schedule) for schedule in ("1f1b", "zero-bubble")]
    + [Pipeline(2, 2, "interleaved", chunks=2), Pipeline(2, 2, "pipedream", flush=1)],
    ids=lambda plan: plan.schedule,
)
@pytest.mark.parametrize("model", [Detached, PartlyDetached], ids=lambda model: model.__name__)
def test_a_stage_that_gets_no_gradient_back_does_not_wait_for_one(model: type[Body], plan: Pipeline) -> None:
    """And its weights have none, rather than zeros, by which weight decay would move them."""
    found = cut(a_job(model), plan)
    if not plan.stashes:
        expected = alone(a_job(model))
        assert apart(found, expected) <= NEAR and found.gradients.keys() == expected.gradients.keys()


@pytest.mark.parametrize("model", SAID, ids=lambda model: model.__name__)
def test_what_would_be_different_is_refused(model: type[Body]) -> None:
    with pytest.raises(Mistake, match=SAID[model]):
        looked_at(a_job(model))


@pytest.mark.parametrize(
    ("many", "told"),
    [
        (100, "in an object which nobody can look into"),
        (5, r"body\.3 uses a value made earlier that is not among its arguments"),
        (0, ""),
    ],
)
def test_a_block_that_takes_something_from_elsewhere_is_told_of(
    many: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step; from the second on, whose batch is smaller; or never."""
    monkeypatch.setattr(LooksBack, "many", many)
    job = a_job(
        LooksBack,
        data=lambda: [torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size)) for size in (6, 4, 4)],
    )
    if told:
        with pytest.raises(Mistake, match=told):
            cut(job, Pipeline(2, 1), 3)
    else:
        assert apart(cut(job, Pipeline(2, 1), 3), alone(job, 3)) <= NEAR


@pytest.mark.parametrize(
    "technique", [Pipeline(2, 3), Pipeline(4, 2, "gpipe"), Pipeline(2, 4, "interleaved", chunks=2)], ids=str
)
def test_all_workers_use_the_random_numbers_that_one_of_them_drew(technique: Pipeline) -> None:
    """The target of the last block is the noise that the first one was given; a mask is everybody's."""
    given: list[Tensor] = []
    aimed: list[Tensor] = []

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x.detach().clone())
            return super().forward(x)

    def loss(output: Any, batch: Tensor) -> Tensor:
        aimed.append(batch + output[1])
        return functional.mse_loss(output[0], output[1])

    def model() -> nn.Module:
        made = Diffusion()
        made.first = First(WIDTH, WIDTH)
        return made

    cut(a_job(model, loss=loss), technique, 2)
    aimed = [x for x in aimed if len(x) < 6]  # those of pieces: nobody computes when a model is looked at
    assert len(aimed) == 2 * technique.pieces and all(any(torch.equal(one, x) for x in given) for one in aimed)


def test_weights_that_a_loss_captures_are_right() -> None:
    """A penalty by hand, over weights of all workers: each of them is then used by the last one, too."""
    captured = threading.local()  # a worker is a thread here

    def forward(model: nn.Module, batch: Tensor) -> Any:
        captured.model = model
        return model(batch)

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean() + 0.01 * sum(one.square().sum() for one in captured.model.parameters())

    made = a_job(Body, forward=forward, loss=loss)
    assert apart(cut(made, Pipeline(2, 1), 2), alone(made, 2)) <= NEAR


def test_a_frozen_bottom_sends_no_gradients_back() -> None:
    chain = looked_at(job("frozen bottom"))
    assert [any(value.gradient for value in crossing) for crossing in chain.crossing] == [False, False, False, True]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "naive"])
def test_pieces_may_be_fewer_than_asked_for_and_uneven(schedule: str) -> None:
    """A last short batch has five samples for four pieces, then two, then one; then another length."""
    batches = [torch.randn(*shape, WIDTH) for shape in ((5, 3), (2, 3), (1, 7), (4, 2))]
    made = a_job(Body, data=lambda: batches)
    for count in range(1, 5):
        assert apart(cut(made, Pipeline(2, 4, schedule), count), alone(made, count)) <= 2e-6


def test_a_batch_is_split_as_the_job_says() -> None:
    """By rows of dicts, of unequal weight; the loss is a mean over what is weighed."""

    def split(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        return [{"x": batch["x"][0:1]}, {"x": batch["x"][1:]}][:count]

    made = a_job(
        Body,
        data=lambda: [{"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))}] * 2,
        split=split,
        weight=lambda batch: float(len(batch["x"])),
    )
    assert apart(cut(made, Pipeline(2, 2), 2), alone(made, 2)) <= 2e-6


@pytest.mark.parametrize("more", [(Checkpoint(every=1),), ()], ids=str)
def test_blocks_that_are_computed_again_are_those_of_the_stage(more: tuple[Any, ...]) -> None:
    made = job("chain")
    assert apart(cut(made, Pipeline(3, 4, "1f1b"), 2, more), alone(made, 2)) <= 2e-6


def test_a_stage_holds_no_more_pieces_than_the_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """1f1b: S - stage of them, gpipe all."""
    from shoestring.training.pipeline.stages.stages import Stages

    most: dict[int, int] = {}
    backward = Stages.backward_piece

    def counted(self: Stages, *words: Any) -> None:
        most[self.link.rank] = max(most.get(self.link.rank, 0), len(self.flights))
        backward(self, *words)

    monkeypatch.setattr(Stages, "backward_piece", counted)
    for schedule, expected in (("1f1b", {0: 3, 1: 2, 2: 1}), ("gpipe", {0: 8, 1: 8, 2: 8})):
        most.clear()
        cut(a_job(Body), Pipeline(3, 8, schedule, balance=(1, 2, 1)))
        assert most == ({stage: min(count, 6) for stage, count in expected.items()}), schedule  # six samples


def test_nothing_that_a_model_keeps_is_changed_by_looking_at_it() -> None:
    made = a_job(lambda: nn.Sequential(kept.Growing(), kept.Sliding(), kept.InAnObject(), nn.BatchNorm1d(WIDTH)))
    model: Any = made.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    from shoestring.core.running.run import plain_run
    from shoestring.measure.blocks import blocks
    from shoestring.training.pipeline.partition.chain import chain_of

    chain_of(plain_run(made, model, blocks(model)), rows()[0][:, :WIDTH])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].seen == [] and model[1].counts == {"calls": 0, "nested": [0.0]} and model[2].kept.calls == 0


def test_what_nobody_uses_later_does_not_cross_a_cut() -> None:
    """Though it is still there: the forward names it."""

    class Named(Body):
        def between(self, x: Tensor) -> Tensor:
            first = self.body[0](x)
            second = self.body[1](first)
            third = self.body[2](second)
            return self.body[3](third)  # type: ignore[no-any-return]

    assert [len(crossing) for crossing in looked_at(a_job(Named)).crossing] == [0, 1, 1, 1]
