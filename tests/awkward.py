"""Awkward models: small, one trait each. What people write and techniques trip over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shoestring import Job
from tests.training.evidence import test_rehearse as steered
from tests.training.memory.recompute import test_block_state as kept

WIDTH = kept.WIDTH
SAMPLES = 6


@dataclass(frozen=True)
class Awkward:
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any] = lambda chance: torch.randn(SAMPLES, WIDTH, generator=chance)
    loss: Callable[[Any, Any], Tensor] = lambda output, batch: output.square().mean()
    forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9
    )
    more: dict[str, Any] = field(default_factory=dict)  # of the Job

    def job(self) -> Job:
        def data() -> list[Any]:
            chance = torch.Generator().manual_seed(0)
            return [self.batch(chance) for _ in range(4)]

        return Job(
            model=self.model,
            data=data,
            loss=self.loss,
            forward=self.forward,
            optimizer=self.optimizer,
            steps=4,
            **self.more,
        )


def chain(block: Callable[[], nn.Module], count: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(count)), nn.Linear(WIDTH, WIDTH))


class Work(nn.Module):
    """An ordinary block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.into(x)))


class Residual(Work):
    """Adds in place to what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.out(torch.tanh(self.into(x.clone())))
        return x


class OwnResult(Work):
    """Changes its own result in place, which is nobody's business."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.9).relu_()


class Nested(nn.Module):
    """Lists of lists of parts: no module stands for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Work(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))]) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for work, norm in self.layers:  # type: ignore[misc]
            x = x + norm(work(x))
        return x


class Dictionary(nn.Module):
    """Parts by name, in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part{number}": Work() for number in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


class Flow(nn.Module):
    """Is run by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Invertible() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for step in reversed(self.steps):
            x = step.inverse(x)  # type: ignore[operator]
        return x


class Invertible(Work):
    def inverse(self, y: Tensor) -> Tensor:
        return y - self.out(torch.tanh(self.into(y)))


class Bare(nn.Module):
    """Uses the weights of its parts without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Work() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            assert isinstance(part, Work)
            x = x + nn.functional.linear(torch.tanh(nn.functional.linear(x, part.into.weight)), part.out.weight)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, WIDTH), nn.ModuleList(Work() for _ in range(3))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for part in self.body:
            x = part(x)
        return self.head(x)  # type: ignore[no-any-return]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(50, WIDTH, sparse=True), nn.ModuleList(Work() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1)
        for part in self.body:
            x = part(x)
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        self.work = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(torch.tanh(self.work(x))) * self.weight, n=WIDTH)


class Initialised(Work):
    """Takes its scale from the first batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
                self.ready.fill_(True)
        return super().forward(x * self.scale)


class Normed(Work):
    """Holds its weights at length one by writing to them."""

    def forward(self, x: Tensor) -> Tensor:
        self.into.weight.data.copy_(nn.functional.normalize(self.into.weight.data, dim=1))
        return super().forward(x)


class Half(Work):
    """Some of it without gradients, some cut off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.into(x).mean(1, keepdim=True)
        return super().forward(x) + still + x.detach()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.also = x.sin()
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y + 0 * ctx.also, gradients[0] * x


class OwnFunction(Work):
    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(super().forward(x), torch.sigmoid(x))  # type: ignore[no-any-return, no-untyped-call]


class Checkpointed(Work):
    """Is recomputed by its author already."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Pair(NamedTuple):
    x: Tensor
    note: str
    extra: dict[str, Any]


class Structured(Work):
    """Takes and gives tensors in a named tuple with other things."""

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        assert type(pair) is Pair
        return Pair(super().forward(pair.x), pair.note + "!", {"last": pair.x, "none": None})


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(self.first(x), "", {})
        for part in self.body:
            pair = part(pair)
        return pair.x + pair.extra["last"]  # type: ignore[no-any-return]


class Named(Work):
    def forward(self, *, states: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return {"states": super().forward(states) * scale, "mask": mask}


class OfNamed(nn.Module):
    """Calls its blocks by keywords; they answer in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Named() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        told: dict[str, Any] = {"states": x, "mask": None}
        for number, part in enumerate(self.body):
            told = part(**told, scale=0.5 + number)
        return told["states"]  # type: ignore[no-any-return]


class Listing(Work):
    """Writes down what it did in a list that it is given."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        seen.append(x)
        return super().forward(x)


class OfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Listing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for part in self.body:
            x = part(x, seen)
        assert len(seen) == 3
        return x + torch.stack(seen).sum(0)


class Skipping(Work):
    """Gives back what it was given, untouched, every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else super().forward(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Work() for _ in range(3))
        for parameter in self.body[1].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x)
        return x


