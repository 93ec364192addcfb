"""A ledger with other findings, or of more workers."""

from __future__ import annotations

from dataclasses import replace

from shoestring.core.costs.ledger import Ledger


def with_traits(ledger: Ledger, *traits: str) -> Ledger:
    return replace(ledger, findings=replace(ledger.findings, traits=ledger.findings.traits | {*traits}))


def of_world(ledger: Ledger, world: int) -> Ledger:
    return replace(ledger, workers=replace(ledger.workers, world=world))
