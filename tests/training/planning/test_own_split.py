"""Batches that only their owner can split: graphs, whose edges name nodes by their place in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job, Mistake
from shoestring.core.costs.hardware import Hardware
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.evidence.step import largest_worker
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.planning.planner import Planner
from tests.models import seeded

Graphs = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.relu(self.own(x) + torch.zeros_like(x).index_add(0, edges[1], self.others(x)[edges[0]]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, batch: Graphs) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch["edges"])
        pooled = x.new_zeros(len(batch["y"]), 16).index_add(0, batch["graph"], x)
        out: Tensor = self.head(pooled)
        return out


def batch_of(graphs: int, seed: int = 0) -> Graphs:
    """Graphs of 3, 4, 5 ... nodes, each a ring."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [3 + number for number in range(graphs)]
    starts = [sum(sizes[:number]) for number in range(graphs)]
    edges = [
        torch.stack([torch.arange(size), (torch.arange(size) + 1) % size]) + start
        for size, start in zip(sizes, starts, strict=True)
    ]
    return {
        "x": torch.randn(sum(sizes), 16, generator=draw),
        "edges": torch.cat(edges, 1),
        "graph": torch.repeat_interleave(torch.arange(graphs), torch.tensor(sizes)),
        "y": torch.arange(graphs) % 3,
    }


def split_graphs(batch: Graphs, pieces: int) -> list[Graphs]:
    count = len(batch["y"])
    if pieces > count:
        raise ValueError(f"{count} graphs")
    found = []
    for number in range(pieces):
        first, last = count * number // pieces, count * (number + 1) // pieces
        nodes = (batch["graph"] >= first) & (batch["graph"] < last)
        start = int(nodes.nonzero()[0])
        edges = batch["edges"][:, nodes[batch["edges"][0]]] - start
        found.append(
            {
                "x": batch["x"][nodes],
                "edges": edges,
                "graph": batch["graph"][nodes] - first,
                "y": batch["y"][first:last],
            }
        )
    return found


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {"split": split_graphs, "weight": lambda batch: len(batch["y"])} | changes
    return Job(
        model=Net,
        data=lambda: [batch_of(7)] * 9,
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        **settings,
    )


def weights_after(made: Job, *techniques: Accumulate) -> Tensor:
    model = seeded(made)
    for _ in steps(build_run(made, techniques, model), islice(Feed(made), 4)):
        pass
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_graphs_are_accumulated_by_the_jobs_own_split(pieces: int) -> None:
    assert torch.allclose(weights_after(job(), Accumulate(pieces)), weights_after(job()), atol=1e-6)
    assert (
        peak(rehearse(job(), (Accumulate(pieces),))).bytes
        == peak(track(job(), (Accumulate(pieces),), seeded(job()))).bytes
    )


def test_a_graph_batch_is_planned_with_pieces_where_the_job_can_split_it_and_without_where_not() -> None:
    ledger = Planner(job(), Hardware()).ledger()
    assert ledger.batch == 7 and not Accumulate(2).refusal(ledger)
    alone = Planner(job(split=None), Hardware()).ledger()
    assert "split=lambda batch, pieces" in Accumulate(2).refusal(alone)


def test_every_worker_of_a_group_gets_its_own_graphs() -> None:
    parts = [next(Feed(replace(job(), mesh=on_one_axis(Link(rank, 3))))) for rank in range(3)]
    assert [len(part["y"]) for part in parts] == [2, 2, 3]
    assert all(int(part["edges"].max()) == len(part["x"]) - 1 and int(part["edges"].min()) == 0 for part in parts)
    assert largest_worker(job(), 3) == 2


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (lambda batch, pieces: [batch], "asked for 2 pieces of a batch and gave 1 of them"),
        (lambda batch, pieces: batch, "gave a dict"),
        (lambda batch, pieces: [batch] * pieces, "the weight 14 of a batch with the weight 7"),
        (lambda batch, pieces: batch["nodes"], "the job's split failed for 2 pieces: KeyError"),
    ],
)
def test_a_split_that_does_not_give_the_batch_in_pieces_is_told(own: Callable[..., Any], told: str) -> None:
    with pytest.raises(Mistake, match=told):
        weights_after(job(split=own), Accumulate(2))
    ledger = Planner(job(split=own), Hardware()).ledger()
    assert told in ledger.findings.reasons["can't be split"]
