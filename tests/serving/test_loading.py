"""What is served is named by the user: how it is called, what is taken of its data, and what another process is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.serving.loading import ServedSource, several
from shoestring.serving.sample import Sample


@given(st.lists(st.integers(1, 99), min_size=1, max_size=20), st.integers(1, 40))
def test_several_samples_reach_from_the_shortest_to_the_longest(lengths: list[int], count: int) -> None:
    samples = [Sample({"x": torch.zeros(length)}, length) for length in lengths]
    chosen = [one.length for one in several(samples, count)]
    assert len(chosen) == count and chosen == sorted(chosen) and set(chosen) <= set(lengths)
    assert chosen[0] == min(lengths) and (count == 1 or chosen[-1] == max(lengths))
    if count >= len(lengths):
        assert set(chosen) == set(lengths), "none is left out where there is room for all"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/texts", "texts"),
        ("runs/texts/", "texts"),
        ("jobs/texts.py", "texts"),
        ("digits", "digits"),
        ("v1.2", "v1.2"),
        ("texts/..", "here"),
        (".", "here"),
        ("..", "above"),
        ("/", "model"),
    ],
)
def test_a_model_is_called_as_its_file_or_folder(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` and `..` can't be in an address: clients take them for a way through it."""
    (tmp_path / "above" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above" / "here")
    assert ServedSource(path).name == name


def test_a_source_is_the_same_in_the_process_that_loads_it() -> None:
    source = ServedSource("runs/texts", "texts.py", {"width": 8, "data": "a.txt"}, newest=True)
    assert ServedSource(**json.loads(json.dumps(source.arguments))) == source


def test_a_folder_is_packed_if_it_has_the_manifest_of_one(tmp_path: Path) -> None:
    assert not ServedSource(str(tmp_path)).is_packed and not ServedSource(str(tmp_path / "none")).is_packed
    (tmp_path / "manifest.json").write_text("{}")
    assert ServedSource(str(tmp_path)).is_packed
