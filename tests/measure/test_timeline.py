"""The log of a step, read: peaks, what they are made of, and a ledger that gives the same peak."""

from __future__ import annotations

import pytest
import torch

from shoestring.core.costs.hardware import Hardware
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import Log, Moment, StorageEvent, Tracker
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.evidence.step import plain_ledger
from tests.models import job


def test_views_and_in_place_results_count_once_and_death_is_noticed() -> None:
    with Tracker() as tracker:
        x = torch.zeros(256)
        y = x.view(16, 16).add_(1)
        del x
        z = y + 1
        del y
    assert [event.bytes for event in tracker.log.events] == [1024, 1024, -1024]
    assert z.shape == (16, 16)


def test_the_peak_says_when_and_of_what() -> None:
    log = Log(
        [StorageEvent(1, 100), StorageEvent(2, 50), StorageEvent(2, -50), StorageEvent(3, 30)],
        [(1, Moment("forward", "a")), (2, Moment("backward", "a"))],
        {1: "parameters"},
    )
    found = peak(log)
    assert (found.bytes, found.moment, dict(found.parts)) == (
        150,
        Moment("forward", "a"),
        {"parameters": 100, "activations": 50},
    )


@pytest.mark.parametrize("name", ["chain", "gpt2", "u-net", "t5"])
def test_the_plain_ledger_walks_to_the_rehearsed_peak(name: str) -> None:
    made = job(name)
    log = rehearse(made, ())
    ledger = plain_ledger(made, log, None, Hardware(), None, ())
    assert ledger.peak == pytest.approx(peak(log).bytes, rel=0.02)


def test_a_log_survives_the_way_through_json() -> None:
    log = rehearse(job("chain"), ())
    again = Log.from_json(log.as_json())
    assert peak(again) == peak(log) and again.flops == log.flops
