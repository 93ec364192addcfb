"""The documented examples of a model with batch norm learn: with sparse updates, and with noise."""

from __future__ import annotations

import pytest
import torch

import shoestring

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_digits_learns_with_sparse_updates() -> None:
    done = shoestring.federate("digits", rounds=8, per_round=8, clients=40, use=["TopK(share=0.05)"], width=8, depth=2)
    assert done.losses[-1] < 0.8 * done.losses[0]
    assert all(
        bool((value >= 0).all()) for name, value in done.model.state_dict().items() if name.endswith("running_var")
    )


@pytest.mark.slow
def test_private_digits_learns_and_releases_no_statistics() -> None:
    pytest.importorskip("dp_accounting")
    done = shoestring.federate("digits", rounds=6, per_round=200, clients=900, epsilon=8, delta=1e-4, width=8, depth=2)
    assert done.losses[-1] < 0.85 * done.losses[0]
    state = done.model.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert all(
        torch.equal(value, torch.ones_like(value)) for name, value in state.items() if name.endswith("running_var")
    )
