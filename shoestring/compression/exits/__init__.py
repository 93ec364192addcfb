"""Compute less for easy samples: early exits, cascades of models, adaptive computation time.

    exit_job (train heads) -> gather_evidence (evidence on held-out rows) -> calibrate (thresholds) -> EarlyExitModel, CascadeModel

`AdaptiveRecurrent`, `AdaptiveUnits` and `AdaptiveTokens` learn how long to compute; their outputs include the ponder
cost.
"""

from __future__ import annotations

from shoestring.compression.exits.bounds import at_least, at_most
from shoestring.compression.exits.cascade import CascadeModel
from shoestring.compression.exits.confidence import MEASURES
from shoestring.compression.exits.early_exit import EarlyExitModel, Head, with_exits
from shoestring.compression.exits.evidence import PartSeconds, gather_evidence, seconds_by_part
from shoestring.compression.exits.exit_job import AllExits, exit_job
from shoestring.compression.exits.leaves_early import ExitOutput, LeavesEarly
from shoestring.compression.exits.ponder import Pondered, ponder_job
from shoestring.compression.exits.recurrent import AdaptiveRecurrent
from shoestring.compression.exits.spatial import AdaptiveUnits
from shoestring.compression.exits.thresholds import ExitCalibration, ExitEvidence, Point, calibrate, frontier, operate
from shoestring.compression.exits.tokens import AdaptiveTokens

__all__ = [
    "MEASURES",
    "AdaptiveRecurrent",
    "AdaptiveTokens",
    "AdaptiveUnits",
    "AllExits",
    "CascadeModel",
    "EarlyExitModel",
    "ExitCalibration",
    "ExitEvidence",
    "ExitOutput",
    "Head",
    "LeavesEarly",
    "PartSeconds",
    "Point",
    "Pondered",
    "at_least",
    "at_most",
    "calibrate",
    "exit_job",
    "frontier",
    "gather_evidence",
    "operate",
    "ponder_job",
    "seconds_by_part",
    "with_exits",
]
