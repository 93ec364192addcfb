"""What is measured of an engine, apart from seconds: which batches, which bytes, and in which processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import mmap

import pytest
import torch
from torch import nn

from shoestring.serving.engines.torch_engine import TorchEngine
from shoestring.serving.measuring.calibrate import (
    AT_ONCE,
    MIXED,
    REPEATS,
    ROWS,
    batch_seconds,
    engine_evidence,
    equal_batches,
    held_bytes,
    mixed_batches,
    together,
)
from shoestring.serving.sample import Sample
from tests.serving.engines.models import Reader, Subject, ids_alone, sharpened, whole


def samples(*lengths: int) -> list[Sample]:
    return [Sample({"x": torch.zeros(length)}, length) for length in lengths]


def sizes(batch: Sequence[Sample]) -> list[int]:
    return [one.length for one in batch]


def test_batches_of_one_length_are_the_shortest_the_middle_and_the_longest() -> None:
    found = [sizes(batch) for batch in equal_batches(samples(9, 2, 5, 4, 8))]
    assert found == [[length] * rows for length in (2, 5, 9) for rows in ROWS]
    assert [sizes(batch) for batch in equal_batches(samples(7, 7, 7))] == [[7] * rows for rows in ROWS]


def test_mixed_batches_have_all_lengths_and_two_sizes_each() -> None:
    found = [sizes(batch) for batch in mixed_batches(samples(9, 2, 5))]
    assert [len(batch) for batch in found] == [rows for pair in MIXED for rows in pair]
    assert all({2, 9} <= set(batch) for batch in found)


def test_a_batch_is_computed_once_before_it_is_timed() -> None:
    seen: list[list[int]] = []
    timings: list = []
    found = batch_seconds(lambda batch: seen.append(sizes(batch)), samples(3, 4), timings)
    assert found in {one.alone for one in timings}
    assert seen == [[3, 4]] * (REPEATS + 1) and len(timings) == REPEATS


class Tied(Reader):
    """Its table of words is also that of its places."""

    def __init__(self) -> None:
        super().__init__("all", layers=1)
        self.places.weight = nn.Parameter(self.table.weight[:64].detach().clone())
        self.spare = nn.Embedding(64, 32)
        self.spare.weight = self.places.weight


def test_weights_with_two_names_are_counted_once() -> None:
    model = Tied()
    wanted = sum(one.nbytes for one in model.parameters())
    engine: TorchEngine = Subject(sharpened(model), ids_alone(), whole).engine()
    timings: list = []
    found = engine_evidence(engine, engine.interface.samples, timings, replica=77)
    assert found.size_bytes == found.shared_bytes == wanted and found.replica_bytes == 77
    assert found.quality == 1.0 and found.tolerance == engine.tolerance
    assert found.packed is not None and found.packed.packed and not found.padded.packed and timings


def test_processes_compute_at_once_and_each_tells_its_own() -> None:
    """The process that asks has other children, which are not taken for those that compute."""
    other = os.fork()
    if not other:
        os._exit(5)
    answer = os.getpid()

    def compute() -> None:
        assert os.getpid() != answer

    found = together(compute, 2)
    assert len(found) == 2 and all(one.seconds > 0 and one.bytes > 0 for one in found) and AT_ONCE > 1
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 5


def test_a_process_that_fails_is_not_taken_for_a_fast_one() -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(AssertionError, match="says what it took"):
        together(fail, 1)


def test_what_this_process_wrote_itself_is_counted_as_its_own() -> None:
    before = held_bytes()
    with mmap(-1, 32 << 20) as held:  # fresh pages, where an allocator may give freed ones again
        held.write(b"x" * len(held))
        after = held_bytes()
    assert after.all >= after.written > 0
    assert after.written - before.written > 0.9 * (32 << 20)
