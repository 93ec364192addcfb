"""Each codec against its paper's equation."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import DeviceGroup
from shoestring.federated.techniques.send.levels import pack_levels, unpack_levels
from shoestring.federated.techniques.send.places import EncodedPlaces, decode_places, encode_places, shortest
from shoestring.federated.techniques.send.quantize import LEVELS, QuantizeUpdates
from shoestring.federated.techniques.send.quantize_down import QuantizeDown
from shoestring.federated.techniques.send.rotate import Rotate, hadamard, rotate, rotate_back, signs
from shoestring.federated.techniques.send.sketch import Sketch
from shoestring.federated.techniques.send.top_k import COUNTS, LEFT, PLACES, TopK
from tests.federated.techniques.send.made_up import SEED, MadeUp, alone, kinds, measured, plain_cost


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), data=st.data())
def test_places_survive_in_the_shortest_way(size: int, data: st.DataObject) -> None:
    count, seed = data.draw(st.integers(1, size)), data.draw(st.integers(0, 99))
    order = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)).argsort(1)
    kept = torch.zeros(3, size, dtype=torch.bool).scatter_(1, order[:, :count], True)
    found = encode_places(kept, count)
    assert sum(one[0].numel() * one.element_size() for one in found) == shortest(count, size)[0]
    back, good = decode_places(found, count, size)
    assert torch.equal(back, kept) and bool(good.all())


def test_large_blocks_have_places_of_two_bytes() -> None:
    size, where = 200_000, torch.tensor([0, 32767, 32768, 65534, 65535, 131069, 131070, 199_999])
    kept = torch.zeros(1, size, dtype=torch.bool).index_fill_(1, where, True)
    assert shortest(len(where), size) == (2 * 8 + 2 * 4, 2)
    assert torch.equal(decode_places(encode_places(kept, 8), 8, size)[0], kept)


@settings(max_examples=60, deadline=None)
@given(count=st.sampled_from([10, 200, 900]), seed=st.integers(0, 1000))
def test_places_that_make_no_sense_are_found_out(count: int, seed: int) -> None:
    """Whatever bytes a device sends, the right number of places is read, or its row is said to be wrong."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.zeros(2, 1000, dtype=torch.bool)
    kept[:, :count] = True
    real = encode_places(kept, count)
    found = EncodedPlaces(*(one.clone() for one in real))
    for one in found:
        if one.numel():
            one[0] = torch.randint(0, 256, one[0].shape, generator=generator, dtype=torch.uint8)
    back, good = decode_places(found, count, 1000)
    assert bool(good[1]) and torch.equal(back[1], kept[1]) and int(back[0].sum()) == count


def test_a_row_whose_places_make_no_sense_is_not_finite() -> None:
    made = MadeUp({"ada": torch.randn(1000), "bob": torch.randn(1000)}, (TopK(0.05),))
    order, sent = made.sent(["ada", "bob"])
    sent.payload[COUNTS][0, 0] += 1
    rows = made.parts.decode(order, sent).rows
    assert bool(rows[0].isnan().any()) and bool(rows[1].isfinite().all()) and sent.payload[PLACES].dtype == torch.uint8


def test_top_k_sends_the_largest_and_the_rest_later() -> None:
    """Error feedback by its equation, over rounds, with other updates each time."""
    made, left = alone(torch.zeros(40), TopK(0.1)), torch.zeros(40)
    for number in range(5):
        row = torch.randn(40, generator=torch.Generator().manual_seed(number))
        made.rows = {"ada": row}
        whole = row + left
        expected = torch.zeros(40)
        for place in sorted(range(40), key=lambda one: -abs(float(whole[one])))[:4]:
            expected[place] = whole[place]
        left = whole - expected
        assert torch.equal(made.arrived(["ada"], number)[0], expected)
        assert torch.equal(made.states["ada"][LEFT], left)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([8, 4, 2, 1]), count=st.integers(1, 50), seed=st.integers(0, 99))
