"""The simulated CUDA caching allocator keeps the rules that torch documents of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.training.on_paper.caching_allocator import CachingAllocator, DeviceFull, round_up, segment_size

MiB = 1 << 20


def test_sizes_are_rounded_to_512_bytes() -> None:
    assert [round_up(size) for size in (1, 512, 513, MiB)] == [512, 512, 1024, MiB]


def test_segments_are_2_mib_20_mib_or_the_request_rounded_to_2_mib() -> None:
    assert [segment_size(size) for size in (512, MiB, MiB + 512, 10 * MiB - 512, 10 * MiB, 11 * MiB)] == [
        2 * MiB,
        2 * MiB,
        20 * MiB,
        20 * MiB,
        10 * MiB,
        12 * MiB,
    ]


def test_small_requests_share_a_segment() -> None:
    device = CachingAllocator(100 * MiB)
    for number in range(4):
        device.allocate(f"{number}", MiB // 2)
    assert device.reserved == 2 * MiB == device.allocated
    device.allocate("one more", 1)
    assert device.reserved == 4 * MiB and device.allocated == 2 * MiB + 512


def test_what_is_left_of_a_large_block_is_used_only_if_it_is_more_than_1_mib() -> None:
    device = CachingAllocator(100 * MiB)
    device.allocate("first", 11 * MiB)  # of a segment of 12 MiB, 1 MiB is left: not split
    assert device.allocated == 12 * MiB
    device.allocate("second", 2 * MiB)  # a new segment of 20 MiB, of which 18 are left
    device.allocate("third", 9 * MiB)
    assert device.reserved == 32 * MiB and device.allocated == 23 * MiB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    device = CachingAllocator(1000 * MiB)
    for name, size in (("large", 40 * MiB), ("middle", 30 * MiB), ("small", 20 * MiB)):
        device.allocate(name, size)
    for name in ("large", "middle", "small"):
        device.release(name)
    device.allocate("new", 22 * MiB)
    assert device.blocks["new"].address == 40 * MiB, "of the block of 30 MiB"
    assert device.reserved == 90 * MiB
    device.allocate("rest", 8 * MiB)
    assert device.blocks["rest"].address == 62 * MiB, "what was left of it"


def test_freed_neighbours_grow_together_in_either_order() -> None:
    for order in ("abc", "cba", "acb", "bac"):
        device = CachingAllocator(20 * MiB)
        for name in "abc":
            device.allocate(name, 5 * MiB)
        for name in order:
            device.release(name)
        device.allocate("whole", 20 * MiB)  # fits only into the segment as it was
        assert device.reserved == 20 * MiB and device.retries == 0


def test_a_stream_never_gets_a_block_of_another() -> None:
    device = CachingAllocator(100 * MiB)
    device.allocate("here", 20 * MiB, "compute")
    device.release("here")
    device.allocate("there", 20 * MiB, "gather")
    assert device.reserved == 40 * MiB


def test_where_there_is_no_more_wholly_free_segments_are_given_back() -> None:
    device = CachingAllocator(50 * MiB)
    device.allocate("a", 20 * MiB)
    device.allocate("b", 20 * MiB)
    device.release("a")
    device.allocate("c", 30 * MiB)
    assert device.retries == 1 and device.reserved == 50 * MiB
    device.release("b")
    device.allocate("part", 2 * MiB)  # pins the segment that b had
    device.release("c")
    with pytest.raises(DeviceFull):
        device.allocate("d", 40 * MiB)


def test_a_name_is_allocated_once() -> None:
    device = CachingAllocator(10 * MiB)
    device.allocate("a", 1)
    with pytest.raises(ValueError, match="already"):
        device.allocate("a", 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 30 * MiB), st.sampled_from(["compute", "gather"])), max_size=60
    )
)
def test_blocks_never_overlap_and_all_freed_is_whole_again(steps: list[tuple[int, int, str]]) -> None:
    device = CachingAllocator(1 << 40)
    wanted: dict[str, int] = {}
    for number, size, stream in steps:
        name = str(number)
        if name in wanted:
            device.release(name)
            del wanted[name]
        else:
            device.allocate(name, size, stream)
            wanted[name] = size
        spans = sorted((block.address, block.address + block.size) for block in device.blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(device.blocks[name].size >= size for name, size in wanted.items())
        assert (
            device.allocated
            == sum(block.size for block in device.blocks.values())
            <= device.reserved
            <= device.most_reserved
        )
        free = sum(size for there in device.unused.values() for size, _, _ in there)
        assert free + device.allocated == device.reserved
    for name in wanted:
        device.release(name)
    device.give_back()
    assert device.reserved == 0 and device.allocated == 0
