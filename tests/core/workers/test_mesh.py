"""Meshes of imagined workers: who stands where, and what is counted along which axis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh, imagined_mesh, lines, on_one_axis, own_line, rank_at
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.group_technique import axes_not_united

SIZES = st.dictionaries(st.sampled_from(["data", "stage", "tensor"]), st.integers(1, 4), min_size=1)


@given(sizes=SIZES, data=st.data())
def test_coordinates_lead_back_to_the_rank(sizes: dict[str, int], data: st.DataObject) -> None:
    mesh = imagined_mesh(sizes)
    rank = data.draw(st.integers(0, mesh.world - 1))
    place = mesh.coordinates(rank)
    assert mesh.rank_at(place) == rank and all(0 <= place[axis] < size for axis, size in sizes.items())


@given(sizes=SIZES, data=st.data())
def test_the_lines_along_an_axis_partition_the_workers(sizes: dict[str, int], data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(sorted(sizes)))
    found = lines(sizes, axis)
    world = imagined_mesh(sizes).world
    assert sorted(rank for line in found for rank in line) == list(range(world))
    assert all(len(line) == sizes[axis] for line in found)


@given(sizes=SIZES, data=st.data())
def test_a_line_differs_in_its_axis_only(sizes: dict[str, int], data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(sorted(sizes)))
    rank = data.draw(st.integers(0, imagined_mesh(sizes).world - 1))
    mesh = imagined_mesh(sizes, rank)
    line = own_line(mesh.sizes, axis, mesh.link.rank)
    assert line[mesh.along(axis).rank] == rank and mesh.along(axis).world == len(line)
    for number, other in enumerate(line):
        assert coordinates(sizes, other) == {**mesh.coordinates(rank), axis: number}


def test_bytes_are_counted_along_the_axis_they_are_sent() -> None:
    mesh = imagined_mesh({"data": 2, "stage": 3}, rank=4)
    mesh.along("data").sum(torch.zeros(300, dtype=torch.uint8))  # 2 (w - 1) / w
    mesh.along("stage").sum(torch.zeros(300, dtype=torch.uint8))
    assert (mesh.along("data").sent, mesh.along("stage").sent, mesh.link.sent, mesh.bytes_sent) == (300, 400, 0, 700)


def test_with_one_axis_there_is_one_link() -> None:
    link = Link(1, 4)
    mesh = on_one_axis(link)
    assert mesh.along("data") is mesh.link is link and own_line(mesh.sizes, "data", link.rank) == [0, 1, 2, 3]
    link.sum(torch.zeros(8))
    assert mesh.bytes_sent == link.sent > 0, "counted once"
    assert mesh.along("stage").world == 1, "nobody else on an axis that is not there"


def test_links_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(AssertionError, match="are not 6 workers"):
        Mesh(Link(0, 6), {"data": Link(0, 2)})
    with pytest.raises(AssertionError, match="does not stand at"):
        Mesh(Link(3, 4), {"data": Link(0, 2), "stage": Link(1, 2)})


def test_ranks_count_along_the_last_axis_first() -> None:
    sizes = {"data": 2, "stage": 2}
    assert [coordinates(sizes, rank) for rank in (0, 1, 2, 3)] == [
        {"data": 0, "stage": 0},
        {"data": 0, "stage": 1},
        {"data": 1, "stage": 0},
        {"data": 1, "stage": 1},
    ]
    assert rank_at(sizes, {"data": 1, "stage": 0}) == 2


def test_every_axis_with_several_workers_needs_exactly_one_technique() -> None:
    assert axes_not_united([], {"data": 1}) == [] == axes_not_united([DataParallel()], {"data": 4, "stage": 1})
    assert axes_not_united([], {"data": 2}) == ["data"] == axes_not_united([DataParallel(), Shard()], {"data": 2})
    assert axes_not_united([DataParallel()], {"data": 2, "stage": 2}) == ["stage"]