def test_levels_survive_packing(bits: int, count: int, seed: int) -> None:
    found = torch.randint(0, 2**bits, (2, count), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    whole, none = pack_levels(found, bits)
    assert whole.shape[1] == -(-count * bits // 8) and torch.equal(unpack_levels(whole, none, bits), found)


def test_a_quantized_number_is_one_of_its_two_neighbours_and_its_mean_is_itself() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(2))
    made, drawn = alone(row, QuantizeUpdates(4, block=100)), []
    for number in range(400):
        drawn.append(made.arrived(["ada"], number)[0])
    for start in range(0, 300, 100):
        own = row[start : start + 100]
        step = float(own.max() - own.min()) / 15
        off = torch.stack(drawn)[:, start : start + 100] - own
        assert float(off.abs().max()) <= step * 1.0001
        assert float(off.mean(0).abs().max()) <= 5 * step / 2 / sqrt(400)


def test_draws_follow_from_seed_round_and_name() -> None:
    row = torch.randn(200, generator=torch.Generator().manual_seed(3))
    made = MadeUp({"ada": row, "bob": row}, (QuantizeUpdates(4),))
    first, again, later = (made.sent(["ada", "bob"], number)[1].payload[LEVELS] for number in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later) and not torch.equal(first[0], first[1])


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 99))
def test_a_rotation_keeps_the_norm_and_can_be_undone(size: int, seed: int) -> None:
    rows = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    drawn = signs(seed, 3, size)
    there = rotate(rows, *drawn)
    assert torch.allclose(there.norm(dim=1), rows.norm(dim=1), rtol=1e-5)
    assert torch.allclose(rotate_back(there, *drawn), rows, atol=1e-5)


def test_hadamard_is_the_matrix_of_its_definition() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    expected = (rows.view(3, 2, 16) @ matrix / 4).view(3, 32)
    assert torch.allclose(hadamard(rows, 16), expected, atol=1e-6)


def test_turned_an_update_with_heavy_tails_loses_less_than_half() -> None:
    row = kinds()["heavy"]
    assert measured(row, (Rotate(), QuantizeUpdates(4)), 3) < 0.5 * measured(row, (QuantizeUpdates(4),), 3)


def test_sketches_add_up() -> None:
    sketch, (one, two) = Sketch(share=0.3), torch.randn(2, 900, generator=torch.Generator().manual_seed(4))
    drawn = sketch.hashes(SEED, 0, 900)
    assert torch.allclose(
        sketch.table(one, *drawn) + sketch.table(two, *drawn), sketch.table(one + two, *drawn), atol=1e-4
    )


def test_a_sketch_is_that_of_its_definition_and_finds_what_is_large() -> None:
    sketch, row = Sketch(rows=3, share=0.4), torch.randn(600, generator=torch.Generator().manual_seed(5)) * 0.01
    row[17], row[300] = 5.0, -3.0
    places, sign = sketch.hashes(SEED, 0, 600)
    table = [[0.0] * 80 for _ in range(3)]
    for r in range(3):
        for place in range(600):
            table[r][int(places[r, place])] += float(sign[r, place] * row[place])
    assert torch.allclose(sketch.table(row, places, sign), torch.tensor(table), atol=1e-5)
    found = alone(row, sketch).arrived(["ada"])[0]
    assert {17, 300} <= set(found.nonzero().flatten().tolist()) and int((found != 0).sum()) <= 80 / 9
    assert abs(float(found[17]) - 5) < 0.1 and abs(float(found[300]) + 3) < 0.1


@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "huge"])
def test_top_k_of_the_same_bytes_is_nearer_than_a_sketch(kind: str) -> None:
    """Why the chooser does not try sketches."""
    row, sketch = kinds()[kind], Sketch(share=0.1)
    bytes_of_sketch = sketch.cost(plain_cost(row)).up
    best = next(one for one in map(TopK, (0.06, 0.05, 0.04)) if one.cost(plain_cost(row)).up <= bytes_of_sketch)
    assert measured(row, (best,)) <= measured(row, (sketch,), 3)


def test_devices_begin_from_the_nearest_levels_of_the_weights() -> None:
    weights = torch.randn(301, generator=torch.Generator().manual_seed(6))
    made = alone(torch.ones(301), QuantizeDown(4, block=64))
    rows = made.arrived(["ada"], weights=weights)
    given = made.started[0]
    for start in range(0, 301, 64):
        own = weights[start : start + 64]
        step = float(own.max() - own.min()) / 15
        off = given[start : start + 64] - own
        assert float(off.abs().max()) <= step / 2 * 1.0001
        assert len(set(given[start : start + 64].tolist())) <= 16
    assert torch.equal(rows, torch.ones(1, 301))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_stated_error_of_weights_is_kept_for_usual_ones(bits: int) -> None:
    weights = torch.randn(5000, generator=generator_of("weights")) * 0.05
    technique = QuantizeDown(bits)
    made = alone(torch.ones(5000), technique)
    made.arrived(["ada"], weights=weights)
    found = float((made.started[0] - weights).square().sum() / weights.square().sum())
    stated = technique.drift(plain_cost(weights))
    assert 0.3 * stated < found <= stated


def test_weights_that_are_not_finite_are_not_given_to_devices() -> None:
    made = alone(torch.ones(3), QuantizeDown())
    with pytest.raises(Mistake, match="diverged"):
        made.parts.order(made.server(0, torch.tensor([1.0, float("nan"), 2.0])), DeviceGroup(("ada",)))