class Unused(Frozen):
    """Has a part that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Work()


class Hooked(Frozen):
    """Somebody looks in by hooks, and one changes what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_forward_hook(lambda module, args, output: output * 1.5)
        self.body[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.body[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


class Parameters(nn.Module):
    """Its weights are in a ParameterList, and no module is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Doubles(Work):
    """Computes in float64 in between."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class Weighted(nn.Module):
    """A weight by a parametrization that computes it before every use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = part(x)
        return x


class Stochastic(nn.Module):
    """Leaves layers out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Work() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.body:
            if torch.rand(()) > 0.3:
                x = part(x)
        return x


def penalised(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and its derivative by the input, which the loss holds small."""
    x = x.clone().requires_grad_()
    out = model(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def contrasted(output: Tensor, batch: Tensor) -> Tensor:
    """Every sample against all others of its batch."""
    close = output @ output.mT
    return nn.functional.cross_entropy(close, torch.arange(len(output)))


def varying(chance: torch.Generator) -> Tensor:
    length = int(torch.randint(2, 7, (), generator=chance))
    return torch.randn(SAMPLES, length, WIDTH, generator=chance)


def ids(chance: torch.Generator) -> Tensor:
    return torch.randint(20, (SAMPLES, 5), generator=chance)


def graph(chance: torch.Generator) -> dict[str, Tensor]:
    return {"nodes": torch.randn(7, WIDTH, generator=chance), "edges": torch.randint(7, (2, 12), generator=chance)}


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Work() for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for part in self.body:
            nodes = part(nodes + torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]]))
        return nodes


class Adjacent(Work):
    """Multiplies by a sparse matrix, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(SAMPLES).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.edges, x))


AWKWARD: dict[str, Awkward] = {
    "a sparse matrix": Awkward(chain(Adjacent)),
    "a buffer written through .data": Awkward(chain(kept.Codebook)),
    "a buffer that is replaced": Awkward(chain(kept.Replaced)),
    "a buffer that first changes in the second call": Awkward(lambda: kept.Twice(kept.Late)),
    "a generator of its own": Awkward(chain(kept.Draws)),
    "NumPy's generator": Awkward(chain(kept.DrawsNumPy)),
    "Python's random": Awkward(chain(kept.GlobalPython)),
    "NumPy's random": Awkward(chain(kept.GlobalNumPy)),
    "a list that grows": Awkward(chain(kept.Growing)),
    "state in an object": Awkward(chain(kept.InAnObject)),
    "a deque and a dict": Awkward(chain(kept.Sliding)),
    "an attribute changed in place": Awkward(chain(kept.InPlaceAttribute)),
    "a buffer by two names": Awkward(chain(kept.TwoNames)),
    "spectral norm, called twice": Awkward(lambda: kept.Twice(kept.spectral_block)),
    "a generator outside of all blocks": Awkward(chain(kept.Elsewhere)),
    "a counter outside of all blocks": Awkward(chain(kept.ElsewhereCounts)),
    "an input that is overwritten": Awkward(chain(kept.OverwritesInput)),
    "a residual added in place": Awkward(chain(Residual)),
    "a result changed in place": Awkward(chain(OwnResult)),
    "packed sequences": Awkward(kept.OfPacked),
    "named tuples": Awkward(OfPairs),
    "keywords and dicts": Awkward(OfNamed),
    "a list that blocks fill": Awkward(OfLists),
    "lists of lists of parts": Awkward(Nested),
    "a ModuleDict": Awkward(Dictionary),
    "another method than forward": Awkward(Flow),
    "weights used without their module": Awkward(Bare),
    "a value that steers": Awkward(
        steered.Steered, lambda chance: torch.randn(SAMPLES, steered.WIDTH, generator=chance)
    ),
    "a buffer that steers": Awkward(
        steered.ByBuffer, lambda chance: torch.randn(SAMPLES, steered.WIDTH, generator=chance)
    ),
    "experts": Awkward(steered.Experts, lambda chance: torch.randn(SAMPLES, steered.WIDTH, generator=chance)),
    "tied weights": Awkward(Tied, ids),
    "sparse gradients": Awkward(Sparse, ids, optimizer=lambda p: torch.optim.SGD(p, lr=0.05)),
    "complex weights": Awkward(chain(Complex), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "batch norm": Awkward(chain(lambda: nn.Sequential(Work(), nn.BatchNorm1d(WIDTH)))),
    "dropout": Awkward(chain(lambda: nn.Sequential(Work(), nn.Dropout(0.3)))),
    "layers left out at random": Awkward(Stochastic),
    "a first batch that initialises": Awkward(chain(Initialised)),
    "weights that the forward changes": Awkward(chain(Normed)),
    "a loss over pairs of samples": Awkward(chain(Work), loss=contrasted),
    "parts without gradients": Awkward(chain(Half)),
    "an autograd function of its own": Awkward(chain(OwnFunction)),
    "torch's own checkpoint inside": Awkward(chain(Checkpointed)),
    "second derivatives": Awkward(
        chain(Work), forward=penalised, loss=lambda output, batch: torch.cat(output).square().mean()
    ),
    "blocks that give back their input": Awkward(chain(Skipping)),
    "frozen weights": Awkward(Frozen),
    "a part that never runs": Awkward(Unused),
    "hooks": Awkward(Hooked),
    "a ParameterList": Awkward(Parameters),
    "float64 in between": Awkward(chain(Doubles)),
    "weight norm": Awkward(Weighted),
    "an LSTM": Awkward(
        lambda: nn.LSTM(WIDTH, WIDTH, 2),
        lambda chance: torch.randn(5, SAMPLES, WIDTH, generator=chance),
        forward=lambda model, batch: model(batch)[0],
    ),
    "varying lengths": Awkward(chain(Work), varying),
    "a graph": Awkward(Graph, graph, forward=lambda model, batch: model(**batch)),
}
