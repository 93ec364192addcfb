"""A replica computes a batch that failed again one sample at a time, and says whose fault it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoestring.serving.replicas.replica import reply_to_batch
from shoestring.serving.replicas.wire import SampleFailed
from shoestring.serving.sample import Answers, Sample
from tests.serving.tiny import Scale, sample


class Short(Scale):
    """It takes three numbers at most, and says so as torch does where shapes do not fit."""

    def __init__(self) -> None:
        super().__init__(2.0, "")
        self.gone = False

    def answers(self, samples: Sequence[Sample]) -> Answers:
        if self.gone or any(one.length > 3 for one in samples):
            raise RuntimeError("the expanded size of the tensor must match the existing size")
        return super().answers(samples)


def test_a_sample_that_fails_alone_is_wrong_whatever_the_model_raises() -> None:
    reply = reply_to_batch(7, [sample(1.0), sample(1.0, 1.0, 1.0, 1.0), sample(3.0)], Short(), lambda: 0.0)
    first, failed, last = reply.answers
    assert isinstance(failed, SampleFailed) and failed.of_input and "must match" in failed.text
    assert not isinstance(first, SampleFailed) and not isinstance(last, SampleFailed)
    assert (float(first["total"]), float(last["total"])) == (2.0, 6.0)


@pytest.mark.parametrize("known", [True, False], ids=["fails for a known sample too", "no sample is known"])
def test_an_engine_that_answers_nothing_is_at_fault_itself(known: bool) -> None:
    engine = Short()
    engine.gone = True
    engine.known = engine.known if known else None
    (failed,) = reply_to_batch(7, [sample(1.0)], engine, lambda: 0.0).answers
    assert isinstance(failed, SampleFailed) and not failed.of_input
