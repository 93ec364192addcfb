"""What a server is told by its plan, and what a run keeps of what happened."""

from __future__ import annotations

import os
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.serving.events import Served
from shoestring.serving.measuring.service_time import ServiceTime, terms_of
from shoestring.serving.options import ListenOptions
from shoestring.serving.replicas.happenings import (
    BatchComputed,
    Happening,
    LoadFailed,
    ModelLoaded,
    ModelProcessDied,
    ReplicaDied,
    ServedFigures,
)
from shoestring.serving.serving_run import affine, bytes_of_tree, children, config_of, process_change_text, served_event

SECONDS = st.floats(0.0, 0.1)


@given(
    st.builds(ServiceTime, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans()),
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(0, 20),
)
def test_no_batch_is_expected_to_take_less_than_was_measured(time: ServiceTime, lengths: list[int], more: int) -> None:
    """Who is admitted is answered in time; the bound is reached where all are as long as the longest there is."""
    longest = max(lengths) + more
    _, rows, tokens, _ = terms_of(lengths, time.packed)
    assert affine(time, longest).seconds(rows, tokens) >= time.seconds(lengths) * (1 - 1e-12)
    full = [longest] * len(lengths)
    _, rows, tokens, _ = terms_of(full, time.packed)
    assert affine(time, longest).seconds(rows, tokens) == pytest.approx(time.seconds(full), rel=1e-9)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (ReplicaDied("m", 7, 3, 0), "replica 7 died; 3 requests wait again"),
        (ReplicaDied("m", 7, 3, 1), "replica 7 died; 3 requests wait again, 1 of them given up"),
        (ModelProcessDied("m", "signal 9"), "the model process died (signal 9); another one loads"),
        (LoadFailed("m", "no weights here", inf), "loading failed: no weights here"),
        (BatchComputed("m", 3, 40, 0.1), None),
        (ModelLoaded("m", 2, 1000), None),
    ],
)
def test_a_run_keeps_what_went_wrong_and_no_batch(one: Happening, text: str | None) -> None:
    assert process_change_text(one) == text


def test_figures_are_kept_as_they_were_told() -> None:
    told = ServedFigures("m", 10.0, 100, 3, 2, 0.01, 0.05, 7)
    kept = served_event(told)
    assert {name: getattr(kept, name) for name in vars(told) if name != "model"} == {
        name: value for name, value in vars(told).items() if name != "model"
    }
    assert type(kept) is Served


def test_a_server_listens_as_it_was_asked_to() -> None:
    found = config_of(ListenOptions(host="::1", port="0", token="secret", certificate="c.pem", key="k.pem"))
    assert (found.host, found.port, found.token, found.certificate, found.key) == ("::1", 0, "secret", "c.pem", "k.pem")
    assert (config_of(ListenOptions()).certificate, config_of(ListenOptions()).port) == ("", 8000)


def test_memory_of_children_is_counted_and_shared_pages_once() -> None:
    """A child that was forked has the same pages: it adds little until it writes some of its own."""
    before = bytes_of_tree(os.getpid())
    (ready, told), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        held = bytearray(b"x" * (1 << 25))
        os.write(told, b"r")
        os.read(wait, 1)
        os._exit(len(held) % 2)
    os.read(ready, 1)
    try:
        assert child in children(os.getpid())
        assert 0.9 * (1 << 25) < bytes_of_tree(os.getpid()) - before < 0.9 * before
    finally:
        os.write(go, b"g")
        os.waitpid(child, 0)
        for end in (ready, told, wait, go):
            os.close(end)
    assert child not in children(os.getpid()) and bytes_of_tree(child) == 0 and children(child) == []
